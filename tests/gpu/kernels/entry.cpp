// The kernels as a C function, for the stand-in.
#include "intra_node.inc"

template <class T>
static void run(const char* name, void* out, void* const* buffers, void* const* flags, int rank, u64 fourth, u32 number,
                u64 vectors, int blocks, int threads) {
    launch(blocks, threads, [=] {
        auto result = (uint4*)out;
        auto parts = (uint4* const*)buffers;
        auto words = (u32* const*)flags;
        if (!strcmp(name, "one_shot")) one_shot<T>(result, parts, words, rank, (int)fourth, number, vectors);
        if (!strcmp(name, "two_shot")) two_shot<T>(result, parts, words, rank, (int)fourth, number, vectors);
        if (!strcmp(name, "cube_mesh")) cube_mesh<T>(result, parts, words, rank, fourth, number, vectors);
    });
}

extern "C" void intra_node(const char* name, const char* dtype, void* out, void* const* buffers, void* const* flags,
                           int rank, u64 fourth, u32 number, u64 vectors, int blocks, int threads) {
    auto kernel = !strcmp(dtype, "float32") ? run<Float32> : !strcmp(dtype, "float16") ? run<Float16> : run<BFloat16>;
    kernel(name, out, buffers, flags, rank, fourth, number, vectors, blocks, threads);
}
