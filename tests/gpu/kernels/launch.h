// Start a kernel on a CPU. Apart from shim.h, since these headers take longer to compile than the kernels.
#pragma once
#include <pthread.h>

#include <thread>
#include <vector>

#include "shim.h"

static thread_local pthread_barrier_t* block_barrier;
void __syncthreads() { pthread_barrier_wait(block_barrier); }

template <class Kernel>
void launch(int blocks, int threads, Kernel kernel) {
    std::vector<pthread_barrier_t> barriers(blocks);
    std::vector<std::thread> all;
    for (auto& barrier : barriers) pthread_barrier_init(&barrier, nullptr, threads);
    for (int block = 0; block < blocks; block++)
        for (int thread = 0; thread < threads; thread++)
            all.emplace_back([&, block, thread] {
                threadIdx.x = thread, blockIdx.x = block, blockDim.x = threads, gridDim.x = blocks;
                block_barrier = &barriers[block];
                kernel();
            });
    for (auto& thread : all) thread.join();
    for (auto& barrier : barriers) pthread_barrier_destroy(&barrier);
}
