// Calls of a kernel in a row, with the ranks as threads of one process, so that ThreadSanitizer sees all of them. All calls
// have the same arguments, as those of a CUDA graph's replays. Prints how many values are wrong.
#include <cstdio>

#include "launch.h"

const int MAX_RANKS = 8;
typedef unsigned int u32;
typedef unsigned long long u64;

extern const int size;  // the number of ranks
void kernel(int rank, void* out, const void* memory, u64 vectors);

struct Memory { void *given[MAX_RANKS], *flags[MAX_RANKS]; };

const int calls = 4, blocks = 2, threads = size;
const u64 vectors = 6 * size - 3, beyond = size;
const u32 untouched = 0x7fc00001;

struct Rank {
    std::vector<uint4> given = std::vector<uint4>(vectors);
    std::vector<uint4> out = std::vector<uint4>(vectors + beyond, {untouched, untouched, untouched, untouched});
    std::vector<u32> flags = std::vector<u32>(2 * blocks * MAX_RANKS, -3u);  // the numbers will pass by 0
    int wrong = 0;
};

// Thirds, so that the order of the additions is seen.
static float given(int rank, int call, u64 i) { return float((i * 7 + rank * 13 + call * 31) % 101) / 3; }

static float sum(int call, u64 i) {
    float total = 0;
    for (int rank = 0; rank < size; rank++) total += given(rank, call, i);
    return total;
}

int main() {
    std::vector<Rank> ranks(size);
    std::vector<std::thread> streams;
    for (int rank = 0; rank < size; rank++)
        streams.emplace_back([&, rank] {
            Memory memory = {};
            for (int peer = 0; peer < size; peer++) {
                memory.given[peer] = ranks[peer].given.data();
                memory.flags[peer] = ranks[peer].flags.data();
            }
            uint4* out = ranks[rank].out.data();
            for (int call = 0; call < calls; call++) {
                auto bits = [&](u64 i) { return __float_as_uint(given(rank, call, i)); };
                for (u64 i = 0; i < vectors; i++)
                    ranks[rank].given[i] = make_uint4(bits(4 * i), bits(4 * i + 1), bits(4 * i + 2), bits(4 * i + 3));
                launch(blocks, threads, [&] { kernel(rank, out, &memory, vectors); });
                for (u64 i = 0; i < 4 * (vectors + beyond); i++) {
                    u32 words[4] = {out[i / 4].x, out[i / 4].y, out[i / 4].z, out[i / 4].w};
                    ranks[rank].wrong += words[i % 4] != (i < 4 * vectors ? __float_as_uint(sum(call, i)) : untouched);
                }
            }
        });
    for (auto& stream : streams) stream.join();
    int total = 0;
    for (auto& rank : ranks) total += rank.wrong;
    printf("%d wrong\n", total);
    return total != 0;
}
