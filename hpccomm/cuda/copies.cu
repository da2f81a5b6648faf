// The kernel of hpccomm/cuda/copies.py copies many arrays of any layouts; each row of blocks copies one.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

const int FEW = 4;  // axes of an ordinary copy

template <int AXES>
struct Copy {
    u64 target, source;
    i64 to[AXES], of[AXES];  // strides, in bytes
    u32 shape[AXES];         // of both, in units
};

template <int AXES, int COPIES>
struct Copies { Copy<AXES> copies[COPIES]; };

// BYTES bytes, at an address that is a multiple of BYTES.
template <int BYTES> struct Unit;
template <> struct Unit<1> { unsigned char bits; };
template <> struct Unit<2> { unsigned short bits; };
template <> struct Unit<4> { u32 bits; };
template <> struct Unit<8> { u64 bits; };
template <> struct alignas(16) Unit<16> { u64 bits[2]; };

template <int BYTES, int AXES, int COPIES>
__global__ void copy(const __grid_constant__ Copies<AXES, COPIES> all) {
    const Copy<AXES>& each = all.copies[blockIdx.y];
    u32 count = 1;
    for (int axis = 0; axis < AXES; axis++) count *= each.shape[axis];
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        u32 rest = (u32)i;
        i64 to = 0, of = 0;
        for (int axis = AXES - 1; rest != 0; axis--) {
            u32 at = rest % each.shape[axis];
            rest /= each.shape[axis];
            to += at * each.to[axis];
            of += at * each.of[axis];
        }
        *(Unit<BYTES>*)(each.target + to) = *(const Unit<BYTES>*)(each.source + of);
    }
}
