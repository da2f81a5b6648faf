# Strided GPU arrays, packed into contiguous memory by one launch of the kernel of cuda/copies.cu, and unpacked by another.

cdef enum:
    AXES = 4  # FEW in copies.cu
    THREADS = 256
    MOST_BLOCKS = 1024
    MOST_KEPT = 1 << 20  # bytes of memory that is kept for the next operation on a stream
    UNITS = 5  # 1, 2, 4, 8, 16 bytes
    MOST_COPIES = 32  # of one launch, as in copies.py
    ALIGNMENT = 256  # bytes, of each array's packed memory
    IS_SENT = 1  # packed before the call
    IS_RECEIVED = 2  # unpacked after it

cdef struct Copy:  # as in copies.cu
    P target
    P source
    int64_t[AXES] to, of
    uint32_t[AXES] shape

cdef struct Packed:  # the arrays with gaps of one operation
    int n, exponent  # how many, and that of their unit
    uint32_t blocks
    Py_ssize_t nbytes
    Copy[MOST_COPIES] copies  # that pack; targets are relative to the packed memory
    (Seen*)[MOST_COPIES] arrays
    char[MOST_COPIES] roles


cdef inline int unit_of(int64_t bits) noexcept nogil:
    """Return which unit of copies.cu divides all numbers of which `bits` has the bits: the exponent of 2."""
    cdef int exponent = 0
    while exponent < UNITS - 1 and bits & 1 << exponent == 0:
        exponent += 1
    return exponent


cdef bint lays_out(object array, Seen* x, int role, Packed* made) except -1:
    """Add the copy of an array of any layout to packed memory; as `in_units` of cuda/copies.py.

    Return False for more axes or copies than the kernel takes, for another unit than that of the earlier copies, and if
    elements may share memory.
    """
    cdef tuple shape = GET(array_shape, array), strides = GET(array_strides, array)
    cdef int64_t[AXES + 2] lengths, to, of  # innermost first, in bytes
    cdef int64_t length, stride, packed = x.type.itemsize, bits, count, reach
    cdef int i, j, n = 0, exponent
    cdef Copy* copy
    if made.n == MOST_COPIES:
        return False
    x.high = x.data + x.type.itemsize
    lengths[0], to[0], of[0] = x.type.itemsize, 1, 1
    for i in range(len(shape) - 1, -1, -1):
        length, stride = shape[i], strides[i]
        if length == 1:
            continue
        x.low += min(0, (length - 1) * stride)
        x.high += (length - 1) * stride if stride > 0 else 0
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
    count = packed >> exponent
    if n == AXES and lengths[0] != 1 or count > LARGEST_COUNT or made.n > 0 and exponent != made.exponent:
        return False
    if made.n == 0:
        made.exponent, made.blocks, made.nbytes = exponent, 1, 0
    made.blocks = max(made.blocks, <uint32_t>min((count + THREADS - 1) // THREADS, MOST_BLOCKS))
    copy, made.arrays[made.n], made.roles[made.n] = &made.copies[made.n], x, role
    copy.target, copy.source = <P>made.nbytes, x.data
    made.nbytes += (x.nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    made.n += 1
    cdef int first = 0 if lengths[0] != 1 else 1, place = AXES - 1
    for i in range(first, n + 1):
        copy.shape[place], copy.to[place], copy.of[place] = <uint32_t>lengths[i], to[i], of[i]
        place -= 1
    while place >= 0:
        copy.shape[place], copy.to[place], copy.of[place] = 1, 0, 0
        place -= 1
    return True


cdef void move_in(Packed* made, char* memory) noexcept nogil:
    """Set the packed memory of the arrays, which NCCL gets."""
    for i in range(made.n):
        made.arrays[i].data = memory + <Py_ssize_t>made.copies[i].target
        made.copies[i].target = made.arrays[i].data


cdef int launch(Functions* functions, P* kernels, Packed* made, int role, P stream) noexcept nogil:
    """Put the copies of the arrays with a role on a stream; return CUDA's error code."""
    cdef Copy[MOST_COPIES] table  # the kernel's struct Copies<FEW, 1>, or <FEW, MOST_COPIES>
    cdef P argument = table
    cdef unsigned n = 0
    for i in range(made.n):
        if made.roles[i] & role:
            table[n] = made.copies[i]
            if role == IS_RECEIVED:
                table[n].target, table[n].source = made.copies[i].source, made.copies[i].target
                table[n].to, table[n].of = made.copies[i].of, made.copies[i].to
            n += 1
    if n == 0:
        return 0
    if n > 1:
        kernels += UNITS
    return functions.launch(kernels[made.exponent], made.blocks, n, 1, THREADS, 1, 1, 0, stream, &argument, NULL)
