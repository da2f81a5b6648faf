// The CUDA that hpccomm's kernels use, on a CPU: each CUDA thread is a thread, __syncthreads a barrier.
#pragma once
#include <sched.h>
#include <string.h>
#include <unistd.h>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)

struct uint4 {
    unsigned x, y, z, w;
    uint4& operator=(const uint4& other) {  // word by word: g++'s ThreadSanitizer overlooks the write of `p[i] = f()`
        x = other.x, y = other.y, z = other.z, w = other.w;
        return *this;
    }
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index { unsigned x, y; };
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;
void __syncthreads();

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
    static thread_local unsigned tries = 0;
    ++tries % 64 ? sched_yield() : usleep(20);  // there are more threads than cores
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
