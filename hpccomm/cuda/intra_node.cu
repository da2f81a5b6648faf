// Kernels of hpccomm/nccl/intra_node.py: all_reduce (SUM) among the GPUs of a node, which see each other's buffers.
//
// Each rank has put its contribution into its memory before. Sums are made in float32 and in the order of the ranks, so
// that every rank has bitwise the same result. A "vector" is 16 bytes. The number of ranks and the own rank are known to
// the compiler: what is read from all ranks is under way at once, and each rank begins with itself (or its successor), so
// that not all read from the same GPU first.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

const int MAX_RANKS = 8;
const int THREADS = 512;  // of a block; so the compiler knows that each may have 128 registers

// The ranks' memory, as this GPU sees it; given by value, so that each pointer is at hand without a read of memory.
struct Memory {
    uint4* given[MAX_RANKS];  // what each rank contributes
    u32* flags[MAX_RANKS];    // for the meetings; null where the host has seen to it that all contributions are complete
};

// How values lie in the 32-bit words of a vector: by shifts, since C++ does not let a pointer of another type look.
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

// Wait until block `blockIdx.x` of every rank has come to this point. Each rank has two words for each block and each rank:
// how often that rank has come, which it writes itself, and how often this one has come to meet it. The latter is not the
// host's to count, since a CUDA graph is replayed without it. Numbers only grow.
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

// Begin to read a vector here and now: the compiler would rather read one, wait for it, add it, and read the next.
__device__ uint4 read_now(const uint4* place) {
    u32 x, y, z, w;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "l"(place));
    return make_uint4(x, y, z, w);
}

// Return the sum of `parts[0][i]` to `parts[RANKS - 1][i]`; the first to be read is this rank's.
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

// Every rank reads what all have given.
template <class T, int RANKS, int RANK>
__global__ void __launch_bounds__(THREADS, 1) one_shot(uint4* out, const __grid_constant__ Memory memory, u64 vectors) {
    if (memory.flags[RANK]) meet(memory, RANK, RANKS);
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < vectors; i += (u64)gridDim.x * blockDim.x)
        out[i] = sum<T, RANKS, RANK>(memory.given, i);
    if (memory.flags[RANK]) meet(memory, RANK, RANKS);
}

// Every rank sums one part, in the place of what it has given, then reads the other parts from the other ranks.
template <class T, int RANKS, int RANK>
__global__ void __launch_bounds__(THREADS, 1) two_shot(uint4* out, const __grid_constant__ Memory memory, u64 vectors) {
    u64 part = (vectors + RANKS - 1) / RANKS, step = (u64)gridDim.x * blockDim.x;
    u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    meet(memory, RANK, RANKS);
    for (u64 i = first; i < part && RANK * part + i < vectors; i += step)
        memory.given[RANK][RANK * part + i] = sum<T, RANKS, RANK>(memory.given, RANK * part + i);
    meet(memory, RANK, RANKS);  // the blocks of one number have done the same places of all parts
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
