// The kernel of hpccomm/cuda/copies.cu as a C function.
#include "copies.inc"
#include "launch.h"

template <int AXES>
static void run(int bytes, const Copies<AXES>& all, int blocks, int count, int threads) {
    auto kernel = bytes == 1 ? copy<1, AXES> : bytes == 2 ? copy<2, AXES> : bytes == 4 ? copy<4, AXES>
                : bytes == 8 ? copy<8, AXES> : copy<16, AXES>;
    for (int row = 0; row < count; row++)
        launch(blocks, threads, [&] {
            blockIdx.y = row;
            kernel(all);
        });
}

extern "C" void copies(int bytes, int axes, const void* all, int blocks, int count, int threads) {
    if (axes == FEW) run(bytes, *(const Copies<FEW>*)all, blocks, count, threads);
    else run(bytes, *(const Copies<32>*)all, blocks, count, threads);
}
