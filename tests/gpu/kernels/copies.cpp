// The kernel of hpccomm/cuda/copies.cu as a C function.
#include "copies.inc"
#include "launch.h"

template <int AXES, int COPIES>
static void run(int bytes, const Copies<AXES, COPIES>& all, int blocks, int count, int threads) {
    auto kernel = bytes == 1 ? copy<1, AXES, COPIES> : bytes == 2 ? copy<2, AXES, COPIES>
                : bytes == 4 ? copy<4, AXES, COPIES> : bytes == 8 ? copy<8, AXES, COPIES> : copy<16, AXES, COPIES>;
    for (int row = 0; row < count; row++)
        launch(blocks, threads, [&] {
            blockIdx.y = row;
            kernel(all);
        });
}

extern "C" void copies(int bytes, int axes, int copies, const void* all, int blocks, int count, int threads) {
    if (axes != FEW) run(bytes, *(const Copies<32, 6>*)all, blocks, count, threads);
    else if (copies == 1) run(bytes, *(const Copies<FEW, 1>*)all, blocks, count, threads);
    else run(bytes, *(const Copies<FEW, 32>*)all, blocks, count, threads);
}
