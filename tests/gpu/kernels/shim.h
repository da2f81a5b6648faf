// The CUDA that hpccomm/nccl/intra_node.cu uses, on a CPU: each CUDA thread is a thread, __syncthreads a barrier.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__

struct uint4 { unsigned x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
static thread_local pthread_barrier_t* block_barrier;
static inline void __syncthreads() { pthread_barrier_wait(block_barrier); }

static inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }

// In the place of the statements in PTX (build.py puts them there).
static inline float half_to_float(unsigned short bits) { _Float16 half; memcpy(&half, &bits, 2); return (float)half; }
static inline unsigned short float_to_half(float value) {
    _Float16 half = (_Float16)value;
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static inline void store_release(unsigned* word, unsigned value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline unsigned load_acquire(unsigned* word) {
    sched_yield();  // there are more threads than cores
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

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
