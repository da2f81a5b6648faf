// The kernel of hpccomm/cuda/copies.cu as a C function.
#include "copies.inc"
#include "launch.h"

extern "C" void copies(int bytes, const Copies* all, int blocks, int count, int threads) {
    auto kernel = bytes == 1 ? copy<1> : bytes == 2 ? copy<2> : bytes == 4 ? copy<4> : bytes == 8 ? copy<8> : copy<16>;
    for (int row = 0; row < count; row++)
        launch(blocks, threads, [&] {
            blockIdx.y = row;
            kernel(*all);
        });
}
