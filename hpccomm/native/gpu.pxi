# GPU arrays: locks that C takes, the functions of CUDA and NCCL, arrays by CuPy's own getters, PyTorch's by DLPack.

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_mutexattr_t:
        pass
    int pthread_mutexattr_init(pthread_mutexattr_t* kind)
    int pthread_mutexattr_settype(pthread_mutexattr_t* kind, int type)
    int pthread_mutexattr_destroy(pthread_mutexattr_t* kind)
    int pthread_mutex_init(pthread_mutex_t* mutex, pthread_mutexattr_t* kind)
    int pthread_mutex_destroy(pthread_mutex_t* mutex)
    int pthread_mutex_trylock(pthread_mutex_t* mutex)
    int pthread_mutex_unlock(pthread_mutex_t* mutex)
    const int PTHREAD_MUTEX_RECURSIVE

cdef extern from "unistd.h" nogil:
    int usleep(unsigned microseconds)

cdef extern from *:
    """
    typedef struct { getter get; void *closure; } Getter;

    static Getter getter_of(PyObject *type, const char *name)
    {
        Getter found = {NULL, NULL};
        PyObject *each = PyObject_GetAttrString(type, name);  /* of a type: the descriptor itself */
        if (each != NULL && Py_IS_TYPE(each, &PyGetSetDescr_Type)) {
            PyGetSetDef *definition = ((PyGetSetDescrObject *)each)->d_getset;
            found.get = definition->get, found.closure = definition->closure;
        }
        Py_XDECREF(each);
        PyErr_Clear();
        return found;
    }
    #define GET(getter, object) (getter).get(object, (getter).closure)
    """
    ctypedef struct Getter:
        void* get
    Getter getter_of(object type, const char* attribute)
    object GET(Getter getter, object of)


cdef class Lock:
    """A recursive lock like threading.RLock, which C code can also take."""

    cdef pthread_mutex_t mutex

    def __cinit__(self):
        cdef pthread_mutexattr_t kind
        pthread_mutexattr_init(&kind)
        pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE)
        pthread_mutex_init(&self.mutex, &kind)
        pthread_mutexattr_destroy(&kind)

    def __dealloc__(self):
        pthread_mutex_destroy(&self.mutex)

    def acquire(self, bint blocking=True, double timeout=-1):
        """See threading.RLock; signal handlers run while it waits."""
        cdef long long began = now()
        while pthread_mutex_trylock(&self.mutex) != 0:
            if not blocking or 0 <= 1e9 * timeout < now() - began:
                return False
            with nogil:
                usleep(50)
            PyErr_CheckSignals()
        return True

    def release(self):
        """See threading.RLock."""
        pthread_mutex_unlock(&self.mutex)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        pthread_mutex_unlock(&self.mutex)


cdef enum:
    NO_STREAM = -1
    DEFAULT_STREAM = 0
    CUDA_ERROR = 1 << 16  # added to CUDA's error codes: the others are NCCL's
    NCCL_IN_PROGRESS = 7
    BLOCKING = 0  # how an operation is done
    ASYNC
    START  # a persistent one, as ASYNC
    RUN  # a persistent one, as BLOCKING
    LEFT = -1  # the operation is left to the checks
    DTYPES = 16
    GPU_OPS = 8
    MOST_CALLS = 64  # in one group of NCCL's calls
    LOOKS_AT_STATE = 100  # of a call in progress, before Python waits for its end
    MARK_PERIOD = 1000000  # nanoseconds

ctypedef void* P
ctypedef int (*Reduces)(P, P, size_t, int, int, P, P) noexcept nogil
ctypedef int (*Moves)(P, P, size_t, int, P, P) noexcept nogil
ctypedef int (*Rooted)(P, P, size_t, int, int, P, P) noexcept nogil
ctypedef int (*Passes)(P, size_t, int, int, P, P) noexcept nogil

cdef struct Functions:  # in the order of FUNCTIONS
    intptr_t (*current_stream)(int) except? -1
    int (*context)(P*) noexcept nogil
    int (*record)(P, P) noexcept nogil
    int (*wait)(P, P, unsigned) noexcept nogil
    int (*query)(P) noexcept nogil
    int (*capturing)(P, int*) noexcept nogil
    int (*stream_id)(P, uint64_t*) noexcept nogil
    int (*launch)(P, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, P, P*, P*) noexcept nogil
    Reduces all_reduce, reduce_scatter
    int (*reduce)(P, P, size_t, int, int, int, P, P) noexcept nogil
    Rooted broadcast
    Moves all_gather, all_to_all  # the latter may be NULL
    Passes send, recv
    int (*group_start)() noexcept nogil
    int (*group_end)() noexcept nogil
    int (*state)(P, int*) noexcept nogil

FUNCTIONS = (
    "current_stream", "cuCtxGetCurrent", "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery", "cuStreamIsCapturing",
    "cuStreamGetId", "cuLaunchKernel", "ncclAllReduce", "ncclReduceScatter", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclAlltoAll",
    "ncclSend", "ncclRecv", "ncclGroupStart", "ncclGroupEnd", "ncclCommGetAsyncError",
)

cdef struct GPUType:
    int datatype, width, itemsize  # NCCL's number, and how many of its elements are one of the array's
    int number  # NumPy's, for the ring; NOBODY for a dtype of another package
    int code  # DLPack's, of the kind of values; NOBODY: none
    int[GPU_OPS] ops  # NCCL's, by the numbers of `gpu_ops`; -1: none

cdef GPUType[DTYPES] gpu_types
cdef (PyObject*)[DTYPES] gpu_dtypes
cdef int known_dtypes = 0
cdef dict gpu_ops = {}
cdef int[GPU_OPS] gpu_op_notes  # their numbers in the ring
cdef dict device_names  # of types of arrays; Python's, which changes
cdef Getter array_size, array_is_contiguous, array_dtype, array_data, array_shape, array_strides
cdef Getter memory_address, memory_device
cdef object gpu_kept  # the objects to which the tables point


def set_up_gpu(type array, type memory, dict devices, dict rows, dict ops):
    """Fill the tables. `array`, `memory`: CuPy's types; `devices`: a device's name by an array's type ("": a tensor's own),
    read each time; `rows`: by dtype NCCL's datatype, its elements in one of the dtype, the dtype's number in the ring,
    DLPack's code, and NCCL's ops by the numbers in `ops`.
    """
    global array_size, array_is_contiguous, array_dtype, array_data, array_shape, array_strides
    global memory_address, memory_device, device_names, gpu_kept, known_dtypes, gpu_ops
    cdef (Getter*)[8] found
    found[:] = [&array_size, &array_is_contiguous, &array_dtype, &array_data, &array_shape, &array_strides,
                &memory_address, &memory_device]
    for i, name in enumerate((b"size", b"_c_contiguous", b"dtype", b"data", b"shape", b"strides", b"ptr", b"device_id")):
        found[i][0] = getter_of(array if i < 6 else memory, name)
        if found[i].get == NULL:
            raise ImportError(f"{name.decode()} of CuPy's {'arrays' if i < 6 else 'memory'} is no getset_descriptor")
    gpu_ops, device_names, gpu_kept, known_dtypes = ops, devices, rows, len(rows)
    for op, place in ops.items():
        gpu_op_notes[<int>place] = AVERAGE if op.name == "AVG" else op_numbers.get(op, NOBODY)
    for i, (dtype, (datatype, width, number, code, table)) in enumerate(rows.items()):
        gpu_dtypes[i] = <PyObject*>dtype
        gpu_types[i].datatype, gpu_types[i].width, gpu_types[i].itemsize = datatype, width, dtype.itemsize
        gpu_types[i].number, gpu_types[i].code = number, code
        for place in range(GPU_OPS):
            gpu_types[i].ops[<int>place] = table.get(place, -1)


cdef struct Seen:  # an array
    char* data
    char* low  # its lowest address, and the one behind its highest
    char* high
    Py_ssize_t count, nbytes
    Py_ssize_t rows  # of a tensor; NOBODY: not read
    int device
    bint is_plain  # contiguous and aligned
    GPUType* type


cdef inline bint sees(object array, str device, Functions* to, Seen* x) except -1:
    """Look at an array; return False unless it is not empty, and of a known dtype on `device`."""
    cdef int i
    cdef PyObject* name = PyDict_GetItem(device_names, <object>Py_TYPE(array))
    if name == NULL or <object>name != device:
        return name != NULL and <object>name == "" and sees_tensor(array, to, x)
    dtype = GET(array_dtype, array)
    for i in range(known_dtypes):
        if gpu_dtypes[i] == <PyObject*>dtype:
            break
    else:
        return False
    data = GET(array_data, array)
    x.type = &gpu_types[i]
    x.rows = NOBODY
    x.count = PyLong_AsSsize_t(GET(array_size, array))
    x.nbytes = x.count * x.type.itemsize
    x.data = <char*>PyLong_AsVoidPtr(GET(memory_address, data))
    x.low, x.high = x.data, x.data + x.nbytes
    x.device = PyLong_AsLong(GET(memory_device, data))
    x.is_plain = GET(array_is_contiguous, array) is True and <uintptr_t>x.data % x.type.itemsize == 0
    return x.count > 0


cdef bint sees_tensor(object tensor, Functions* to, Seen* x) except -1:
    """Look at a tensor, as `sees`; return False also for one with gaps, and if PyTorch's current stream is not CuPy's."""
    cdef DLTensor seen
    cdef void* stream = NULL
    cdef int i
    if not looks_at(tensor, &seen) or seen.device_type != CUDA:
        return False
    dlpack.current_stream(CUDA, seen.device_id, &stream)
    if <intptr_t>stream != to.current_stream(seen.device_id):
        return False
    for i in range(known_dtypes):
        if gpu_types[i].code == seen.code and gpu_types[i].itemsize * 8 == seen.bits:
            break
    else:
        return False
    x.type, x.device, x.data, x.rows = &gpu_types[i], seen.device_id, seen.data + seen.byte_offset, 0
    x.count = 1
    for i in reversed(range(seen.ndim)):
        if seen.shape[i] != 1 and seen.strides[i] != x.count:
            return False
        x.count *= seen.shape[i]
        x.rows = seen.shape[i]
    x.nbytes = x.count * x.type.itemsize
    x.low, x.high = x.data, x.data + x.nbytes
    x.is_plain = <uintptr_t>x.data % x.type.itemsize == 0
    return x.is_plain and x.count > 0


cdef inline bint are_seen_apart(Seen* one, Seen* other) noexcept nogil:
    return one.high <= other.low or other.high <= one.low


cdef inline int gpu_op(object op) noexcept:
    """Return the number of an op in the tables; NOBODY if it has none, or is not hashable."""
    cdef PyObject* place = PyDict_GetItemWithError(gpu_ops, op)
    if place == NULL:
        PyErr_Clear()  # since Python 3.13 PyDict_GetItem prints it
        return NOBODY
    return <int>PyLong_AsLong(<object>place)
