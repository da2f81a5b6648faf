# PyTorch tensors as NumPy arrays, by DLPack's C functions.

cdef struct DLTensor:
    char* data
    int32_t device_type, device_id, ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides  # in elements
    uint64_t byte_offset

cdef struct DLPackExchangeAPI:
    uint32_t major, minor
    void* older
    void* allocator
    void* from_object
    void* to_object
    int (*look_at)(PyObject*, DLTensor*) except -1
    int (*current_stream)(int32_t, int32_t, void**) except -1

cdef enum:
    MOST_DIMENSIONS = 32
    CODES = 8  # DLPack's, for kinds of values
    HOST = 1
    CUDA = 2

cdef DLPackExchangeAPI* dlpack
cdef tuple tensor_types
cdef int[CODES][256] number_of  # NumPy's number of a dtype, by DLPack's code and bits


def set_up_tensors(tuple types, dict numbers):
    """Look at objects of exactly these types by DLPack's C functions from now on; `numbers`: NumPy's, by code and bits."""
    global dlpack, tensor_types
    found = <DLPackExchangeAPI*>PyCapsule_GetPointer(types[0].__dlpack_c_exchange_api__, "dlpack_exchange_api")
    if found.major != 1 or found.look_at == NULL or found.current_stream == NULL:
        raise ImportError(f"version {found.major} of DLPack's functions in C")
    memset(number_of, -1, sizeof(number_of))
    for (code, bits), number in numbers.items():
        number_of[<int>code][<int>bits] = number
    dlpack, tensor_types = found, types


cdef bint looks_at(object tensor, DLTensor* seen) except -1:
    """Look at a tensor; return False for other objects, and for tensors whose memory does not have their values."""
    if tensor_types is None or type(tensor) not in tensor_types or tensor.is_neg() or tensor.is_conj():
        return False
    try:
        dlpack.look_at(<PyObject*>tensor, seen)
    except Exception:  # a sparse one, for example
        return False
    return seen.data != NULL and seen.lanes == 1


cdef object storages(object arrays):
    """Return the memory of all tensors, because the program may give a tensor other memory; None if there is none."""
    if tensor_types is None:
        return None
    if type(arrays) is list or type(arrays) is tuple:
        return [storages(each) for each in arrays]
    return arrays.untyped_storage() if type(arrays) in tensor_types else None


def view(tensor, bint flat=False):
    """Return a NumPy array on the memory of a host tensor, which it keeps alive; or None.

    `flat`: return one dimension if there are no gaps.
    """
    cdef DLTensor seen
    cdef Py_ssize_t[MOST_DIMENSIONS] strides
    cdef int64_t itemsize, size = 1
    cdef bint has_gaps = False
    if not looks_at(tensor, &seen) or seen.device_type != HOST or seen.code >= CODES:
        return None
    if seen.ndim > MOST_DIMENSIONS or number_of[seen.code][seen.bits] < 0:
        return None
    itemsize = seen.bits // 8
    for i in reversed(range(seen.ndim)):
        strides[i] = seen.strides[i] * itemsize
        has_gaps |= seen.shape[i] != 1 and seen.strides[i] != size
        size *= seen.shape[i]
    if flat and not has_gaps:
        seen.ndim, seen.shape, strides[0] = 1, &size, itemsize
    array = PyArray_New(&PyArray_Type, seen.ndim, <Py_ssize_t*>seen.shape, number_of[seen.code][seen.bits], strides,
                        seen.data + seen.byte_offset, 0, NPY_ARRAY_WRITEABLE, NULL)
    np.set_array_base(array, tensor.untyped_storage())
    return array
