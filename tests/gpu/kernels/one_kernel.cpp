// KERNEL for each of SIZE ranks, for races.cpp.
#include "intra_node.inc"

extern const int size = SIZE;  // initialised before those of races.cpp, as a constant expression

template <int RANK = 0>
void run(int rank, void* out, const void* memory, u64 vectors) {
    if constexpr (RANK < SIZE) {
        if (rank == RANK) return KERNEL<Float32, SIZE, RANK>((uint4*)out, *(const Memory*)memory, vectors);
        run<RANK + 1>(rank, out, memory, vectors);
    }
}

void kernel(int rank, void* out, const void* memory, u64 vectors) { run(rank, out, memory, vectors); }
