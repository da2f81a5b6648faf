# Arrays: tests for ordinary ones, their addresses, and copies of many at once.

cdef inline Array* plain(object array, Py_ssize_t largest) noexcept:
    """Return `array` if it is aligned, writeable, in C order and has at most `largest` bytes; otherwise NULL."""
    cdef Array* found = <Array*>array
    if Py_TYPE(array) is not &PyArray_Type or not PyArray_ISCARRAY(found) or PyArray_NBYTES(found) > largest:
        return NULL
    return found


cdef inline bint is_sendable(object array) noexcept:
    """Whether `array` is a NumPy array of a known dtype that is aligned and in C order."""
    return (
        Py_TYPE(array) is &PyArray_Type and PyArray_ISCARRAY_RO(<Array*><PyObject*>array)
        and type_of(<Array*><PyObject*>array) != 0
    )


cdef inline Array* without_gaps(object array) except NULL:
    """Return an array that was prepared for MPI; raise TypeError for others, lest ranks take different paths."""
    if not PyArray_Check(array) or not PyArray_IS_C_CONTIGUOUS(<Array*>array):
        raise TypeError(f"expected an array in C order and without gaps, not {type(array)}")
    return <Array*>array


cdef inline Handle type_of(Array* array) noexcept nogil:
    """Return the MPI datatype of an array; 0 if its dtype is not in the table."""
    return mpi.datatypes[PyArray_TYPE(array)] if PyArray_TYPE(array) < TYPES else 0


cdef inline uint64_t kind_of(Array* array) noexcept nogil:
    """Return the kind and itemsize of an array's values, which ranks compare; 0 if its dtype is not in the table."""
    return mpi.kinds[PyArray_TYPE(array)] if PyArray_TYPE(array) < TYPES else 0


cdef inline int column_of(Array* array) noexcept:
    """Return the column of an array's dtype in the tables; TYPES if it has none."""
    cdef int number = PyArray_TYPE(array)
    return number if number < TYPES else BFLOAT16 if number in bfloat16_numbers else TYPES


cdef inline int count_of(Array* array) noexcept nogil:
    return <int>PyArray_SIZE(array)


cdef inline bint are_apart(Array* one, Array* other) noexcept nogil:
    """Whether two arrays without gaps share no memory."""
    cdef char* a = <char*>PyArray_DATA(one)
    cdef char* b = <char*>PyArray_DATA(other)
    return a + PyArray_NBYTES(one) <= b or b + PyArray_NBYTES(other) <= a


cdef inline void average(char* data, Py_ssize_t count, int number, int ranks) noexcept nogil:
    """Divide float32 or float64 values by the number of ranks."""
    cdef Py_ssize_t i
    if number == NPY_FLOAT:
        for i in range(count):
            (<float*>data)[i] /= <float>ranks
    else:
        for i in range(count):
            (<double*>data)[i] /= ranks


cdef inline Py_ssize_t nbytes_at(list arrays, Py_ssize_t i) noexcept:
    return PyArray_NBYTES(<Array*>PyList_GET_ITEM(arrays, i))


cdef bint may_overlap(list xs, list ys) noexcept:
    """Whether two lists of ordinary arrays may share memory: whether their address ranges overlap."""
    cdef uintptr_t[2] starts = [~<uintptr_t>0, ~<uintptr_t>0]
    cdef uintptr_t[2] ends = [0, 0]
    cdef uintptr_t start
    cdef int which
    for which in range(2):
        for each in ys if which else xs:
            start = <uintptr_t>PyArray_DATA(<Array*><PyObject*>each)
            starts[which] = min(starts[which], start)
            ends[which] = max(ends[which], start + <uintptr_t>PyArray_NBYTES(<Array*><PyObject*>each))
    return starts[0] < ends[1] and starts[1] < ends[0]


cdef struct Range:
    uintptr_t start, end
    int which


cdef int by_start(const void* one, const void* other) noexcept nogil:
    return ((<Range*>one).start > (<Range*>other).start) - ((<Range*>one).start < (<Range*>other).start)


cdef bint do_overlap(list xs, list ys) except -1:
    """Whether an array of one list shares memory with one of the other; arrays of the heap often alternate. Of one list
    as both: whether two of its arrays share memory.
    """
    cdef bint is_one = xs is ys
    cdef Range* ranges = <Range*>malloc((len(xs) + len(ys) + 1) * sizeof(Range))
    cdef uintptr_t[2] ends = [0, 0]
    cdef size_t i, n = 0
    cdef int which
    cdef bint found = False
    if ranges == NULL:
        raise MemoryError
    for which in range(2 - is_one):
        for each in ys if which else xs:
            ranges[n].start = <uintptr_t>PyArray_DATA(<Array*><PyObject*>each)
            ranges[n].end = ranges[n].start + <uintptr_t>PyArray_NBYTES(<Array*><PyObject*>each)
            ranges[n].which = which
            n += ranges[n].end > ranges[n].start
    qsort(ranges, n, sizeof(Range), by_start)
    for i in range(n):
        found |= ranges[i].start < ends[ranges[i].which ^ (not is_one)]
        ends[ranges[i].which] = max(ends[ranges[i].which], ranges[i].end)
    free(ranges)
    return found


cdef uint64_t[64] known_apart  # hashes of lists found apart; an error in another list with such a hash would be missed


cpdef bint are_all_apart(list arrays) except -1:
    """Whether these are NumPy arrays without gaps of which no two share memory. Sort only lists that are not in the order
    of their addresses, the first time.
    """
    cdef uintptr_t start, end = 0
    cdef uint64_t key = len(arrays)
    cdef bint is_in_order = True
    for each in arrays:
        if not PyArray_Check(each) or not PyArray_IS_C_CONTIGUOUS(<Array*><PyObject*>each):
            return False
        start = <uintptr_t>PyArray_DATA(<Array*><PyObject*>each)
        is_in_order &= end <= start
        end = start + <uintptr_t>PyArray_NBYTES(<Array*><PyObject*>each)
        key = (key ^ start) * 0x100000001B3ULL ^ end
    if not is_in_order and known_apart[key >> 58] != key:
        if do_overlap(arrays, arrays):
            return False
        known_apart[key >> 58] = key
    return True


cdef void pack(list arrays, Py_ssize_t first, Py_ssize_t last, char* flat, Py_ssize_t rows, Py_ssize_t width,
               bint packs) noexcept:
    """Copy arrays of `rows` rows to columns of a flat array whose rows have `width` bytes; or back, unless `packs`."""
    cdef Py_ssize_t i, row, nbytes
    cdef char* data
    for i in range(first, last):
        data = <char*>PyArray_DATA(<Array*>PyList_GET_ITEM(arrays, i))
        nbytes = nbytes_at(arrays, i)
        if rows > 1:  # a division takes as long as the copy of a small array
            nbytes //= rows
        for row in range(rows):
            if packs:
                copy_bytes(flat + row * width, data + row * nbytes, nbytes)
            else:
                copy_bytes(data + row * nbytes, flat + row * width, nbytes)
        flat += nbytes


def copy(target, source):
    """Do `target[...] = source`, where the shapes are equal; faster for arrays without gaps."""
    cdef Array* y = <Array*>target
    cdef Array* x = <Array*>source
    if (
        is_sendable(target) and is_sendable(source) and PyArray_ISCARRAY(y) and PyArray_TYPE(y) == PyArray_TYPE(x)
        and PyArray_NBYTES(y) == PyArray_NBYTES(x) and are_apart(y, x)
    ):
        copy_bytes(PyArray_DATA(y), PyArray_DATA(x), PyArray_NBYTES(x))
    else:
        target[...] = source


def address_of(array):
    """Return the address of a host array's first element."""
    if PyArray_Check(array):
        return <uintptr_t>PyArray_DATA(<Array*><PyObject*>array)
    return array.__array_interface__["data"][0]
