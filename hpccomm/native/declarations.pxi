# Declarations of C: the dynamic linker, the clock, NumPy, node.h and half.h; and the constants of all files.

from cpython.dict cimport PyDict_CheckExact, PyDict_Next, PyDict_Size
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLong, PyLong_AsLongAndOverflow, PyLong_CheckExact
from cpython.object cimport Py_TYPE, PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport int32_t, int64_t, intptr_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memcpy, memmove, memset

cimport numpy as np

np.import_array()

cdef extern from "dlfcn.h" nogil:
    void* dlopen(const char* path, int how)
    void* dlsym(void* library, const char* name)
    const int RTLD_NOW, RTLD_NOLOAD
    void* RTLD_DEFAULT

cdef extern from "time.h" nogil:
    cdef struct timespec:
        long long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec* time)
    const int CLOCK_MONOTONIC, CLOCK_MONOTONIC_COARSE

cdef extern from "Python.h":
    bint PyList_CheckExact(object)
    Py_ssize_t PyLong_AsSsize_t(object number) except? -1
    void* PyLong_AsVoidPtr(object number) except? NULL
    PyObject* PyDict_GetItem(object of, object key)
    PyObject* PyDict_GetItemWithError(object of, object key)
    void PyErr_Clear()
    int Py_AtExit(void (*function)() noexcept nogil)
    int PyErr_CheckSignals() except -1
    const char* PyUnicode_AsUTF8(object text) except NULL
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from *:
    """
    static PyObject *hc_new(PyObject *type, PyObject *nothing)
    {
        return ((PyTypeObject *)type)->tp_new((PyTypeObject *)type, nothing, NULL);
    }
    /* Whether nobody else can reach an object whose class has weak references. */
    static int hc_is_sole(PyObject *of) { return Py_REFCNT(of) == 1 && *PyObject_GET_WEAKREFS_LISTPTR(of) == NULL; }
    """
    object hc_new(object type, object nothing)
    bint hc_is_sole(object of)

cdef extern from "numpy/arrayobject.h":
    ctypedef struct Array "PyArrayObject":
        pass
    PyTypeObject PyArray_Type
    bint PyArray_Check(object array)
    bint PyArray_ISWRITEABLE(Array* array) nogil
    bint PyArray_ISNOTSWAPPED(Array* array) nogil
    object PyArray_NewCopy(Array* array, int order)
    object PyArray_New(PyTypeObject* type, int ndim, Py_ssize_t* shape, int number, Py_ssize_t* strides, void* data,
                       int itemsize, int flags, void* parent)
    const int NPY_ARRAY_WRITEABLE
    int PyArray_CopyInto(Array* to, Array* values) except -1
    const int NPY_HALF, NPY_FLOAT, NPY_DOUBLE, NPY_CORDER
    bint PyArray_ISCARRAY(Array* array) nogil
    bint PyArray_ISCARRAY_RO(Array* array) nogil
    object PyArray_EMPTY(int ndim, Py_ssize_t* shape, int number, int is_fortran)
    bint PyArray_IS_C_CONTIGUOUS(Array* array) nogil
    Py_ssize_t PyArray_NBYTES(Array* array) nogil
    Py_ssize_t PyArray_SIZE(Array* array) nogil
    int PyArray_NDIM(Array* array) nogil
    Py_ssize_t PyArray_DIM(Array* array, int i) nogil
    int PyArray_TYPE(Array* array) nogil
    int PyArray_ITEMSIZE(Array* array) nogil
    void* PyArray_DATA(Array* array) nogil

cdef extern from "cpu.h" nogil:
    void copy_bytes(void* to, const void* source, size_t nbytes)

cdef extern from "half.h" nogil:
    float half_to_float(uint16_t half)
    uint16_t float_to_half(float value)

cdef extern from "node.h" nogil:
    ctypedef struct Fold:
        pass
    ctypedef struct Flags:
        pass
    ctypedef struct Node:
        Flags* flags
        void* cells
        char* slots
        size_t slot, one_phase, at
        int rank, ranks, looks, yields, differing, ranks_below, above
        const int* below
        int (*progress)(void*) noexcept nogil
        void* context
        uint64_t number
    ctypedef struct Part:
        size_t at
        size_t nbytes "bytes"
    const int NODE_DIFFERS, NODE_LEAVES, LINE, SETS
    const uint64_t NODE_TOO_LARGE
    uint64_t node_time()
    int node_next(Node* n, uint64_t sets)
    char* node_slot(Node* n, uint64_t number, int rank)
    int node_meet_filled(Node* n, uint64_t call, uint64_t size)
    size_t node_bytes(int rank, int ranks, bint has_cells, size_t slot)
    void node_map(Node* n, char* memory, bint has_cells, size_t slot)
    int node_all_reduce(Node* n, uint64_t call, const Fold* fold, size_t itemsize, char* x, size_t count)
    int node_reduce_scatter(
        Node* n, uint64_t call, const Fold* fold, size_t itemsize, char* out, const char* x, size_t count)
    int node_all_gather(Node* n, uint64_t call, char* out, const char* x, size_t nbytes)
    int node_broadcast(Node* n, uint64_t call, int root, char* x, size_t nbytes)
    size_t node_room(const Node* n, size_t parts)
    void node_begin(Node* n, size_t parts, size_t largest)
    bint node_goes_on(Node* n)
    size_t node_cell_room()
    int node_post(Node* n, uint64_t call, size_t parts, char** data, const size_t* nbytes)
    int node_give(Node* n, uint64_t call, size_t parts, char** data, const size_t* nbytes)
    int node_hear(Node* n, uint64_t call, int rank)
    int node_take(Node* n, int rank, size_t part, char* out, size_t nbytes)
    const char* node_part(Node* n, int rank, size_t part, size_t nbytes)
    int node_take_reduced(
        Node* n, const Fold* fold, int ranks, size_t part, char* out, size_t nbytes, int own)
    int node_barrier(Node* n, uint64_t call, uint64_t count)
    int node_meet(Node* n)
    void node_fold(Node* n, const Fold* fold, char* out, const char* mine, size_t at, size_t nbytes)
    int ranks_outnumber_cores, node_is_ending
    int node_poll(int (*test)(uintptr_t*, int*, void*) noexcept nogil, uintptr_t* request, void* status)
    const Fold* fold_of(char op, char kind, int itemsize)
    void* combine_of(char op, char code)

cdef extern from "ending.h" nogil:
    void node_end()

cdef extern from "halves.h" nogil:
    size_t node_halves_bytes(int ranks, size_t slot)
    void node_make_halves(Node* n, char* memory, size_t slot)
    int node_start(Node* n, uint64_t call, const char* x, size_t nbytes, size_t low, size_t high)
    bint node_has_met(Node* n)
    int node_take_all_reduced(Node* n, const Fold* fold, char* x, size_t nbytes)

ctypedef uintptr_t Handle

cdef enum:
    TYPES = 32  # the type numbers of NumPy's own dtypes are smaller
    BFLOAT16 = TYPES - 1  # in the tables: ml_dtypes' bfloat16
    OPS = 16
    PARTS = 256  # most ranks that use memory of the node, and most parts of a list
    WAITED = 512  # most Works that are waited for at once
    SMALL = 2048  # most elements that are prepared here: NumPy prepares more as fast
    REAP_EVERY = 32  # fewest new Works between two polls of those in flight, if the program holds the oldest
    MOST_RUNS = 16  # memory for more runs of coalesced arrays is not kept
    STATUS_BYTES = 64  # most bytes of an MPI_Status
    LARGEST_COUNT = 0x7FFFFFFF
    WHOLE = 64 << 10  # most bytes of a sparse exchange for one rank that go through memory of the node
    RING = 2048  # fewest operations that are remembered: a power of two
    AVERAGE = OPS - 1  # in the ring: AVG
    PREMULTIPLIED = OPS - 2  # in the ring: PREMUL_SUM
    NOBODY = -1  # in the ring: no op, no root, any source, no tag
