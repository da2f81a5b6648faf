// The kernels of rank ME of SIZE as a C function, for the stand-in.
#include "intra_node.inc"
#include "launch.h"

template <class T>
static void run(const char* name, uint4* out, const Memory& memory, u64 vectors, int blocks, int threads) {
    launch(blocks, threads, [&] {
        if (!strcmp(name, "one_shot")) one_shot<T, SIZE, ME>(out, memory, vectors);
        if (!strcmp(name, "two_shot")) two_shot<T, SIZE, ME>(out, memory, vectors);
    });
}

extern "C" void intra_node(const char* name, const char* dtype, uint4* out, const Memory* memory, u64 vectors, int blocks,
                           int threads) {
    auto kernel = !strcmp(dtype, "float32") ? run<Float32> : !strcmp(dtype, "float16") ? run<Float16> : run<BFloat16>;
    kernel(name, out, *memory, vectors, blocks, threads);
}
