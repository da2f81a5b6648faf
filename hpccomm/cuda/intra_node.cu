// Kernels of hpccomm/nccl/intra_node.py: all_reduce (SUM) among GPUs of a node that can access each other's buffers.
//
// Each rank's contribution is in its memory before the launch. Sums are made in float32 in rank order, so the result is
// bitwise the same on every rank. A "vector" is 16 bytes. RANKS and RANK are template arguments: loops unroll, and the
// reads from all ranks are issued together. Each rank starts with its own memory (or its successor's), so the reads do
// not all go to the same GPU first.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

const int MAX_RANKS = 8;
const int THREADS = 512;  // per block; tells the compiler that each thread may use 128 registers

// The addresses of all ranks' memory in this process; passed by value, so the kernel need not read them from memory.
struct Memory {
    uint4* given[MAX_RANKS];  // the contribution of each rank
    u32* flags[MAX_RANKS];    // for `meet`; null if the host has made sure that all contributions are complete
};

// Access to values in the 32-bit words of a vector: by shifts, because C++ forbids access by a pointer of another type.
struct Float32 {
    static const int PER_WORD = 1;
    static __device__ float get(u32 word, int) { return __uint_as_float(word); }
    static __device__ u32 put(float value) { return __float_as_uint(value); }
};

struct Float16 {
    static const int PER_WORD = 2;
    static __device__ float get(u32 word, int i) {
        u16 bits = (u16)(word >> 16 * i);
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ u32 put(float value) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
};

struct BFloat16 {
    static const int PER_WORD = 2;
    static __device__ float get(u32 word, int i) { return __uint_as_float(word >> 16 * i << 16); }
    static __device__ u32 put(float value) {
        u32 bits = __float_as_uint(value);
        u32 rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
        return (value != value ? bits | 0x400000 : rounded) >> 16;
    }
};

// Wait until block `blockIdx.x` of every rank has reached this point. Each rank has two words per block and rank: how
// many times that rank has arrived, which that rank writes, and how many times this rank has waited for it. The host
// can't pass the second number, because a CUDA graph is replayed without the host. The numbers only grow.
__device__ void meet(const Memory& memory, int rank, int ranks) {
    __syncthreads();
    if (threadIdx.x < ranks) {
        u32* theirs = memory.flags[threadIdx.x] + 2 * (blockIdx.x * MAX_RANKS + rank);
        u32* mine = memory.flags[rank] + 2 * (blockIdx.x * MAX_RANKS + threadIdx.x);
        u32 number = ++mine[1];
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(number) : "memory");
        u32 seen;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
        } while ((int)(seen - number) < 0);
    }
    __syncthreads();
}

// Issue the read of a vector now: otherwise the compiler would read one, wait for it, add it, and read the next.
__device__ uint4 read_now(const uint4* place) {
    u32 x, y, z, w;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "l"(place));
    return make_uint4(x, y, z, w);
}

// Return the sum of `parts[0][i]` to `parts[RANKS - 1][i]`; read this rank's first.
template <class T, int RANKS, int RANK>
__device__ uint4 sum(uint4* const* parts, u64 i) {
    const int VALUES = 4 * T::PER_WORD;
    uint4 vectors[RANKS];
#pragma unroll
    for (int k = 0; k < RANKS; k++) vectors[(RANK + k) % RANKS] = read_now(parts[(RANK + k) % RANKS] + i);
    float total[VALUES] = {};
#pragma unroll
    for (int part = 0; part < RANKS; part++) {
        u32 words[4] = {vectors[part].x, vectors[part].y, vectors[part].z, vectors[part].w};
#pragma unroll
        for (int k = 0; k < VALUES; k++) total[k] += T::get(words[k / T::PER_WORD], k % T::PER_WORD);
    }
    u32 words[4] = {};
#pragma unroll
    for (int k = 0; k < VALUES; k++) words[k / T::PER_WORD] |= T::put(total[k]) << 16 * (k % T::PER_WORD);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Every rank reads the contributions of all ranks.
template <class T, int RANKS, int RANK>
__global__ void __launch_bounds__(THREADS, 1) one_shot(uint4* out, const __grid_constant__ Memory memory, u64 vectors) {
    if (memory.flags[RANK]) meet(memory, RANK, RANKS);
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < vectors; i += (u64)gridDim.x * blockDim.x)
        out[i] = sum<T, RANKS, RANK>(memory.given, i);
    if (memory.flags[RANK]) meet(memory, RANK, RANKS);
}

// Every rank sums one part, in place of its own contribution, then reads the other parts from the other ranks.
template <class T, int RANKS, int RANK>
__global__ void __launch_bounds__(THREADS, 1) two_shot(uint4* out, const __grid_constant__ Memory memory, u64 vectors) {
    u64 part = (vectors + RANKS - 1) / RANKS, step = (u64)gridDim.x * blockDim.x;
    u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    meet(memory, RANK, RANKS);
    for (u64 i = first; i < part && RANK * part + i < vectors; i += step)
        memory.given[RANK][RANK * part + i] = sum<T, RANKS, RANK>(memory.given, RANK * part + i);
    meet(memory, RANK, RANKS);  // blocks with the same number have summed the same places of all parts
    for (u64 i = first; i < part; i += step) {
        uint4 sums[RANKS];
#pragma unroll
        for (int k = 0; k < RANKS; k++) {
            const int owner = (RANK + k) % RANKS;
            u64 place = owner * part + i;
            if (place < vectors) sums[owner] = read_now(memory.given[owner] + place);
        }
#pragma unroll
        for (int owner = 0; owner < RANKS; owner++) {
            u64 place = owner * part + i;
            if (place < vectors) out[place] = sums[owner];
        }
    }
    meet(memory, RANK, RANKS);
}
