# One strided GPU array, packed into contiguous memory by a kernel of cuda/copies.cu, and unpacked from it.

cdef enum:
    AXES = 4  # FEW in copies.cu
    THREADS = 256
    MOST_BLOCKS = 1024
    MOST_KEPT = 1 << 20  # bytes of memory that is kept for the next operation on a stream
    UNITS = 5  # 1, 2, 4, 8, 16 bytes

cdef struct Copy:  # as in copies.cu
    P target
    P source
    int64_t[AXES] to, of
    uint32_t[AXES] shape

cdef struct Packed:
    P kernel  # NULL: the array is contiguous
    uint32_t blocks
    bint is_packed, is_unpacked
    Copy pack


cdef inline int unit_of(int64_t bits) noexcept nogil:
    """Return which unit of copies.cu divides all numbers of which `bits` has the bits: the exponent of 2."""
    cdef int exponent = 0
    while exponent < UNITS - 1 and bits & 1 << exponent == 0:
        exponent += 1
    return exponent


cdef bint lays_out(object array, Seen* x, P* kernels, Packed* made) except -1:
    """Describe the copy of an array of any layout to packed memory; as `in_units` of cuda/copies.py.

    Return False for more axes than the kernel takes, and if elements may share memory.
    """
    cdef tuple shape = GET(array_shape, array), strides = GET(array_strides, array)
    cdef int64_t[AXES + 2] lengths, to, of  # innermost first, in bytes
    cdef int64_t length, stride, packed = x.type.itemsize, bits, count, reach
    cdef int i, j, n = 0, exponent
    lengths[0], to[0], of[0] = x.type.itemsize, 1, 1
    for i in range(len(shape) - 1, -1, -1):
        length, stride = shape[i], strides[i]
        if length == 1:
            continue
        if stride == lengths[n] * of[n]:
            lengths[n] *= length
        elif n == AXES:
            return False
        else:
            n += 1
            lengths[n], to[n], of[n] = length, packed, stride
        packed *= length
    for i in range(1, n + 1):  # along each axis there is room for all that is nearer
        reach = lengths[0]
        for j in range(1, n + 1):
            if abs(of[j]) < abs(of[i]) or j > i and abs(of[j]) == abs(of[i]):
                reach += (lengths[j] - 1) * abs(of[j])
        if abs(of[i]) < reach:
            return False
    bits = <int64_t>x.data | lengths[0]
    for i in range(1, n + 1):
        bits |= to[i] | of[i]
    exponent = unit_of(bits)
    lengths[0], to[0], of[0] = lengths[0] >> exponent, 1 << exponent, 1 << exponent
    if n == AXES and lengths[0] != 1:
        return False
    count = packed >> exponent
    if count > LARGEST_COUNT:
        return False
    made.kernel, made.blocks = kernels[exponent], <uint32_t>min((count + THREADS - 1) // THREADS, MOST_BLOCKS)
    made.pack.source = x.data
    cdef int first = 0 if lengths[0] != 1 else 1, place = AXES - 1
    for i in range(first, n + 1):
        made.pack.shape[place], made.pack.to[place], made.pack.of[place] = <uint32_t>lengths[i], to[i], of[i]
        place -= 1
    while place >= 0:
        made.pack.shape[place], made.pack.to[place], made.pack.of[place] = 1, 0, 0
        place -= 1
    return made.kernel != NULL


cdef int launch(Functions* functions, Packed* made, bint unpacks, P stream) noexcept nogil:
    """Put the copy on a stream; return CUDA's error code."""
    cdef Copy table = made.pack  # the kernel's struct Copies<FEW, 1>
    cdef P argument = &table
    if unpacks:
        table.target, table.source = made.pack.source, made.pack.target
        for i in range(AXES):
            table.to[i], table.of[i] = made.pack.of[i], made.pack.to[i]
    return functions.launch(made.kernel, made.blocks, 1, 1, THREADS, 1, 1, 0, stream, &argument, NULL)
