// races KERNEL RANKS: calls in a row, with the ranks as threads of one process, so that ThreadSanitizer sees all of them.
// What a rank has no link to is a null pointer. Prints how many values are wrong.
#include "intra_node.inc"

#include <cstdio>
#include <cstdlib>

int main(int, char** argv) {
    const char* kernel = argv[1];
    const int ranks = atoi(argv[2]), calls = 6, blocks = 2, threads = 8;
    const u64 vectors = 37, second = vectors;
    const bool is_mesh = !strcmp(kernel, "cube_mesh");
    std::vector<std::vector<uint4>> buffers(ranks, std::vector<uint4>(2 * vectors)), outs(ranks, std::vector<uint4>(vectors));
    std::vector<std::vector<u32>> flags(ranks, std::vector<u32>(blocks * MAX_RANKS));
    std::vector<int> wrong(ranks);
    std::vector<std::thread> streams;
    auto given = [](int rank, int call, u64 i) { return float((i * 7 + rank * 13 + call * 31) % 101); };
    for (int rank = 0; rank < ranks; rank++)
        streams.emplace_back([&, rank] {
            std::vector<uint4*> linked(ranks);
            std::vector<u32*> words(ranks);
            for (int peer = 0; peer < ranks; peer++)
                if (!is_mesh || (peer & 4) == (rank & 4) || (peer ^ 4) == rank)
                    linked[peer] = buffers[peer].data(), words[peer] = flags[peer].data();
            auto out = outs[rank].data();
            u32 number = 1;
            for (int call = 0; call < calls; call++, number += 3) {
                for (u64 i = 0; i < vectors; i++)
                    linked[rank][i] = make_uint4(
                        __float_as_uint(given(rank, call, 4 * i)), __float_as_uint(given(rank, call, 4 * i + 1)),
                        __float_as_uint(given(rank, call, 4 * i + 2)), __float_as_uint(given(rank, call, 4 * i + 3)));
                launch(blocks, threads, [&] {
                    auto b = linked.data();
                    auto w = words.data();
                    if (!strcmp(kernel, "one_shot")) one_shot<Float32>(out, b, w, rank, ranks, number, vectors);
                    if (!strcmp(kernel, "two_shot")) two_shot<Float32>(out, b, w, rank, ranks, number, vectors);
                    if (is_mesh) cube_mesh<Float32>(out, b, w, rank, second, number, vectors);
                });
                for (u64 i = 0; i < 4 * vectors; i++) {
                    float expected = 0;
                    for (int peer = 0; peer < ranks; peer++) expected += given(peer, call, i);
                    u32 words_of_vector[4] = {out[i / 4].x, out[i / 4].y, out[i / 4].z, out[i / 4].w};
                    wrong[rank] += __uint_as_float(words_of_vector[i % 4]) != expected;
                }
            }
        });
    for (auto& stream : streams) stream.join();
    int total = 0;
    for (int each : wrong) total += each;
    printf("%d wrong\n", total);
    return total != 0;
}
