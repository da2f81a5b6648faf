// Kernels of hpccomm/nccl/intra_node.py: all_reduce (SUM) among the GPUs of a node, which see each other's buffers.
//
// Each rank has put its contribution into its buffer before. Sums are made in float32 and in the order of the ranks, so
// that every rank has bitwise the same result. A "vector" is 16 bytes.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

const int MAX_RANKS = 8;

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

// Wait until block `blockIdx.x` of every rank in `peers` (a bit mask) has come to this point. Each rank has a word for
// each block and each rank, which that rank sets to the number of the meeting; numbers only grow.
__device__ void meet(u32* const* flags, int rank, u32 peers, u32 number) {
    __syncthreads();
    if (threadIdx.x < MAX_RANKS && (peers >> threadIdx.x & 1)) {
        u32* theirs = flags[threadIdx.x] + blockIdx.x * MAX_RANKS + rank;
        u32* mine = flags[rank] + blockIdx.x * MAX_RANKS + threadIdx.x;
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(number) : "memory");
        u32 seen;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
        } while ((int)(seen - number) < 0);
    }
    __syncthreads();
}

template <class T>
__device__ uint4 sum(uint4* const* buffers, int first, int last, u64 i) {
    const int VALUES = 4 * T::PER_WORD;
    float total[VALUES] = {};
    for (int rank = first; rank < last; rank++) {
        uint4 vector = buffers[rank][i];
        u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
        for (int k = 0; k < VALUES; k++) total[k] += T::get(words[k / T::PER_WORD], k % T::PER_WORD);
    }
    u32 words[4] = {};
    for (int k = 0; k < VALUES; k++) words[k / T::PER_WORD] |= T::put(total[k]) << 16 * (k % T::PER_WORD);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Every rank reads all buffers. With number 0 the host has seen to it that they are complete.
template <class T>
__global__ void one_shot(uint4* out, uint4* const* buffers, u32* const* flags, int rank, int ranks, u32 number, u64 vectors) {
    u32 everybody = (1u << ranks) - 1;
    if (number) meet(flags, rank, everybody, number);
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < vectors; i += (u64)gridDim.x * blockDim.x)
        out[i] = sum<T>(buffers, 0, ranks, i);
    if (number) meet(flags, rank, everybody, number + 1);
}

// Every rank sums one part into its own buffer, then reads the other parts from the others' buffers.
template <class T>
__global__ void two_shot(uint4* out, uint4* const* buffers, u32* const* flags, int rank, int ranks, u32 number, u64 vectors) {
    u32 everybody = (1u << ranks) - 1;
    u64 part = (vectors + ranks - 1) / ranks, step = (u64)gridDim.x * blockDim.x;
    u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    meet(flags, rank, everybody, number);
    for (u64 i = first; i < part && rank * part + i < vectors; i += step)
        buffers[rank][rank * part + i] = sum<T>(buffers, 0, ranks, rank * part + i);
    meet(flags, rank, everybody, number + 1);  // the blocks of one number have done the same places of all parts
    for (int k = 0; k < ranks; k++) {
        int owner = (rank + k) % ranks;  // each begins with its own: not all at once with the same GPU
        for (u64 i = first; i < part && owner * part + i < vectors; i += step)
            out[owner * part + i] = buffers[owner][owner * part + i];
    }
    meet(flags, rank, everybody, number + 2);
}

// 8 GPUs, of which each is linked to the three others of its half and to one of the other half. Every rank sums its
// half into the second part of its buffer, and adds what its partner in the other half has there.
template <class T>
__global__ void cube_mesh(uint4* out, uint4* const* buffers, u32* const* flags, int rank, u64 second, u32 number, u64 vectors) {
    int low = rank & 4, partner = rank ^ 4;
    u32 linked = 0xfu << low | 1u << partner;
    u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    meet(flags, rank, linked, number);
    for (u64 i = first; i < vectors; i += step) buffers[rank][second + i] = sum<T>(buffers, low, low + 4, i);
    meet(flags, rank, linked, number + 1);
    uint4* halves[2] = {buffers[rank & 3] + second, buffers[rank | 4] + second};
    for (u64 i = first; i < vectors; i += step) out[i] = sum<T>(halves, 0, 2, i);
    // No meeting at the end: the next call writes the first part, which nobody reads after the second meeting, and the
    // second part only behind a first meeting of its own.
}
