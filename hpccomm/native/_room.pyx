# cython: language_level=3, boundscheck=False, wraparound=False, binding=False, embedsignature=False
"""The compiled room: the fast path and its Works as C, for what mpi/fast_path.py does in Python.

It accepts a part of what that file accepts, or a little more where C makes it cheap, and calls the same functions of
MPI: a rank with it meets one without. No MPI is needed to build it. The functions come from the library that mpi4py has
loaded; a handle is what ``MPI._handleof`` gives, passed as a `uintptr_t`: where it is an int (MPICH) the callee looks
at the lower half of the register, where it is a pointer (Open MPI) at all of it (the C ABIs of x86-64 and AArch64).

No signal handler of Python's runs in here: what is begun is ended and noted.
"""

from cpython.dict cimport PyDict_CheckExact, PyDict_Next, PyDict_Size
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLong, PyLong_AsLongAndOverflow, PyLong_CheckExact
from cpython.object cimport Py_TYPE, PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport int32_t, int64_t, intptr_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

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
    const char* PyUnicode_AsUTF8(object text) except NULL
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from *:
    """
    static PyObject *hc_new(PyObject *type, PyObject *nothing)
    {
        return ((PyTypeObject *)type)->tp_new((PyTypeObject *)type, nothing, NULL);
    }
    """
    object hc_new(object type, object nothing)

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

cdef extern from "half.h" nogil:
    float half_to_float(uint16_t half)
    uint16_t float_to_half(float value)

cdef extern from "node.h" nogil:
    ctypedef void Fold(void*, const void*, const void*, size_t)
    ctypedef struct Flags:
        pass
    ctypedef struct Node:
        Flags* flags
        char* slots
        size_t slot, one_phase
        int rank, ranks, looks, differing
        int (*progress)(void*) noexcept nogil
        void* context
        uint64_t number
    ctypedef struct Part:
        size_t at
        size_t nbytes "bytes"
    const int NODE_DIFFERS, NODE_LEAVES, LINE
    const uint64_t NODE_TOO_LARGE
    int node_next(Node* n)
    char* node_slot(Node* n, uint64_t number, int rank)
    int node_meet_filled(Node* n, uint64_t call, uint64_t size)
    size_t node_bytes(int rank, int ranks, size_t slot)
    size_t node_flags_bytes(int ranks)
    int node_all_reduce(Node* n, uint64_t call, Fold* fold, size_t itemsize, char* x, size_t count)
    int node_reduce_scatter(
        Node* n, uint64_t call, Fold* fold, size_t itemsize, char* out, const char* x, size_t count)
    int node_all_gather(Node* n, uint64_t call, char* out, const char* x, size_t nbytes)
    int node_broadcast(Node* n, uint64_t call, int root, char* x, size_t nbytes)
    size_t node_room(const Node* n, size_t parts)
    void node_begin(Node* n, size_t parts, size_t largest)
    bint node_goes_on(Node* n)
    int node_post(Node* n, uint64_t call, size_t parts, char** data, const size_t* nbytes)
    int node_take(Node* n, int rank, size_t part, char* out, size_t nbytes)
    const char* node_part(Node* n, int rank, size_t part, size_t nbytes)
    int node_take_reduced(Node* n, Fold* fold, int ranks, size_t part, char* out, size_t nbytes)
    int node_barrier(Node* n, uint64_t call)
    void node_end()
    Fold* fold_of(char op, char kind, int itemsize)
    void* combine_of(char op, char code)

ctypedef uintptr_t Handle

cdef enum:
    TYPES = 32  # numbers of NumPy's own dtypes are below
    OPS = 16
    PARTS = 64  # of a list
    WAITED = 512  # Works that are waited for at once
    KEPT = 8  # messages sent, for reports
    SMALL = 2048  # elements that are prepared here: of more, NumPy prepares as fast
    REAP_EVERY = 32  # Works that begin, where the program holds the oldest and will wait for it
    MOST_RUNS = 16  # of coalesced arrays: memory for more is not kept
    STATUS_BYTES = 64  # an MPI_Status has at most so many
    LARGEST_COUNT = 0x7FFFFFFF
    WHOLE = 64 << 10  # bytes of a sparse exchange for one rank, up to which they go by memory of the node
    RING = 2048  # operations that are remembered at least: a power of two
    AVERAGE = OPS - 1  # AVG, in the ring
    NOBODY = -1  # likewise: no op, no root, any source, no tag

# -- MPI -----------------------------------------------------------------------------------------------------

ctypedef int (*Bcast)(void*, int, Handle, int, Handle) noexcept nogil
ctypedef int (*Allreduce)(const void*, void*, int, Handle, Handle, Handle) noexcept nogil
ctypedef int (*Iallreduce)(const void*, void*, int, Handle, Handle, Handle, Handle*) noexcept nogil
ctypedef int (*Reduce)(const void*, void*, int, Handle, Handle, int, Handle) noexcept nogil
ctypedef int (*Allgather)(const void*, int, Handle, void*, int, Handle, Handle) noexcept nogil
ctypedef int (*Send)(const void*, int, Handle, int, int, Handle) noexcept nogil
ctypedef int (*Recv)(void*, int, Handle, int, int, Handle, void*) noexcept nogil
ctypedef int (*Isend)(const void*, int, Handle, int, int, Handle, Handle*) noexcept nogil
ctypedef int (*Sendrecv)(
    const void*, int, Handle, int, int, void*, int, Handle, int, int, Handle, void*) noexcept nogil
ctypedef int (*Wait)(Handle*, void*) noexcept nogil
ctypedef int (*Test)(Handle*, int*, void*) noexcept nogil
ctypedef int (*Iprobe)(int, int, Handle, int*, void*) noexcept nogil
ctypedef int (*Cancel)(Handle*) noexcept nogil
ctypedef int (*Barrier)(Handle) noexcept nogil
ctypedef int (*Ibcast)(void*, int, Handle, int, Handle, Handle*) noexcept nogil
ctypedef int (*Ibarrier)(Handle, Handle*) noexcept nogil
ctypedef int (*GetElements)(const void*, Handle, int*) noexcept nogil
ctypedef int (*CopyAttribute)(Handle, int, void*, void*, void*, int*) noexcept nogil
ctypedef int (*DeleteAttribute)(Handle, int, void*, void*) noexcept nogil
ctypedef int (*CreateKeyval)(CopyAttribute, DeleteAttribute, int*, void*) noexcept nogil
ctypedef int (*SetAttribute)(Handle, int, void*) noexcept nogil
ctypedef int (*UnlockAll)(Handle) noexcept nogil
ctypedef int (*FreeWindow)(Handle*) noexcept nogil
ctypedef int (*CreateOp)(void*, int, Handle*) noexcept nogil

cdef struct Library:
    Bcast bcast
    Allreduce allreduce
    Iallreduce iallreduce
    Reduce reduce
    Allgather allgather, alltoall
    Allreduce reduce_scatter_block
    Send send
    Recv recv
    Isend isend, irecv
    Sendrecv sendrecv
    Wait wait
    Test test
    Cancel cancel
    Iprobe iprobe
    Barrier barrier
    Ibcast ibcast
    Ibarrier ibarrier
    GetElements get_elements
    CreateKeyval create_keyval
    SetAttribute set_attribute
    UnlockAll unlock_all
    FreeWindow free_window
    void* in_place
    Handle byte
    int any_source, any_tag
    int source_at  # where in an MPI_Status the source is, in bytes
    int status_bytes
    int handle_bytes
    Handle datatypes[TYPES]  # as which arrays travel, by NumPy's number of their dtype; 0: as bytes
    Handle reduced[OPS][TYPES]  # as which they are reduced by MPI as they are; 0: they are not
    Handle ops[OPS][TYPES]
    Fold* folds[OPS][TYPES]  # in memory of the node; NULL: MPI does it
    uint64_t kinds[TYPES]  # of values: long and long long are alike

cdef Library mpi
cdef tuple NO_ARGUMENTS = ()
cdef dict op_numbers = {}  # by the op, and by its name
cdef object exception_of, length_error, difference_error


cdef void* function(void* library, str name) except NULL:
    """Return a function of MPI: what a tool has preloaded first, as the dynamic linker would."""
    cdef bytes text = name.encode()
    cdef void* found = dlsym(RTLD_DEFAULT, text)
    if found == NULL:
        found = dlsym(library, text)
    if found == NULL:
        raise ImportError(f"{name} is not in the library that mpi4py has loaded")
    return found


def set_up(str path, dict names, object exception, object length, object difference):
    """Find MPI's functions in the library that the extension module at `path` is linked to, and take the tables over.

    `names`: the handles, places and sizes that the fields of Library are called; `datatypes` by NumPy's number, and
    `reductions`, for each op its keys, its letter in node.h, and (datatype, op, kind, itemsize) by NumPy's number. `exception` makes an exception of MPI's
    error code, `length` that of a message that is shorter than its array, `difference` that of
    a call that another rank does not make alike.
    """
    global exception_of, length_error, difference_error
    cdef void* library = dlopen(path.encode(), RTLD_NOW | RTLD_NOLOAD)
    if library == NULL:
        raise ImportError(f"{path} is not loaded")
    mpi.bcast = <Bcast>function(library, "MPI_Bcast")
    mpi.allreduce = <Allreduce>function(library, "MPI_Allreduce")
    mpi.iallreduce = <Iallreduce>function(library, "MPI_Iallreduce")
    mpi.reduce = <Reduce>function(library, "MPI_Reduce")
    mpi.allgather = <Allgather>function(library, "MPI_Allgather")
    mpi.alltoall = <Allgather>function(library, "MPI_Alltoall")
    mpi.reduce_scatter_block = <Allreduce>function(library, "MPI_Reduce_scatter_block")
    mpi.send = <Send>function(library, "MPI_Send")
    mpi.recv = <Recv>function(library, "MPI_Recv")
    mpi.isend = <Isend>function(library, "MPI_Isend")
    mpi.irecv = <Isend>function(library, "MPI_Irecv")
    mpi.sendrecv = <Sendrecv>function(library, "MPI_Sendrecv")
    mpi.wait = <Wait>function(library, "MPI_Wait")
    mpi.test = <Test>function(library, "MPI_Test")
    mpi.iprobe = <Iprobe>function(library, "MPI_Iprobe")
    mpi.cancel = <Cancel>function(library, "MPI_Cancel")
    mpi.barrier = <Barrier>function(library, "MPI_Barrier")
    mpi.ibcast = <Ibcast>function(library, "MPI_Ibcast")
    mpi.ibarrier = <Ibarrier>function(library, "MPI_Ibarrier")
    mpi.get_elements = <GetElements>function(library, "MPI_Get_elements")
    mpi.create_keyval = <CreateKeyval>function(library, "MPI_Comm_create_keyval")
    mpi.set_attribute = <SetAttribute>function(library, "MPI_Comm_set_attr")
    mpi.unlock_all = <UnlockAll>function(library, "MPI_Win_unlock_all")
    mpi.free_window = <FreeWindow>function(library, "MPI_Win_free")
    mpi.in_place = <void*><uintptr_t>handle(names["in_place"])
    mpi.byte = handle(names["byte"])
    mpi.any_source, mpi.any_tag = names["any_source"], names["any_tag"]
    mpi.source_at = names["source_at"]
    mpi.status_bytes = names["status_bytes"]
    mpi.handle_bytes = names["handle_bytes"]
    if not 0 <= mpi.source_at <= mpi.status_bytes - 4 <= STATUS_BYTES - 4 or mpi.handle_bytes not in (4, 8):
        raise ImportError(f"an MPI_Status of {mpi.status_bytes} bytes, a handle of {mpi.handle_bytes}")
    for number, datatype in names["datatypes"].items():
        mpi.datatypes[<int>number] = handle(datatype)
    op_numbers.clear()
    op_names[AVERAGE] = "AVG"
    for place, (keys, letter, table) in enumerate(names["reductions"]):
        op_names[place] = next(key.upper() for key in keys if isinstance(key, str))
        for key in keys:
            op_numbers[key] = place
        for number, (datatype, op, kind, itemsize) in table.items():
            mpi.reduced[<int>place][<int>number] = handle(datatype)
            mpi.ops[<int>place][<int>number] = handle(op)
            mpi.folds[<int>place][<int>number] = fold_of(ord(letter), ord(kind), itemsize)
            mpi.kinds[<int>number] = <uint64_t>ord(kind) << 8 | <uint64_t>itemsize
    exception_of, length_error, difference_error = exception, length, difference


def make_op(str path, str op, str code):
    """Return the handle of MPI's reduction of floats of a dtype with an op of node.h, for the library as in set_up."""
    cdef void* library = dlopen(path.encode(), RTLD_NOW | RTLD_NOLOAD)
    cdef Handle made = 0
    (<CreateOp>function(library, "MPI_Op_create"))(combine_of(ord(op), ord(code)), True, &made)
    return made


cdef Handle handle(object number) except? 0:
    """Return a handle, or MPI_IN_PLACE, that mpi4py gives as a number: it may be negative."""
    return <Handle>(<intptr_t>number if number < 0 else <uintptr_t>number)


# -- windows that a program leaves to MPI_Finalize -------------------------------------------------------------

cdef struct Window:
    uint64_t name
    Handle handle

cdef Window* windows_left = NULL
cdef int windows_count = 0, windows_room = 0
cdef bint end_is_prepared = False


def prepare_end(comm_self):
    """Have MPI_Finalize begin with `before_the_end`: with the attributes of MPI_COMM_SELF (MPI-4.1 §11.2.4)."""
    global end_is_prepared
    cdef int keyval = 0
    if not end_is_prepared:
        end_is_prepared = True
        mpi.create_keyval(copy_nothing, before_the_end, &keyval, NULL)
        mpi.set_attribute(handle(comm_self), keyval, NULL)


def keep_window(window, uint64_t name):
    """Have MPI_Finalize free a window before anything else, in the order of the windows' names.

    The names are the same on all ranks of a window. Otherwise Open MPI frees them in the order of a table of its own,
    in which the ranks of two windows may have them the other way round: each waits for the other, for ever.
    """
    global windows_left, windows_count, windows_room
    cdef Window* more
    if windows_count == windows_room:
        more = <Window*>realloc(windows_left, 2 * (windows_room + 8) * sizeof(Window))
        if more == NULL:
            raise MemoryError
        windows_left, windows_room = more, 2 * (windows_room + 8)
    windows_left[windows_count].name, windows_left[windows_count].handle = name, handle(window)
    windows_count += 1


def drop_window(uint64_t name):
    """Forget a window, which is about to be freed."""
    global windows_count
    cdef int i
    for i in range(windows_count):
        if windows_left[i].name == name:
            windows_count -= 1
            windows_left[i] = windows_left[windows_count]
            break


cdef int copy_nothing(Handle comm, int key, void* extra, void* value, void* copied, int* has_copied) noexcept nogil:
    has_copied[0] = 0
    return 0


cdef int before_the_end(Handle comm, int key, void* value, void* extra) noexcept nogil:
    """Stop the threads of the program that still wait in memory of the node, then free the windows."""
    global windows_count
    cdef int i, first
    node_end()
    while windows_count:
        first = 0
        for i in range(windows_count):
            if windows_left[i].name < windows_left[first].name:
                first = i
        mpi.unlock_all(windows_left[first].handle)
        mpi.free_window(&windows_left[first].handle)
        windows_count -= 1
        windows_left[first] = windows_left[windows_count]
    return 0


# -- what is ordinary ------------------------------------------------------------------------------------------

cdef inline Array* plain(object array, Py_ssize_t largest) noexcept:
    """Return an array of at most `largest` bytes that is aligned, writeable, in C order and without gaps; or NULL."""
    cdef Array* found = <Array*>array
    if Py_TYPE(array) is not &PyArray_Type or not PyArray_ISCARRAY(found) or PyArray_NBYTES(found) > largest:
        return NULL
    return found


cdef inline bint is_sendable(object array) noexcept:
    """Whether it is an array of one of NumPy's numbers that is aligned, in C order and without gaps."""
    return (
        Py_TYPE(array) is &PyArray_Type and PyArray_ISCARRAY_RO(<Array*><PyObject*>array)
        and type_of(<Array*><PyObject*>array) != 0
    )


cdef inline Array* without_gaps(object array) except NULL:
    """Return an array that has been prepared for MPI; others would take another way than the other ranks' do."""
    if not PyArray_Check(array) or not PyArray_IS_C_CONTIGUOUS(<Array*>array):
        raise TypeError(f"expected an array in C order and without gaps, not {type(array)}")
    return <Array*>array


cdef inline Handle type_of(Array* array) noexcept nogil:
    """Return the datatype as which an array travels; 0 where it is not in the table."""
    return mpi.datatypes[PyArray_TYPE(array)] if PyArray_TYPE(array) < TYPES else 0


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


cdef inline bint is_rank(object number, int size) noexcept:
    """Whether it is an int, and a rank of a group of that size."""
    cdef int overflow  # of a number that no long holds: it is no rank, either
    return PyLong_CheckExact(number) and 0 <= PyLong_AsLongAndOverflow(number, &overflow) < size


cdef enum:
    BROADCAST = 1
    ALL_REDUCE
    ALL_GATHER
    REDUCE_SCATTER
    BARRIER
    ALL_GATHER_LIST
    GATHER
    SCATTER
    ALL_TO_ALL
    REDUCE_SCATTER_LIST
    REDUCE
    SCAN
    EXSCAN
    ALL_TO_ALL_SINGLE
    COALESCED
    BROADCAST_COALESCED
    ALL_GATHER_COALESCED
    REDUCE_SCATTER_COALESCED
    ALL_GATHER_LISTS
    SPARSE
    SEND  # from here on messages
    RECV
    SENDRECV


# as which they stand in the ring
NAMES = ("", "broadcast", "all_reduce", "all_gather_single", "reduce_scatter_single", "barrier", "all_gather", "gather",
         "scatter", "all_to_all", "reduce_scatter", "reduce", "scan", "exscan", "all_to_all_single",
         "all_reduce_coalesced", "broadcast_coalesced", "all_gather_single_coalesced",
         "reduce_scatter_single_coalesced", "all_gather_coalesced", "all_to_all_sparse", "send", "recv", "sendrecv")

MOVES = {"all_gather": ALL_GATHER_LIST, "gather": GATHER, "scatter": SCATTER, "all_to_all": ALL_TO_ALL}


cdef inline uint64_t call_of(int collective, int detail, uint64_t kind) noexcept nogil:
    """Return what ranks compare before they work in memory of the node: also the root or op, and the kind of values."""
    return <uint64_t>collective << 56 | <uint64_t>detail << 24 | kind


cdef int make_progress(void* comm) noexcept nogil:
    """Let MPI make progress while this rank waits for others; return what it says of dead ranks."""
    cdef char[STATUS_BYTES] status
    cdef int is_there
    return mpi.iprobe(mpi.any_source, mpi.any_tag, <Handle>comm, &is_there, status)


cdef inline int count_of(Array* array) noexcept nogil:
    return <int>PyArray_SIZE(array)


# -- the ring: the last operations of the fast paths of this process --------------------------------------------

cdef struct Entry:
    long long serial  # from 1 on
    long long began, ended  # nanoseconds, 0 while it is in flight
    long long number, nbytes
    int path, peer, tag  # tag: of a sparse exchange how many elements
    signed char what, op, dtype  # what is 0 where it has been left to the checks
    unsigned char is_async, has_failed, is_exact


cdef Entry* ring = <Entry*>calloc(RING, sizeof(Entry))
cdef long long ring_mask = RING - 1, written = 0
cdef int paths = 0
cdef bint times_are_exact = False
cdef object caller = None  # returns the line of the program that calls, where that is wanted
cdef list callers = []
cdef list op_names = [""] * OPS


cdef inline long long now() noexcept nogil:
    """Return the time; unless exact times are wanted, that of the last tick: it takes 3 ns instead of 20."""
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC if times_are_exact else CLOCK_MONOTONIC_COARSE, &time)
    return time.tv_sec * 1000000000 + time.tv_nsec


cdef inline long long note(FastPath path, int what, int dtype, Py_ssize_t nbytes, int op, int peer, int tag,
                           bint is_async) except -1:
    """Note that an operation begins; return its serial number in the ring."""
    global written
    written += 1
    cdef long long serial = written
    cdef Entry* entry = &ring[serial & ring_mask]
    entry.serial, entry.began, entry.ended = serial, now(), 0
    entry.number = 1 + (path.messages + path.passed_messages if what >= SEND else path.count + path.passed_collectives)
    entry.nbytes, entry.path, entry.peer, entry.tag = nbytes, path.place, peer, tag
    entry.what, entry.op, entry.dtype = what, op, dtype
    entry.is_async, entry.has_failed, entry.is_exact = is_async, False, times_are_exact
    if caller is not None:
        callers[serial & ring_mask] = caller()
    return serial


cdef inline long long note_end(long long serial, bint has_failed) noexcept:
    """Note the end of an operation; return how many nanoseconds it took, -1 where that is not known exactly."""
    cdef Entry* entry = &ring[serial & ring_mask]
    if entry.serial != serial or entry.ended != 0:
        return -1
    entry.ended, entry.has_failed = now(), has_failed
    return entry.ended - entry.began if entry.is_exact and times_are_exact else -1


def keep(long long size, bint is_exact, whose):
    """Remember at least `size` operations from now on, with exact times, and what `whose()` returns, if asked for."""
    global ring, ring_mask, times_are_exact, caller, callers
    cdef long long serial, entries = RING
    while entries < size:
        entries *= 2
    cdef Entry* larger
    if entries > ring_mask + 1:
        larger = <Entry*>calloc(entries, sizeof(Entry))
        if larger == NULL:
            raise MemoryError
        for serial in range(max(written - ring_mask, 1), written + 1):
            larger[serial & (entries - 1)] = ring[serial & ring_mask]
        ring, ring_mask = larger, entries - 1  # the former is not freed: `blocking` may be reading it
    callers = [None] * (0 if whose is None else ring_mask + 1)
    times_are_exact, caller = is_exact, whose


def past(long long since=0):
    """Return a row for each operation with a serial number above `since` that is remembered, the oldest first.

    The elements are -1 where they follow from the bytes.
    """
    cdef Entry each
    cdef long long serial
    rows = []
    for serial in range(max(written - ring_mask, since + 1, 1), written + 1):
        each = ring[serial & ring_mask]
        if each.what:
            rows.append((
                serial, each.path, NAMES[each.what], each.number, each.dtype, each.nbytes,
                each.tag if each.what == SPARSE else -1, "" if each.op < 0 else op_names[each.op],
                None if each.peer < 0 else each.peer, None if each.tag < 0 or each.what == SPARSE else each.tag,
                bool(each.is_async), 1e-9 * each.began,
                1e-9 * max(each.began, each.ended) if each.ended else 0.0,  # of two clocks, maybe
                bool(each.has_failed), callers[serial & ring_mask] if caller is not None else None,
            ))
    return rows


cdef struct Blocking:  # HeldRing in gil_held.h
    const char* name
    long long number, began
    int path


cdef const char* c_names[32]
for row, name in enumerate(NAMES):
    c_names[row] = PyUnicode_AsUTF8(name)


cdef int blocking(Blocking* found, int most) noexcept nogil:
    """Find the blocking operations that have not ended; called by a thread that has no GIL, while another keeps it."""
    cdef long long serial
    cdef int count = 0
    cdef Entry* entry
    for serial in range(written, max(written - min(ring_mask, <long long>RING), 0), -1):
        entry = &ring[serial & ring_mask]
        if count < most and entry.what != 0 and entry.ended == 0 and not entry.is_async:
            found[count].name, found[count].number = c_names[entry.what], entry.number
            found[count].began, found[count].path = entry.began, entry.path
            count += 1
    return count


def blocking_address():
    """Return the address of `blocking`."""
    return <uintptr_t>&blocking


def last_serial():
    """Return the serial number of the last operation in the ring; 0 before the first."""
    return written


cdef inline Py_ssize_t nbytes_at(list arrays, Py_ssize_t i) noexcept:
    return PyArray_NBYTES(<Array*>PyList_GET_ITEM(arrays, i))


cdef bint may_overlap(list xs, list ys) noexcept:
    """Whether memory of ordinary arrays of one list can be that of the other's: whether all of one lie behind the other."""
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


cdef void pack(list arrays, Py_ssize_t first, Py_ssize_t last, char* flat, Py_ssize_t rows, Py_ssize_t width,
               bint packs) noexcept:
    """Copy arrays of as many rows to columns of a flat array, whose rows have `width` bytes; or back."""
    cdef Py_ssize_t i, row, nbytes
    cdef char* data
    for i in range(first, last):
        data = <char*>PyArray_DATA(<Array*>PyList_GET_ITEM(arrays, i))
        nbytes = PyArray_NBYTES(<Array*>PyList_GET_ITEM(arrays, i)) // rows
        for row in range(rows):
            if packs:
                memcpy(flat + row * width, data + row * nbytes, nbytes)
            else:
                memcpy(data + row * nbytes, flat + row * width, nbytes)
        flat += nbytes


# -- the fast path ---------------------------------------------------------------------------------------------

cdef class FastPath:
    """What mpi/fast_path.py describes; its subclass in mpi/compiled.py has what may be slow.

    `windows` is empty until the program makes a node-shared array.
    """

    cdef public long long count, messages
    cdef public long long passed_collectives, passed_messages  # that took the way through the checks
    cdef readonly int place  # in the ring
    cdef long long entry  # of the blocking collective that goes on
    cdef Handle comm
    cdef int rank, size, largest_tag
    cdef Py_ssize_t largest, largest_async
    cdef dict windows
    cdef readonly object door
    cdef object usual_op, average, timeout
    cdef char* scratch  # of coalesced arrays
    cdef Py_ssize_t scratch_bytes, largest_run
    cdef int usual_place
    cdef dict in_flight
    cdef int unasked  # Works begun since those in flight have been asked
    cdef Py_ssize_t unasked_bytes  # likewise: of their arrays
    cdef Node node  # its flags are NULL until it is open
    cdef Py_ssize_t node_largest, node_reduced  # bytes; the second: of reductions
    cdef char *sent[PARTS]  # of the operation that goes on: where the parts are
    cdef char *received[PARTS]
    cdef size_t sent_bytes[PARTS]
    cdef size_t received_bytes[PARTS]
    cdef bint is_alone  # in its group: there is nobody to communicate with, nor to wait for
    cdef bint has_left  # memory of the node had no room: the checks and MPI do this operation
    cdef int before_node  # how many operations go to MPI before it is worth opening
    cdef object work_class

    def __init__(self, comm, int rank, int size, dict windows, Py_ssize_t largest, Py_ssize_t largest_async,
                 int largest_tag, usual_op, average, Py_ssize_t largest_run, type work_class):
        """`comm`: its handle; `largest`: bytes of an array, `largest_run`: of arrays that are packed into one;
        `usual_op`: the op that is looked for first, SUM; `average`: AVG.
        """
        if not issubclass(work_class, Pending):
            raise TypeError(f"{work_class!r} is no subclass of Pending")
        self.comm = handle(comm)
        self.rank, self.size, self.largest_tag = rank, size, largest_tag
        self.windows = windows
        self.largest = min(largest, LARGEST_COUNT)
        self.largest_async = min(largest_async, LARGEST_COUNT)
        self.node_largest = self.node_reduced = -1
        self.average, self.largest_run = average, min(largest_run, self.largest)
        self.usual_op, self.usual_place = usual_op, op_numbers[usual_op]
        self.work_class = work_class
        global paths
        paths += 1
        self.place = paths

    def attach(self, door):
        """Keep what is in flight in that group's door from now on."""
        self.door, self.in_flight, self.timeout = door, door.in_flight, door.timeout
        self.passed_collectives, self.passed_messages = door.collectives, door.messages
        door.notes.follow(self)

    def addresses_of_counts(self):
        """Return where the counts of collectives and of messages are: of its own, and of those that have passed it."""
        return (<uintptr_t>&self.count, <uintptr_t>&self.passed_collectives,
                <uintptr_t>&self.messages, <uintptr_t>&self.passed_messages)

    cdef inline int notes(self, int what, int dtype, Py_ssize_t nbytes, int op, int peer) except -1:
        """Note in the ring that a blocking collective begins."""
        self.entry = note(self, what, dtype, nbytes, op, peer, NOBODY, False)
        return 0

    cdef inline bint has_done(self) noexcept:
        """Count the collective that has been noted."""
        self.count += 1
        note_end(self.entry, False)
        return True

    cdef inline bint has_passed(self, long long entry, bint is_whole) noexcept:
        """Count a blocking message, which has been noted; return whether it has the length that was expected."""
        self.messages += 1
        if ring[entry & ring_mask].serial == entry:
            ring[entry & ring_mask].number = self.messages + self.passed_messages  # threads may overtake each other
        note_end(entry, not is_whole)
        return is_whole

    def note_failure(self):
        """Note that what has been begun last has failed."""
        cdef long long serial
        for serial in range(written, max(written - ring_mask, 1) - 1, -1):
            if ring[serial & ring_mask].path == self.place and ring[serial & ring_mask].ended == 0:
                note_end(serial, True)
                return

    @property
    def last_sent(self):
        """The ranks and the tags of the last messages sent; any thread may ask."""
        cdef Entry each
        cdef long long serial
        found = []
        for serial in range(written, max(written - ring_mask, 1) - 1, -1):
            each = ring[serial & ring_mask]
            if each.path == self.place and (each.what == SEND or each.what == SENDRECV) and len(found) < KEPT:
                found.append((each.peer, each.tag))
        return found

    cdef int place_of(self, object op) noexcept:
        """Return the row of an op in the tables; -1 where it has none."""
        if op is self.usual_op:
            return self.usual_place
        try:
            return op_numbers.get(op, -1)
        except TypeError:  # it can't be looked up
            return -1

    cdef inline bint is_tag(self, object tag) noexcept:
        cdef int overflow
        return PyLong_CheckExact(tag) and 0 <= PyLong_AsLongAndOverflow(tag, &overflow) <= self.largest_tag

    cdef inline bint is_reducible(self, Array* array, int place) noexcept:
        return (
            place >= 0 and PyArray_TYPE(array) < TYPES and mpi.reduced[place][PyArray_TYPE(array)] != 0
            and PyDict_Size(self.windows) == 0
        )

    def broadcast(self, array, root):
        """Do a broadcast, or return False."""
        cdef Array* x = plain(array, self.largest)
        if x == NULL or not is_rank(root, self.size) or type_of(x) == 0:
            return False
        cdef int code, source = PyLong_AsLong(root)
        self.notes(BROADCAST, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY, source)
        code = self.broadcast_memory(<char*>PyArray_DATA(x), count_of(x), PyArray_NBYTES(x), type_of(x), source)
        if code:
            raise self.failed("broadcast", code)
        return self.has_done()

    cdef int broadcast_memory(self, char* data, int count, Py_ssize_t nbytes, Handle datatype, int root) except? -9:
        """Broadcast `nbytes` bytes, which are `count` values; return MPI's code, as the next two."""
        cdef int code
        if self.is_alone:
            return 0
        cdef bint in_node = self.is_in_node(nbytes)
        with nogil:
            if in_node:
                code = node_broadcast(&self.node, call_of(BROADCAST, root, 0), root, data, nbytes)
            else:
                code = mpi.bcast(data, count, datatype, root, self.comm)
        return code

    cdef int all_gather_memory(self, char* y, char* x, int count, Py_ssize_t nbytes, Handle datatype) except? -9:
        """Gather the `nbytes` bytes, which are `count` values, of each rank."""
        cdef int code = 0
        cdef bint in_node = not self.is_alone and self.is_in_node(nbytes * self.size)
        with nogil:
            if self.is_alone:
                memcpy(y, x, nbytes)
            elif in_node:
                code = node_all_gather(&self.node, call_of(ALL_GATHER, 0, 0), y, x, nbytes)
            else:
                code = mpi.allgather(x, count, datatype, y, count, datatype, self.comm)
        return code

    cdef int reduce_scatter_memory(self, char* y, char* x, int count, int number, int itemsize, int place) except? -9:
        """Reduce parts of `count` values of the dtype with that number."""
        cdef int code = 0
        cdef size_t nbytes = <size_t>count * itemsize
        cdef bint in_node = (
            not self.is_alone and mpi.folds[place][number] != NULL and self.reduces_in_node(nbytes * self.size)
        )
        with nogil:
            if self.is_alone:
                memcpy(y, x, nbytes)
            elif in_node:
                code = node_reduce_scatter(&self.node, call_of(REDUCE_SCATTER, place, mpi.kinds[number]),
                                           mpi.folds[place][number], itemsize, y, x, count)
            else:
                code = mpi.reduce_scatter_block(x, y, count, mpi.reduced[place][number], mpi.ops[place][number],
                                                self.comm)
        return code

    def all_reduce(self, array, op):
        """Do an all_reduce, or return False."""
        cdef Array* x = plain(array, self.largest)
        cdef int code, place = self.place_of(op)
        if x == NULL or not self.is_reducible(x, place):
            return self.all_reduce_prepared(array, op)
        self.notes(ALL_REDUCE, PyArray_TYPE(x), PyArray_NBYTES(x), place, NOBODY)
        code = self.all_reduce_memory(<char*>PyArray_DATA(x), PyArray_SIZE(x), PyArray_TYPE(x), place)
        if code:
            raise self.failed("all_reduce", code)
        return self.has_done()

    cdef int all_reduce_memory(self, char* data, Py_ssize_t count, int number, int place) except? -9:
        """Reduce `count` values of the dtype with that number in place; return MPI's code."""
        if self.is_alone:
            return 0
        cdef int code, itemsize = mpi.kinds[number] & 255
        cdef bint in_node = mpi.folds[place][number] != NULL and self.reduces_in_node(count * itemsize)
        with nogil:
            if in_node:
                code = node_all_reduce(&self.node, call_of(ALL_REDUCE, place, mpi.kinds[number]),
                                       mpi.folds[place][number], itemsize, data, count)
            else:
                code = mpi.allreduce(mpi.in_place, data, <int>count, mpi.reduced[place][number],
                                     mpi.ops[place][number], self.comm)
        return code

    cdef bint all_reduce_prepared(self, object array, object op) except -1:
        """Do an all_reduce of an array with gaps, of float16, or with AVG: what mpi/reductions.py does around MPI's."""
        cdef Array* x = <Array*>array
        cdef bint averages = op is self.average or (type(op) is str and op == "avg")
        cdef int code, place = self.usual_place if averages else self.place_of(op)
        if Py_TYPE(array) is not &PyArray_Type or not PyArray_ISWRITEABLE(x) or not PyArray_ISNOTSWAPPED(x):
            return False
        cdef Py_ssize_t i, count = PyArray_SIZE(x)
        cdef int number = PyArray_TYPE(x)
        cdef bint is_half = number == NPY_HALF
        if is_half:
            number = NPY_FLOAT
        elif averages and number != NPY_FLOAT and number != NPY_DOUBLE:
            return False
        if place < 0 or number >= TYPES or mpi.reduced[place][number] == 0 or PyDict_Size(self.windows):
            return False
        if count > SMALL or count * <Py_ssize_t>(mpi.kinds[number] & 255) > self.largest:
            return False
        # its own memory, or a copy's; of half precisions, wider
        cdef object own = array if PyArray_ISCARRAY(x) else PyArray_NewCopy(x, NPY_CORDER)
        cdef char* data = <char*>PyArray_DATA(<Array*>own)
        cdef float[SMALL] wide
        if is_half:
            for i in range(count):
                wide[i] = half_to_float((<uint16_t*>data)[i])
        self.notes(ALL_REDUCE, PyArray_TYPE(x), PyArray_NBYTES(x), AVERAGE if averages else place, NOBODY)
        code = self.all_reduce_memory(<char*>wide if is_half else data, count, number, place)
        if code:
            raise self.failed("all_reduce", code)
        if averages:
            average(<char*>wide if is_half else data, count, number, self.size)
        if is_half:
            for i in range(count):
                (<uint16_t*>data)[i] = float_to_half(wide[i])
        if own is not array:
            PyArray_CopyInto(x, <Array*>own)
        return self.has_done()

    def all_reduce_coalesced(self, arrays, op):
        """Do an all_reduce of many arrays of a dtype, packed into few, as mpi/coalesced.py; or return False."""
        cdef bint averages = op is self.average or (type(op) is str and op == "avg")
        cdef int code, number, place = self.usual_place if averages else self.place_of(op)
        number = self.type_of_first(arrays)
        if number < 0 or place < 0 or mpi.reduced[place][number] == 0 or PyDict_Size(self.windows):
            return False
        if averages and number != NPY_FLOAT and number != NPY_DOUBLE:
            return False
        cdef list xs = arrays
        cdef int itemsize = mpi.kinds[number] & 255
        cdef Py_ssize_t first = 0, n = PyList_GET_SIZE(xs), total = self.bytes_of(xs, 0, n, number), i = n, run = total
        cdef Py_ssize_t largest = self.largest_run // itemsize * itemsize
        if total < 0:
            return False
        if total > largest:
            xs = list(xs)  # between the runs other threads may change the program's list
        self.make_scratch(min(total, largest))
        self.notes(COALESCED, number, total, AVERAGE if averages else place, NOBODY)
        while first < n:
            if total > largest:
                i, run = first, 0
                while i < n and (i == first or run + nbytes_at(xs, i) <= largest):
                    run += nbytes_at(xs, i)
                    i += 1
            pack(xs, first, i, self.scratch, 1, run, True)
            code = self.all_reduce_memory(self.scratch, run // itemsize, number, place)
            if code:
                raise self.failed("all_reduce_coalesced", code)
            if averages:
                average(self.scratch, run // itemsize, number, self.size)
            pack(xs, first, i, self.scratch, 1, run, False)
            first = i
        return self.has_done()

    cdef int make_scratch(self, Py_ssize_t nbytes) except -1:
        if nbytes >= self.scratch_bytes:  # also before the first of nothing: memcpy takes no NULL
            free(self.scratch)
            self.scratch_bytes = 0
            self.scratch = <char*>malloc(nbytes + 1)
            if self.scratch == NULL:
                raise MemoryError
            self.scratch_bytes = nbytes + 1
        return 0

    cdef int keep_scratch(self, int code) noexcept:
        """Let the memory go where it is large; return `code`."""
        if self.scratch_bytes > MOST_RUNS * self.largest_run:
            free(self.scratch)
            self.scratch, self.scratch_bytes = NULL, 0
        return code

    def broadcast_coalesced(self, arrays, root):
        """Do a broadcast of many arrays of a dtype, packed into few; or return False."""
        return is_rank(root, self.size) and self.in_runs(BROADCAST_COALESCED, arrays, arrays, 1, PyLong_AsLong(root), 0)

    def all_gather_single_coalesced(self, outputs, inputs):
        """As broadcast_coalesced, for all_gather_single."""
        return self.in_runs(ALL_GATHER_COALESCED, outputs, inputs, self.size, NOBODY, NOBODY)

    def reduce_scatter_single_coalesced(self, outputs, inputs, op):
        """As broadcast_coalesced, for reduce_scatter_single."""
        cdef int place = self.place_of(op), number = self.type_of_first(inputs)
        if place < 0 or number < 0 or mpi.reduced[place][number] == 0 or PyDict_Size(self.windows):
            return False
        return self.in_runs(REDUCE_SCATTER_COALESCED, inputs, outputs, self.size, NOBODY, place)

    cdef bint in_runs(self, int what, larger, smaller, int rows, int root, int place) except -1:
        """Do a coalesced operation in runs of neighbours, as mpi/coalesced.py; `larger` arrays have `rows` parts."""
        cdef int code = 0, number = self.type_of_first(larger), itemsize
        if number < 0 or not PyList_CheckExact(smaller):
            return False
        cdef list ys = list(larger), xs = list(smaller)  # whatever other threads do with the program's lists
        cdef Py_ssize_t i, first = 0, n = len(ys), total = self.bytes_of(ys, 0, n, number)
        if len(xs) != n or total < 0 or self.bytes_of(xs, 0, n, number) < 0:
            return False
        for i in range(n):
            if nbytes_at(ys, i) != nbytes_at(xs, i) * rows:
                return False
        cdef Py_ssize_t part, packed = self.largest_run
        cdef bint broadcasts = what == BROADCAST_COALESCED, has_root = self.rank == root
        # Inputs and outputs may share memory: then all inputs are packed before an output is written.
        cdef bint packs_first = not broadcasts and may_overlap(xs, ys), communicates
        if packs_first:
            packed = total if what == REDUCE_SCATTER_COALESCED else total // rows
        itemsize = PyArray_ITEMSIZE(<Array*>PyList_GET_ITEM(ys, 0))
        self.make_scratch(packed + self.largest_run)
        self.notes(what, number, total if broadcasts else total + total // rows, place, root)
        cdef char* data
        cdef char* out = self.scratch + (0 if broadcasts else packed)
        cdef list inputs = xs if what == ALL_GATHER_COALESCED else ys
        cdef list outputs = xs if what == REDUCE_SCATTER_COALESCED else ys
        cdef int rows_in = rows if what == REDUCE_SCATTER_COALESCED else 1
        cdef int rows_out = rows if what == ALL_GATHER_COALESCED else 1
        for communicates in (False, True):
            first, data = 0, self.scratch
            while first < n and code == 0:
                i, total = first, 0
                while i < n and (i == first or total + nbytes_at(ys, i) <= self.largest_run):
                    total += nbytes_at(ys, i)
                    i += 1
                part = total // rows
                if communicates != packs_first and (has_root or not broadcasts):
                    pack(inputs, first, i, data, rows_in, part, True)
                if communicates:
                    if broadcasts:
                        code = self.broadcast_memory(data, total // itemsize, total, mpi.datatypes[number], root)
                    elif what == ALL_GATHER_COALESCED:
                        code = self.all_gather_memory(out, data, part // itemsize, part, mpi.datatypes[number])
                    else:
                        code = self.reduce_scatter_memory(out, data, part // itemsize, number, itemsize, place)
                    if code == 0 and not has_root:
                        pack(outputs, first, i, out, rows_out, part, False)
                if packs_first:
                    data += part * rows_in
                first = i
        if self.keep_scratch(code):
            raise self.failed(NAMES[what], code)
        return self.has_done()

    def __dealloc__(self):
        free(self.scratch)

    def reduce(self, array, root, op):
        """Do a reduce, or return False."""
        cdef Array* x = plain(array, self.largest)
        cdef int code, place = self.place_of(op)
        if x == NULL or not is_rank(root, self.size) or not self.is_reducible(x, place):
            return False
        cdef int number = PyArray_TYPE(x), destination = PyLong_AsLong(root)
        self.notes(REDUCE, number, PyArray_NBYTES(x), place, destination)
        if self.is_alone:
            return self.has_done()
        if mpi.folds[place][number] != NULL and self.reduces_in_node(PyArray_NBYTES(x)):
            return self.ends(self.reduce_array(REDUCE, x, place, destination, self.size if self.rank == destination else 0), "reduce")
        cdef void* sent = mpi.in_place if self.rank == destination else PyArray_DATA(x)
        cdef void* received = PyArray_DATA(x) if self.rank == destination else NULL
        with nogil:
            code = mpi.reduce(sent, received, count_of(x), mpi.reduced[place][number], mpi.ops[place][number],
                              destination, self.comm)
        if code:
            raise self.failed("reduce", code)
        return self.has_done()

    def all_gather_single(self, output, array):
        """Do an all_gather_single, or return False."""
        cdef Array* y = plain(output, self.largest)
        cdef Array* x = plain(array, self.largest)
        if not self.is_pair(y, x) or PyArray_NBYTES(y) != PyArray_NBYTES(x) * self.size or type_of(x) == 0:
            return False
        self.notes(ALL_GATHER, PyArray_TYPE(x), PyArray_NBYTES(y) + PyArray_NBYTES(x), NOBODY, NOBODY)
        cdef int code
        if self.is_alone:
            return self.copies(y, x)
        code = self.all_gather_memory(<char*>PyArray_DATA(y), <char*>PyArray_DATA(x), count_of(x), PyArray_NBYTES(x),
                                      type_of(x))
        if code:
            raise self.failed("all_gather_single", code)
        return self.has_done()

    def reduce_scatter_single(self, output, array, op):
        """Do a reduce_scatter_single, or return False."""
        cdef Array* y = plain(output, self.largest)
        cdef Array* x = plain(array, self.largest)
        cdef int code, place = self.place_of(op)
        if not self.is_pair(y, x) or PyArray_NBYTES(x) != PyArray_NBYTES(y) * self.size:
            return False
        if not self.is_reducible(x, place):
            return False
        self.notes(REDUCE_SCATTER, PyArray_TYPE(x), PyArray_NBYTES(y) + PyArray_NBYTES(x), place, NOBODY)
        if self.is_alone:
            return self.copies(y, x)
        code = self.reduce_scatter_memory(<char*>PyArray_DATA(y), <char*>PyArray_DATA(x), count_of(y), PyArray_TYPE(x),
                                          PyArray_ITEMSIZE(x), place)
        if code:
            raise self.failed("reduce_scatter_single", code)
        return self.has_done()

    def all_to_all_single(self, output, array):
        """Do an all_to_all_single of equal parts, or return False."""
        cdef Array* y = plain(output, self.largest)
        cdef Array* x = plain(array, self.largest)
        if not self.is_pair(y, x) or PyArray_NBYTES(x) != PyArray_NBYTES(y) or type_of(x) == 0:
            return False
        if not (PyArray_NDIM(x) and PyArray_NDIM(y)) or PyArray_DIM(x, 0) % self.size or PyArray_DIM(y, 0) % self.size:
            return False
        self.notes(ALL_TO_ALL_SINGLE, PyArray_TYPE(x), PyArray_NBYTES(y) + PyArray_NBYTES(x), NOBODY, NOBODY)
        if self.is_alone:
            return self.copies(y, x)
        cdef int code, part = count_of(x) // self.size
        if self.is_in_node(PyArray_NBYTES(x)):
            return self.ends(self.move_equal_parts(y, x), "all_to_all_single")
        with nogil:
            code = mpi.alltoall(PyArray_DATA(x), part, type_of(x), PyArray_DATA(y), part, type_of(x), self.comm)
        if code:
            raise self.failed("all_to_all_single", code)
        return self.has_done()

    cdef bint copies(self, Array* output, Array* array) noexcept:
        """Do what a rank alone has to do where the result is another array."""
        memcpy(PyArray_DATA(output), PyArray_DATA(array), PyArray_NBYTES(array))
        return self.has_done()

    # Lists of arrays, and what reduces to some ranks: in memory of the node, once it is open; the rest is left to MPI.

    def scan(self, array, op):
        """Do a scan, or return False."""
        return self.scans(SCAN, array, op, self.rank + 1)

    def exscan(self, array, op):
        """Do an exscan, or return False."""
        return self.scans(EXSCAN, array, op, self.rank)

    cdef bint scans(self, int what, object array, object op, int ranks) except -1:
        """Reduce the arrays of the first ranks, or return False."""
        cdef Array* x = plain(array, self.largest)
        cdef int place = self.place_of(op)
        if self.node.flags == NULL or x == NULL or not self.is_foldable(x, place):
            return False
        if not self.reduces_in_node(PyArray_NBYTES(x)):
            return False
        self.notes(what, PyArray_TYPE(x), PyArray_NBYTES(x), place, NOBODY)
        return self.ends(self.reduce_array(what, x, place, 0, ranks), NAMES[what])

    def all_gather(self, outputs, array):
        """Do an all_gather, or return False."""
        cdef Array* x = plain(array, self.largest)
        if not self.takes_list(outputs, x, self.received, self.received_bytes):
            return False
        cdef size_t largest = self.largest_in_node(self.received_bytes, self.node_largest)
        if largest == 0 or largest > node_room(&self.node, 1) and may_overlap(outputs, [array]):
            return False  # in rounds, of which the first would write what the second reads
        self.sent[0], self.sent_bytes[0] = <char*>PyArray_DATA(x), PyArray_NBYTES(x)
        self.notes_lists(ALL_GATHER_LIST, PyArray_TYPE(x), 1, self.size, NOBODY, NOBODY)
        return self.ends(self.move(ALL_GATHER_LIST, 1, self.size, 0, largest), "all_gather")

    def all_gather_coalesced(self, output_lists, arrays):
        """Do an all_gather of the arrays of each rank in runs of neighbours, as mpi/backend.py; or return False."""
        cdef int rank, code = 0, differs = 0, number = self.type_of_first(arrays)
        if self.node.flags == NULL or number < 0 or not PyList_CheckExact(output_lists):
            return False
        if PyList_GET_SIZE(output_lists) != self.size:
            return False
        cdef list xs = list(arrays), ys = []
        cdef Py_ssize_t i, first, n = len(xs), total = self.bytes_of(xs, 0, n, number)
        for outputs in output_lists:
            if not PyList_CheckExact(outputs) or PyList_GET_SIZE(outputs) != n:
                return False
            ys += outputs
        cdef Py_ssize_t received = self.bytes_of(ys, 0, n * self.size, number)
        if received < 0 or total < 0:
            return False
        for i in range(n):
            if nbytes_at(ys, self.rank * n + i) != nbytes_at(xs, i):
                return False
        cdef bint packs_first = may_overlap(xs, ys), communicates
        cdef char* found
        cdef size_t largest
        self.make_scratch(total if packs_first else self.node.slot)
        for communicates in (False, True):
            first, self.sent[0] = 0, self.scratch
            if communicates:
                self.notes(ALL_GATHER_LISTS, number, total + received, NOBODY, NOBODY)
            while first < n and code == 0:
                i = self.end_of_run(ys, n, first)
                largest = self.largest_in_node(self.received_bytes, self.node_largest)
                if i == first or largest == 0:
                    return False
                if communicates != packs_first:
                    pack(xs, first, i, self.sent[0], 1, 0, True)
                if communicates:
                    self.sent_bytes[0] = self.received_bytes[self.rank]
                    code = self.move(ALL_GATHER_LIST, 1, 0, 0, largest)
                    for rank in range(self.size if code == 0 else 0):
                        found = <char*>node_part(&self.node, rank, 0, self.received_bytes[rank])
                        if found == NULL:
                            differs = NODE_DIFFERS  # for this rank alone: it takes part in the other runs
                        else:
                            pack(ys, rank * n + first, rank * n + i, found, 1, 0, False)
                if packs_first:
                    self.sent[0] += self.received_bytes[self.rank]
                first = i
        return self.ends(self.keep_scratch(code or differs), "all_gather_coalesced")

    cdef Py_ssize_t end_of_run(self, list arrays, Py_ssize_t n, Py_ssize_t first) noexcept:
        """Return the end of a run of neighbours of which each rank's have room in its slot, and note their bytes."""
        cdef Py_ssize_t i
        cdef int rank
        for rank in range(self.size):
            self.received_bytes[rank] = 0
        for i in range(first, n):
            for rank in range(self.size):
                if self.received_bytes[rank] + nbytes_at(arrays, rank * n + i) > self.node.slot - LINE:
                    return i
            for rank in range(self.size):
                self.received_bytes[rank] += nbytes_at(arrays, rank * n + i)
        return n

    def gather(self, array, outputs, root):
        """Do a gather, or return False."""
        return self.moves_rooted(GATHER, array, outputs, root, self.sent, self.sent_bytes, self.received, self.received_bytes)

    def scatter(self, output, inputs, root):
        """Do a scatter, or return False."""
        return self.moves_rooted(SCATTER, output, inputs, root, self.received, self.received_bytes, self.sent, self.sent_bytes)

    cdef bint moves_rooted(self, int what, object array, object items, object root, char** one, size_t* one_bytes,
                           char** each, size_t* each_bytes) except -1:
        """Move `array` to the root's list, or from there, or return False."""
        cdef Array* x = plain(array, self.largest)
        if x == NULL or not is_rank(root, self.size) or self.node.flags == NULL or type_of(x) == 0:
            return False
        cdef int of = PyLong_AsLong(root), n = self.size if self.rank == of else 0
        if not (self.takes_list(items, x, each, each_bytes) if n else items is None):
            return False
        one[0], one_bytes[0] = <char*>PyArray_DATA(x), PyArray_NBYTES(x)
        cdef int n_sent = 1 if what == GATHER else n, n_received = n if what == GATHER else 1
        self.notes_lists(what, PyArray_TYPE(x), n_sent, n_received, NOBODY, of)
        return self.ends(self.move(what, n_sent, n_received, of, 0), NAMES[what])

    def reduce_scatter(self, output, inputs, op):
        """Do a reduce_scatter, or return False."""
        cdef Array* y = plain(output, self.largest)
        cdef int place = self.place_of(op)
        if y == NULL or not self.is_foldable(y, place):
            return False
        if not self.takes_list(inputs, y, self.sent, self.sent_bytes):
            return False
        cdef size_t largest = self.largest_in_node(self.sent_bytes, self.node_reduced)
        if largest == 0 or largest > node_room(&self.node, self.size) and may_overlap(inputs, [output]):
            return False  # as in all_gather
        self.received[0], self.received_bytes[0] = <char*>PyArray_DATA(y), PyArray_NBYTES(y)
        self.notes_lists(REDUCE_SCATTER_LIST, PyArray_TYPE(y), self.size, 1, place, NOBODY)
        return self.ends(self.reduce_scatter_parts(PyArray_TYPE(y), place, largest), "reduce_scatter")

    def all_to_all(self, outputs, inputs):
        """Do an all_to_all, or return False."""
        if not PyList_CheckExact(inputs) or PyList_GET_SIZE(inputs) != self.size:
            return False
        cdef Array* x = plain(inputs[self.rank], self.largest)
        if not self.takes_list(inputs, x, self.sent, self.sent_bytes):
            return False
        if not self.takes_list(outputs, x, self.received, self.received_bytes):
            return False
        self.notes_lists(ALL_TO_ALL, PyArray_TYPE(x), self.size, self.size, NOBODY, NOBODY)
        return self.ends(self.move(ALL_TO_ALL, self.size, self.size, 0, 0), "all_to_all")

    def all_to_all_sparse(self, arrays, names):
        """Do a sparse exchange of ordinary arrays in memory of the node; return what has come, or None.

        `names`: of the ranks in `arrays` and in what is returned; None: they are numbers.
        """
        if self.node.flags == NULL or self.timeout is not None or not PyDict_CheckExact(arrays):
            return None
        cdef list given = []
        cdef Py_ssize_t nbytes = 0, elements = 0
        cdef int first = NOBODY
        for dst, value in (<dict>arrays).items():
            each = value if PyTuple_CheckExact(value) else (value,)
            for array in <tuple>each:
                if not is_sendable(array):
                    return None
                first = PyArray_TYPE(<Array*><PyObject*>array) if first == NOBODY else first
                nbytes += PyArray_NBYTES(<Array*><PyObject*>array)
                elements += PyArray_SIZE(<Array*><PyObject*>array)
            if not PyLong_CheckExact(dst) or not (dst in names if names is not None else is_rank(dst, self.size)):
                return None
            given.append((dst if names is None else names.index(dst), value is not each, each))
        cdef dict received = {}
        cdef int code
        self.entry = note(self, SPARSE, first, nbytes, NOBODY, NOBODY, <int>min(elements, LARGEST_COUNT), False)
        try:
            code = self.exchange_sparse(given, names, received)
        except BaseException as error:  # MPI's, that of a signal handler, no memory: the other ranks have counted it
            self.note_failure()
            seen = self._failed("all_to_all_sparse", error)
            if seen is error:
                raise
            raise seen from error
        return received if self.ends(code, "all_to_all_sparse") else None

    cdef int exchange_sparse(self, list given, names, dict received) except? -3:
        """Send the arrays of tuples (rank, whether it is a single one, arrays); None: they are not ordinary."""
        cdef int code
        cdef list sends = [], receives = []
        with nogil:
            node_begin(&self.node, self.size, 0)
            code = node_next(&self.node)
        if code:
            return code
        cdef char* slot = node_slot(&self.node, self.node.number, self.rank)
        cdef size_t at = (self.size * sizeof(Part) + LINE - 1) // LINE * LINE
        memset(slot, 0, at)
        for dst, is_single, arrays in given or ():
            at = self.put_sparse(slot, at, dst, is_single, arrays, sends)
            if at == 0:
                break
        cdef uint64_t largest = NODE_TOO_LARGE if given is None or at == 0 else 0
        with nogil:
            code = node_meet_filled(&self.node, call_of(SPARSE, 0, 0), largest)
        if code:
            return code
        cdef int source
        for source in range(self.size):
            self.take_sparse(source, source if names is None else names[source], received, receives)
        if sends or receives:
            self.move_large(sends, receives)
        return 0

    cdef size_t put_sparse(self, char* slot, size_t at, int dst, bint is_single, tuple arrays, list sends) except? 0:
        """Write what a rank gets: what arrays there are, and their values, if these are few; return the end, or 0."""
        cdef size_t nbytes = 0, words = 3
        cdef int axis
        for array in arrays:
            nbytes += PyArray_NBYTES(<Array*><PyObject*>array)
            words += 2 + PyArray_NDIM(<Array*><PyObject*>array)
        cdef size_t end = at + words * sizeof(int64_t)
        cdef bint is_whole = nbytes <= WHOLE and end + nbytes <= self.node.slot
        if end > self.node.slot:
            return 0
        cdef int64_t* word = <int64_t*>(slot + at)
        cdef Array* x
        word[0], word[1], word[2] = len(arrays), is_single, is_whole
        word += 3
        for array in arrays:
            x = <Array*><PyObject*>array
            word[0], word[1] = PyArray_TYPE(x), PyArray_NDIM(x)
            for axis in range(PyArray_NDIM(x)):
                word[2 + axis] = PyArray_DIM(x, axis)
            word += 2 + PyArray_NDIM(x)
            if is_whole:
                memcpy(slot + end, PyArray_DATA(x), PyArray_NBYTES(x))
                end += PyArray_NBYTES(x)
            elif PyArray_NBYTES(x):
                sends.append((dst, array))
        (<Part*>slot)[dst].at, (<Part*>slot)[dst].nbytes = at, end - at
        return (end + LINE - 1) // LINE * LINE

    cdef int take_sparse(self, int source, name, dict received, list receives) except -1:
        """Make the arrays that a rank has sent; those whose values have not come are noted in `receives`."""
        cdef const char* slot = node_slot(&self.node, self.node.number, source)
        cdef Part part = (<const Part*>slot)[self.rank]
        if part.nbytes == 0:
            return 0
        cdef const int64_t* word = <const int64_t*>(slot + part.at)
        cdef int64_t i, n = word[0], is_single = word[1], is_whole = word[2]
        cdef size_t nbytes = 0
        cdef list arrays = []
        word += 3
        for i in range(n):
            arrays.append(PyArray_EMPTY(<int>word[1], <Py_ssize_t*>(word + 2), <int>word[0], False))
            word += 2 + word[1]
        cdef const char* data = <const char*>word
        for array in arrays:
            nbytes = PyArray_NBYTES(<Array*><PyObject*>array)
            if is_whole:
                memcpy(PyArray_DATA(<Array*><PyObject*>array), data, nbytes)
                data += nbytes
            elif nbytes:
                receives.append((source, array))
        received[name] = arrays[0] if is_single else tuple(arrays)
        return 0

    def barrier(self):
        """Wait until all ranks have come."""
        cdef int code
        self.notes(BARRIER, NOBODY, 0, NOBODY, NOBODY)
        if self.is_alone:
            return self.has_done()
        cdef bint in_node = self.is_in_node(0)
        with nogil:
            code = node_barrier(&self.node, call_of(BARRIER, 0, 0)) if in_node else mpi.barrier(self.comm)
        if code:
            raise self.failed("barrier", code)
        return self.has_done()

    # -- in memory of the node: also for operations that have gone through the checks, on arrays made for MPI

    def use_node(self, Py_ssize_t largest, Py_ssize_t reduced, int before):
        """Do operations of at most `largest` bytes (reductions: `reduced`) in memory of the node, after the first `before`."""
        if self.size <= PARTS:
            self.node_largest, self.node_reduced, self.before_node = largest, reduced, before
        self.is_alone = self.size == 1

    def map_node(self, uintptr_t address, size_t slot, size_t one_phase, int looks):
        """Take over the memory at `address`, with flags of zeros, that all ranks of the group see; address 0: none."""
        if address == 0:
            self.node_largest, self.node_reduced, self.node.flags = -1, -1, NULL
            return
        self.node.slots = <char*>address + node_flags_bytes(self.size)
        self.node.slot, self.node.one_phase, self.node.looks = slot, one_phase, looks
        self.node.rank, self.node.ranks = self.rank, self.size
        self.node.progress, self.node.context = make_progress, <void*>self.comm
        self.node.flags = <Flags*>address

    cdef bint is_in_node(self, Py_ssize_t nbytes) except -1:
        """Whether an operation is done in memory of the node, which is opened when it is worth it: alike on all ranks."""
        if nbytes > self.node_largest:
            return False
        if self.node.flags == NULL:
            if self.before_node > 0:
                self.before_node -= 1
                return False
            self.open_node()
        return self.node.flags != NULL

    cdef bint reduces_in_node(self, Py_ssize_t nbytes) except -1:
        """As is_in_node, for a reduction, which opens it at once: MPI's would give other bits than the later ones."""
        if nbytes > self.node_reduced:
            return False
        self.before_node = 0
        return self.is_in_node(0)

    cdef size_t largest_in_node(self, const size_t* nbytes, Py_ssize_t limit) noexcept:
        """Return the largest of the parts, one of each rank, which all ranks know, 1 at least; 0: they are too large."""
        cdef int i
        cdef size_t total = 0, largest = 1
        for i in range(self.size):
            total += nbytes[i]
            largest = max(largest, nbytes[i])
        return largest if <Py_ssize_t>total <= limit else 0

    cdef inline bint is_foldable(self, Array* array, int place) noexcept:
        return self.is_reducible(array, place) and mpi.folds[place][PyArray_TYPE(array)] != NULL

    cdef int type_of_first(self, object items) except -2:
        if not PyList_CheckExact(items) or not items or Py_TYPE(items[0]) is not &PyArray_Type:
            return -1
        return PyArray_TYPE(<Array*><PyObject*>items[0]) if type_of(<Array*><PyObject*>items[0]) else -1

    cdef Py_ssize_t bytes_of(self, list arrays, Py_ssize_t first, Py_ssize_t last, int number) except -2:
        """Return how large arrays of a dtype are together, if all are ordinary; otherwise -1."""
        cdef Array* x
        cdef Py_ssize_t i, total = 0
        for i in range(first, last):
            x = plain(<object>PyList_GET_ITEM(arrays, i), self.largest_run)
            if x == NULL or PyArray_TYPE(x) != number:
                return -1
            total += PyArray_NBYTES(x)
        return total

    cdef bint takes_list(self, object items, Array* own, char** data, size_t* nbytes) except -1:
        """Note where the arrays of a list are, one for each rank, and how large, if all are ordinary; this rank's as `own`."""
        cdef Array* x
        if own == NULL or self.node.flags == NULL or type_of(own) == 0:
            return False
        if not PyList_CheckExact(items) or PyList_GET_SIZE(items) != self.size:
            return False
        for i in range(self.size):
            x = plain(items[i], self.largest)
            if x == NULL or PyArray_TYPE(x) != PyArray_TYPE(own):
                return False
            data[i], nbytes[i] = <char*>PyArray_DATA(x), PyArray_NBYTES(x)
        return nbytes[self.rank] == <size_t>PyArray_NBYTES(own)

    cdef bint ends(self, int code, str name) except -1:
        """Count an operation of the fast path, or leave it to the checks and MPI."""
        if code == NODE_LEAVES:
            self.has_left = True
            ring[self.entry & ring_mask].what = 0
            return False
        if code:
            raise self.failed(name, code)
        return self.has_done()

    cdef int notes_lists(self, int what, int dtype, int n_sent, int n_received, int op, int root) except -1:
        """Note a collective of the parts in `sent` and `received`."""
        cdef int i
        cdef Py_ssize_t nbytes = 0
        for i in range(n_sent):
            nbytes += self.sent_bytes[i]
        for i in range(n_received):
            nbytes += self.received_bytes[i]
        return self.notes(what, dtype, nbytes, op, root)

    cdef int move(self, int what, int n_sent, int n_received, int root, size_t largest):
        """Move the parts in `sent` to where `received` tells; `largest`: see node_begin."""
        cdef int code, i, differs = 0
        with nogil:
            node_begin(&self.node, n_sent, largest)
            while True:
                code = node_post(&self.node, call_of(what, root, 0), n_sent, self.sent, self.sent_bytes)
                if code:
                    return code
                for i in range(n_received):
                    differs |= node_take(&self.node, root if what == SCATTER else i,
                                         self.rank if what != ALL_GATHER_LIST and what != GATHER else 0,
                                         self.received[i], self.received_bytes[i])
                if not node_goes_on(&self.node):
                    return differs

    cdef int move_equal_parts(self, Array* y, Array* x):
        """Do an all_to_all_single of equal parts."""
        cdef int i
        cdef size_t nbytes = PyArray_NBYTES(x) // self.size
        for i in range(self.size):
            self.sent[i] = <char*>PyArray_DATA(x) + i * nbytes
            self.received[i] = <char*>PyArray_DATA(y) + i * nbytes
            self.sent_bytes[i] = self.received_bytes[i] = nbytes
        return self.move(ALL_TO_ALL_SINGLE, self.size, self.size, 0, max(nbytes, 1))

    cdef int reduce_array(self, int what, Array* x, int place, int root, int ranks):
        """Reduce the arrays of ranks 0 to `ranks` - 1 into `x`, if there are any."""
        cdef int code, differs = 0, number = PyArray_TYPE(x)
        cdef char* data = <char*>PyArray_DATA(x)
        cdef size_t nbytes = PyArray_NBYTES(x)
        with nogil:
            node_begin(&self.node, 1, max(nbytes, 1))
            while True:
                code = node_post(&self.node, call_of(what, root << 4 | place, mpi.kinds[number]), 1, &data, &nbytes)
                if code:
                    return code
                if ranks > 0:
                    differs |= node_take_reduced(&self.node, mpi.folds[place][number], ranks, 0, data, nbytes)
                if not node_goes_on(&self.node):
                    return differs

    cdef int reduce_scatter_parts(self, int number, int place, size_t largest):
        cdef int code, differs = 0
        with nogil:
            node_begin(&self.node, self.size, largest)
            while True:
                code = node_post(&self.node, call_of(REDUCE_SCATTER_LIST, place, mpi.kinds[number]), self.size,
                                 self.sent, self.sent_bytes)
                if code:
                    return code
                differs |= node_take_reduced(&self.node, mpi.folds[place][number], self.size, self.rank,
                                             self.received[0], self.received_bytes[0])
                if not node_goes_on(&self.node):
                    return differs

    def is_node_open(self):
        """Whether the next operation may be done in memory of the node: the answer is the same on all ranks."""
        if self.has_left:
            self.has_left = False
            return False
        return self.is_in_node(0)

    def node_move(self, str name, list sent, list received, int root):
        """Do a gather, scatter, all_gather or all_to_all of arrays without gaps; return whether it has.

        An all_gather may take rounds, so its arrays share no memory; the others put all that is sent into memory first.
        """
        cdef Array* x
        cdef int what = MOVES[name]
        cdef size_t largest = 0
        for i, array in enumerate(sent):
            x = without_gaps(array)
            self.sent[i], self.sent_bytes[i] = <char*>PyArray_DATA(x), PyArray_NBYTES(x)
        for i, array in enumerate(received):
            x = without_gaps(array)
            self.received[i], self.received_bytes[i] = <char*>PyArray_DATA(x), PyArray_NBYTES(x)
        if what == ALL_GATHER_LIST:
            largest = self.largest_in_node(self.received_bytes, self.node_largest)
            if largest == 0:
                return False
        return self.has_ended(self.move(what, len(sent), len(received), root, largest), name)

    def node_all_to_all(self, output, array):
        """Do an all_to_all_single of equal parts, of arrays without gaps that share no memory; return whether it has."""
        cdef Array* y = without_gaps(output)
        cdef Array* x = without_gaps(array)
        if not self.is_in_node(PyArray_NBYTES(x)):
            return False
        return self.has_ended(self.move_equal_parts(y, x), "all_to_all_single")

    def node_all_to_all_sparse(self, arrays, dict received, names):
        """Do a sparse exchange of tuples of arrays (of a single one: a list); fill `received`, and return whether it has."""
        if not self.is_node_open():
            return False
        cdef list given = []
        for dst, each in arrays.items():
            sent = tuple([array if is_sendable(array) else array.copy(order="C") for array in each])
            if not all([is_sendable(array) for array in sent]):
                given = None
                break
            given.append((dst, type(each) is list, sent))
        return self.has_ended(self.exchange_sparse(given, names, received), "all_to_all_sparse")

    def node_reduce(self, str name, array, op, int root):
        """Do a reduce, scan or exscan of an array without gaps, in place; return whether it has."""
        cdef Array* x = without_gaps(array)
        cdef int place = self.place_of(op), ranks = self.rank + (name == "scan")
        cdef int what = SCAN if name == "scan" else EXSCAN if name == "exscan" else REDUCE
        if place < 0 or PyArray_TYPE(x) >= TYPES or mpi.folds[place][PyArray_TYPE(x)] == NULL:
            return False
        if not self.reduces_in_node(PyArray_NBYTES(x)):
            return False
        if what == REDUCE:
            ranks = self.size if self.rank == root else 0
        return self.has_ended(self.reduce_array(what, x, place, root, ranks), name)

    def node_reduce_scatter_list(self, output, list sent, op):
        """Do a reduce_scatter of arrays without gaps that share no memory; return whether it has."""
        cdef Array* y = without_gaps(output)
        cdef Array* x
        cdef int place = self.place_of(op)
        if place < 0 or PyArray_TYPE(y) >= TYPES or mpi.folds[place][PyArray_TYPE(y)] == NULL:
            return False
        for i, array in enumerate(sent):
            x = without_gaps(array)
            self.sent[i], self.sent_bytes[i] = <char*>PyArray_DATA(x), PyArray_NBYTES(x)
        cdef size_t largest = self.largest_in_node(self.sent_bytes, self.node_reduced)
        if largest == 0 or not self.reduces_in_node(0):
            return False
        self.received[0], self.received_bytes[0] = <char*>PyArray_DATA(y), PyArray_NBYTES(y)
        return self.has_ended(self.reduce_scatter_parts(PyArray_TYPE(y), place, largest), "reduce_scatter")

    def node_broadcast(self, array, int root):
        """Do a broadcast of an array without gaps in memory of the node; return whether it has."""
        cdef Array* x = without_gaps(array)
        if not self.is_in_node(PyArray_NBYTES(x)):
            return False
        cdef int code
        with nogil:
            code = node_broadcast(&self.node, call_of(BROADCAST, root, 0), root, <char*>PyArray_DATA(x),
                                  PyArray_NBYTES(x))
        return self.has_ended(code, "broadcast")

    def node_all_reduce(self, array, op):
        """As node_broadcast, for an all_reduce in place."""
        cdef Array* x = without_gaps(array)
        cdef int code, place = self.place_of(op)
        if place < 0 or PyArray_TYPE(x) >= TYPES or mpi.folds[place][PyArray_TYPE(x)] == NULL:
            return False
        if not self.reduces_in_node(PyArray_NBYTES(x)):
            return False
        with nogil:
            code = node_all_reduce(&self.node, call_of(ALL_REDUCE, place, mpi.kinds[PyArray_TYPE(x)]),
                                   mpi.folds[place][PyArray_TYPE(x)], PyArray_ITEMSIZE(x), <char*>PyArray_DATA(x),
                                   PyArray_SIZE(x))
        return self.has_ended(code, "all_reduce")

    def node_all_gather(self, output, array):
        """As node_broadcast, for an all_gather_single of arrays that share no memory."""
        cdef Array* y = without_gaps(output)
        cdef Array* x = without_gaps(array)
        if not self.is_in_node(PyArray_NBYTES(y)):
            return False
        cdef int code
        with nogil:
            code = node_all_gather(&self.node, call_of(ALL_GATHER, 0, 0), <char*>PyArray_DATA(y),
                                   <char*>PyArray_DATA(x), PyArray_NBYTES(x))
        return self.has_ended(code, "all_gather_single")

    def node_reduce_scatter(self, output, array, op):
        """As node_broadcast, for a reduce_scatter_single of arrays that share no memory."""
        cdef Array* y = without_gaps(output)
        cdef Array* x = without_gaps(array)
        cdef int code, place = self.place_of(op)
        if place < 0 or PyArray_TYPE(x) >= TYPES or mpi.folds[place][PyArray_TYPE(x)] == NULL:
            return False
        if not self.reduces_in_node(PyArray_NBYTES(x)):
            return False
        with nogil:
            code = node_reduce_scatter(&self.node, call_of(REDUCE_SCATTER, place, mpi.kinds[PyArray_TYPE(x)]),
                                       mpi.folds[place][PyArray_TYPE(x)], PyArray_ITEMSIZE(x), <char*>PyArray_DATA(y),
                                       <char*>PyArray_DATA(x), PyArray_SIZE(y))
        return self.has_ended(code, "reduce_scatter_single")

    def node_barrier(self):
        """As node_broadcast, for a barrier."""
        cdef int code
        if not self.is_in_node(0):
            return False
        with nogil:
            code = node_barrier(&self.node, call_of(BARRIER, 0, 0))
        return self.has_ended(code, "barrier")

    cdef bint has_ended(self, int code, str name) except -1:
        if code == NODE_LEAVES:
            return False
        if code == NODE_DIFFERS:
            raise self.differing(name)
        if code:
            raise exception_of(code)
        return True

    def differing(self, str name):
        """Return the error of an operation in memory of the node that another rank does not make alike."""
        return difference_error(name, self.node.differing)

    cdef inline bint is_pair(self, Array* output, Array* array) noexcept:
        return (
            output != NULL and array != NULL and PyArray_TYPE(output) == PyArray_TYPE(array)
            and are_apart(output, array)
        )

    def send(self, array, dst, tag):
        """Send a message, or return False."""
        cdef Array* x = plain(array, self.largest)
        if x == NULL or not is_rank(dst, self.size) or not self.is_tag(tag) or type_of(x) == 0:
            return False
        cdef int code, peer = PyLong_AsLong(dst), label = PyLong_AsLong(tag)
        if peer == self.rank:
            return False
        cdef long long entry = note(self, SEND, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY, peer, label, False)
        with nogil:
            code = mpi.send(PyArray_DATA(x), count_of(x), type_of(x), peer, label, self.comm)
        if code:
            raise self.failed("send", code)
        return self.has_passed(entry, True)

    def recv(self, array, src, tag):
        """Receive a message and return its sender, or return None."""
        cdef Array* x = plain(array, self.largest)
        if x == NULL or not is_rank(src, self.size) or not self.is_tag(tag) or type_of(x) == 0:
            return None
        cdef char[STATUS_BYTES] status
        cdef int code, peer = PyLong_AsLong(src), label = PyLong_AsLong(tag)
        if peer == self.rank:
            return None
        cdef long long entry = note(self, RECV, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY, peer, label, False)
        with nogil:
            code = mpi.recv(PyArray_DATA(x), count_of(x), type_of(x), peer, label, self.comm, status)
        if code:
            raise self.failed("recv", code)
        if not self.has_passed(entry, received(status) == PyArray_NBYTES(x)):
            raise self.short("recv", received(status), PyArray_NBYTES(x))
        return src

    def sendrecv(self, array, dst, output, src, tag, recv_tag):
        """Send a message and receive another, and return its sender; or return None."""
        cdef Array* y = plain(output, self.largest)
        cdef Array* x = plain(array, self.largest)
        if y == NULL or x == NULL or not are_apart(y, x) or type_of(x) == 0 or type_of(y) == 0:
            return None
        if not (is_rank(dst, self.size) and is_rank(src, self.size) and self.is_tag(tag)):
            return None
        cdef int label = PyLong_AsLong(tag), other_label = label
        if recv_tag is not None:
            if not self.is_tag(recv_tag):
                return None
            other_label = PyLong_AsLong(recv_tag)
        cdef char[STATUS_BYTES] status
        cdef int code, to = PyLong_AsLong(dst), source = PyLong_AsLong(src)
        cdef Py_ssize_t nbytes = PyArray_NBYTES(x) + PyArray_NBYTES(y)
        cdef long long entry = note(self, SENDRECV, PyArray_TYPE(x), nbytes, NOBODY, to, label, False)
        with nogil:
            code = mpi.sendrecv(PyArray_DATA(x), count_of(x), type_of(x), to, label,
                                PyArray_DATA(y), count_of(y), type_of(y), source, other_label, self.comm, status)
        if code:
            raise self.failed("sendrecv", code)
        if not self.has_passed(entry, received(status) == PyArray_NBYTES(y)):
            raise self.short("sendrecv", received(status), PyArray_NBYTES(y))
        return src

    def ibroadcast(self, array, root):
        """Begin a broadcast and return its Work, or return None."""
        cdef Array* x = plain(array, self.largest_async)
        if x == NULL or not is_rank(root, self.size) or type_of(x) == 0:
            return None
        cdef int code, source = PyLong_AsLong(root)
        cdef Pending work = self.new_work(array)
        work.entry = note(self, BROADCAST, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY, source, NOBODY, True)
        if self.is_alone:
            return self.ended_work("broadcast", work)
        with nogil:
            code = mpi.ibcast(PyArray_DATA(x), count_of(x), type_of(x), source, self.comm, &work.request)
        if code:
            raise self.failed("broadcast", code)
        self.count += 1
        work.name, work.number = "broadcast", self.count + self.passed_collectives
        self.follow(work)
        return work

    def ibarrier(self):
        """Begin a barrier and return its Work."""
        cdef int code
        cdef Pending work = self.new_work(None)
        work.entry = note(self, BARRIER, NOBODY, 0, NOBODY, NOBODY, NOBODY, True)
        if self.is_alone:
            return self.ended_work("barrier", work)
        with nogil:
            code = mpi.ibarrier(self.comm, &work.request)
        if code:
            raise self.failed("barrier", code)
        self.count += 1
        work.name, work.number = "barrier", self.count + self.passed_collectives
        self.follow(work)
        return work

    def iall_reduce(self, array, op):
        """Begin an all_reduce and return its Work, or return None."""
        cdef Array* x = plain(array, self.largest_async)
        cdef int code, place = self.place_of(op)
        if x == NULL or not self.is_reducible(x, place):
            return None
        cdef int number = PyArray_TYPE(x)
        cdef Pending work = self.new_work(array)
        work.entry = note(self, ALL_REDUCE, PyArray_TYPE(x), PyArray_NBYTES(x), place, NOBODY, NOBODY, True)
        if self.is_alone:
            return self.ended_work("all_reduce", work)
        with nogil:
            code = mpi.iallreduce(mpi.in_place, PyArray_DATA(x), count_of(x), mpi.reduced[place][number],
                                  mpi.ops[place][number], self.comm, &work.request)
        if code:
            raise self.failed("all_reduce", code)
        self.count += 1
        work.name, work.number = "all_reduce", self.count + self.passed_collectives
        self.follow(work)
        return work

    def isend(self, array, dst, tag):
        """Begin to send a message and return its Work, or return None."""
        return self.begun(False, array, dst, tag) if self.takes_message(False, array, dst, tag) else None

    def irecv(self, array, src, tag):
        """Begin to receive a message and return its Work, or return None."""
        return self.begun(True, array, src, tag) if self.takes_message(True, array, src, tag) else None

    cdef inline bint takes_message(self, bint receives, object array, object peer, object tag) noexcept:
        cdef Array* x = plain(array, self.largest)
        return (
            x != NULL and self.is_tag(tag) and type_of(x) != 0
            and (is_rank(peer, self.size) or receives and peer is None)
        )

    cdef Pending begun(self, bint receives, object array, object peer, object tag):
        """Begin a message and return its Work."""
        cdef Array* x = <Array*>array
        cdef int code, label = PyLong_AsLong(tag), rank = mpi.any_source if peer is None else PyLong_AsLong(peer)
        cdef Pending work = self.new_work(array)
        work.entry = note(self, RECV if receives else SEND, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY,
                          NOBODY if peer is None else rank, label, True)
        with nogil:
            if receives:
                code = mpi.irecv(PyArray_DATA(x), count_of(x), type_of(x), rank, label, self.comm, &work.request)
            else:
                code = mpi.isend(PyArray_DATA(x), count_of(x), type_of(x), rank, label, self.comm, &work.request)
        work.name = "recv" if receives else "send"
        if code:
            raise self.failed(work.name, code)
        if receives:
            work.expected = PyArray_NBYTES(x)
        self.messages += 1
        work.peer, work.tag, work.number = peer, tag, self.messages + self.passed_messages
        self.follow(work)
        return work

    def batch(self, messages, kind, irecv):
        """Begin the messages of a list of `kind`, P2POp: receives first; return their Works, or None."""
        if not PyList_CheckExact(messages):
            return None
        cdef list given = []
        cdef bint receives
        for each in <list>messages:
            if type(each) is not kind or each.group is not None or each.group_peer is not None:
                return None
            receives, array, peer, tag = each.op is irecv, each.array, each.peer, each.tag
            given.append((receives, array, peer, tag))
            if peer is None or not self.takes_message(receives, array, peer, tag):
                return None
        cdef list works = [None] * len(given)
        for first in (True, False):
            for i, (receives, array, peer, tag) in enumerate(given):
                if receives is first:
                    works[i] = self.begun(receives, array, peer, tag)
        return works

    cdef Pending new_work(self, object array):
        cdef Pending work = <Pending>hc_new(self.work_class, NO_ARGUMENTS)
        work.array = work.alive = array
        work.expected = -1
        work.path = self
        work.timeout = self.timeout
        return work

    cdef Pending ended_work(self, str name, Pending work):
        """Return the Work of an operation of a rank alone, which has ended."""
        self.count += 1
        work.name, work.number = name, self.count + self.passed_collectives
        work._status, work.alive, work._told = COMPLETED, None, True
        work.request_ends(0)
        return work

    cdef int follow(self, Pending work) except -1:
        """Keep a Work, and through it its array, while it is in flight."""
        if work.array is not None:
            self.unasked_bytes += PyArray_NBYTES(<Array*>work.array)
        if self.unasked_bytes >= REAP_BYTES:
            self.unasked_bytes = 0
            while self.forgets_oldest():
                pass
            self.door.reap()
        elif PyDict_Size(self.in_flight) >= REAP_ABOVE:
            self.unasked += 1
            if self.unasked >= REAP_EVERY or self.oldest().ob_refcnt == 1:  # nobody but the door has it
                self.unasked = 0
                while self.forgets_oldest():
                    pass
                self.door.reap()
        self.in_flight[work] = None
        return 0

    cdef PyObject* oldest(self) noexcept:
        """Return the oldest Work in flight, of which there is one."""
        cdef PyObject* found
        cdef Py_ssize_t place = 0
        PyDict_Next(self.in_flight, &place, &found, NULL)
        return found

    cdef bint forgets_oldest(self) except -1:
        """Forget the oldest Work in flight if it has ended well; the door looks at the others."""
        if not self.in_flight or not isinstance(<object>self.oldest(), Pending):
            return False
        cdef Pending work = <Pending><object>self.oldest()
        return work.is_ordinary() and work.has_come() and work.ends()


def compiled_member(dict names, type kind, otherwise):
    """Return `otherwise`, the function that returns the group to call, with a short way for groups of exactly that
    `kind` and for None: the world, which is called `_world` in `names`.
    """
    def member(group):
        if group is None:
            group = names["_world"]
        return group if type(group) is kind else otherwise(group)
    return member


def address_of(array):
    """Return the address of a host array's first element."""
    if PyArray_Check(array):
        return <uintptr_t>PyArray_DATA(<Array*><PyObject*>array)
    return array.__array_interface__["data"][0]


def node_memory(int rank, int ranks, size_t slot):
    """Return how many bytes of what `ranks` share are that rank's, if a slot has `slot` bytes; they follow each other."""
    return node_bytes(rank, ranks, slot)


cdef inline Py_ssize_t received(void* status) noexcept:
    """Return how many bytes a message had."""
    cdef int count = -1
    mpi.get_elements(status, mpi.byte, &count)
    return count


# -- Works -----------------------------------------------------------------------------------------------------

cdef class Pending:
    """The first base of a Work of the fast path: what core/work.py does with one, in the ordinary case, in one step.

    Everything else it hands to Work, whose attributes stand here, and who asks `poll` and `block`.
    """

    cdef FastPath path
    cdef Handle request
    cdef char[STATUS_BYTES] message  # MPI's status
    cdef Py_ssize_t expected  # bytes of a message to receive; -1: there is none
    cdef bint is_done  # the request
    cdef int code  # MPI's, when it is done
    cdef object array, name, peer, tag, known_flight
    cdef long long number, entry  # its own, and that in the ring
    cdef readonly long long took  # nanoseconds, where operations are recorded; otherwise -1
    cdef readonly unsigned long waiting_thread  # that is in `wait`, for the watchdog; 0: none
    cdef public object alive, source, operation, error, timeout
    cdef public object _status, _finish, _callbacks, _future
    cdef public bint _busy, _told, was_asked, error_was_seen

    def __cinit__(self):
        self._status = IN_FLIGHT

    @property
    def flight(self):
        """The Flight, which is made when somebody asks."""
        if self.known_flight is None:
            self.known_flight = new_flight((self.path.door, self.name, self.number, self.array, self.peer,
                                            self.timeout, self.tag))
        return self.known_flight

    @flight.setter
    def flight(self, flight):
        self.known_flight, self.timeout = flight, flight.timeout

    cdef inline bint is_ordinary(self) noexcept:
        """Whether nobody has to hear of its end but the door."""
        return (
            self.operation is None and self._finish is None and self._callbacks is None and self.error is None
            and not self._busy and not self._told
        )

    cdef bint ends(self) except -1:
        """Note the end, and return True, where it is a good one that nobody but the door has to hear of."""
        if self.code or not self.is_ordinary() or self._status is not IN_FLIGHT:
            return False
        if self.expected >= 0:
            if received(self.message) != self.expected:
                return False
            self.source = source_of(self.message)
        self._status = COMPLETED
        self.alive = None
        self.path.in_flight.pop(self, None)
        self._told = True
        return True

    def wait(self, timeout=None):
        """See Work.wait."""
        if timeout is None and self._told and self._status is COMPLETED:
            return True
        if timeout is None and self.timeout is None and self.is_ordinary():
            self._busy = True
            self.finish_request()
            self._busy = False
            if self.ends():
                return True
        return work_wait(self, timeout)

    def is_completed(self):
        """See Work.is_completed."""
        self.was_asked = True
        return self.has_ended()

    def has_ended(self):
        """See Work.has_ended."""
        if self._told:
            return True
        if self.is_ordinary():
            if not self.has_come():
                return False
            if self.ends():
                return True
        return work_has_ended(self)

    cdef bint has_come(self) noexcept:
        self._busy = True
        cdef bint is_done = self.test_request()
        self._busy = False
        return is_done

    cdef void finish_request(self) noexcept:
        cdef int code
        if not self.is_done:
            self.waiting_thread = PyThread_get_thread_ident()
            with nogil:
                code = mpi.wait(&self.request, self.message)
            self.waiting_thread = 0
            self.request_ends(code)

    cdef bint test_request(self) noexcept:
        cdef int code, is_done = 0
        if not self.is_done:
            with nogil:
                code = mpi.test(&self.request, &is_done, self.message)
            if is_done or code:
                self.request_ends(code)
        return self.is_done

    cdef inline void request_ends(self, int code) noexcept:
        self.code, self.is_done = code, True
        self.took = note_end(self.entry, code != 0)

    cdef int conclude(self) except -1:
        """Raise what went wrong; note who has sent the message."""
        if self.code:
            raise exception_of(self.code)
        if self.expected >= 0:
            self.source = source_of(self.message)
            if received(self.message) != self.expected:
                ring[self.entry & ring_mask].has_failed |= ring[self.entry & ring_mask].serial == self.entry
                raise length_error("", received(self.message), self.expected)
        return 0

    def poll(self):
        """See Work.poll."""
        if not self.test_request():
            return False
        self.conclude()
        return True

    def block(self):
        """See Work.block."""
        self.finish_request()
        self.conclude()

    def cancel(self):
        """See Work.cancel; only receives can be taken back."""
        cdef int code
        if self.expected < 0:
            work_cancel(self)
        if not self.is_done:
            with nogil:
                code = mpi.cancel(&self.request)
                if code == 0:
                    code = mpi.wait(&self.request, self.message)
            self.is_done = True
            note_end(self.entry, True)
            if code:
                raise exception_of(code)


cdef struct Waited:
    PyObject* work
    Handle* request
    char* message
    unsigned long* thread
    bint is_done
    int code


def wait_all(given):
    """Wait for Works of the fast path, and for None; return False if Work.wait has to be called for each of them."""
    cdef Waited[WAITED] waited
    cdef list works = list(given)  # it keeps them, whatever other threads do with the program's list
    cdef Py_ssize_t i, n = 0
    cdef bint is_ordinary = PyList_GET_SIZE(works) <= WAITED
    cdef unsigned long thread = PyThread_get_thread_ident()
    cdef Pending work
    for each in works:
        if not is_ordinary:
            break
        if each is None or isinstance(each, Pending) and (<Pending>each)._told and (<Pending>each)._status is COMPLETED:
            continue
        is_ordinary = (isinstance(each, Pending) and (<Pending>each).timeout is None and (<Pending>each).is_ordinary())
        if is_ordinary:  # and not twice in the list
            work = <Pending>each
            work._busy = True
            waited[n] = Waited(<PyObject*>work, &work.request, &work.message[0], &work.waiting_thread, work.is_done, 0)
            n += 1
    if is_ordinary:
        with nogil:
            for i in range(n):
                if not waited[i].is_done:
                    waited[i].thread[0] = thread
                    waited[i].code = mpi.wait(waited[i].request, waited[i].message)
                    waited[i].thread[0] = 0
    for i in range(n):
        work = <Pending>waited[i].work
        if is_ordinary and not waited[i].is_done:
            work.request_ends(waited[i].code)
        work._busy = False
    for i in range(n):
        is_ordinary = is_ordinary and (<Pending>waited[i].work).ends()
    return is_ordinary


cdef inline object source_of(char* status):
    cdef int source
    memcpy(&source, status + mpi.source_at, sizeof(int))
    return source


cdef object IN_FLIGHT, COMPLETED, new_flight, work_wait, work_has_ended, work_cancel
cdef Py_ssize_t REAP_ABOVE, REAP_BYTES


def set_up_works(in_flight, completed, flight, work, Py_ssize_t reap_above, Py_ssize_t reap_bytes):
    """Take over the states of a Work, how a Flight is made, and the class Work."""
    global IN_FLIGHT, COMPLETED, new_flight, work_wait, work_has_ended, work_cancel, REAP_ABOVE
    global REAP_BYTES
    IN_FLIGHT, COMPLETED, new_flight, REAP_ABOVE, REAP_BYTES = in_flight, completed, flight, reap_above, reap_bytes
    work_wait, work_has_ended, work_cancel = work.wait, work.has_ended, work.cancel


# -- tensors ---------------------------------------------------------------------------------------------------

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
    void* stream

cdef enum:
    MOST_DIMENSIONS = 32
    CODES = 8  # of DLPack, for kinds of values
    HOST = 1

cdef DLPackExchangeAPI* dlpack
cdef tuple tensor_types
cdef int[CODES][256] number_of  # NumPy's of a dtype, by DLPack's code and the bits


def set_up_tensors(tuple types, dict numbers):
    """Let `view` see objects of exactly these types by DLPack's functions in C; `numbers`: NumPy's, by code and bits."""
    global dlpack, tensor_types
    memset(number_of, -1, sizeof(number_of))
    for (code, bits), number in numbers.items():
        number_of[<int>code][<int>bits] = number
    dlpack = <DLPackExchangeAPI*>PyCapsule_GetPointer(types[0].__dlpack_c_exchange_api__, "dlpack_exchange_api")
    if dlpack.major != 1 or dlpack.look_at == NULL:
        raise ImportError(f"version {dlpack.major} of DLPack's functions in C")
    tensor_types = types


def view(tensor, bint flat=False):
    """Return a NumPy array on the memory of a tensor of the host, which it keeps alive; or None.

    `flat`: in one dimension, where there are no gaps.
    """
    cdef DLTensor seen
    cdef Py_ssize_t[MOST_DIMENSIONS] strides
    cdef int64_t itemsize, size = 1
    cdef bint has_gaps = False
    if type(tensor) not in tensor_types or tensor.is_neg():
        return None
    try:
        dlpack.look_at(<PyObject*>tensor, &seen)
    except Exception:  # it is sparse, say
        return None
    if seen.device_type != HOST or seen.data == NULL or seen.lanes != 1 or seen.code >= CODES:
        return None
    if seen.ndim > MOST_DIMENSIONS or number_of[seen.code][seen.bits] < 0 or tensor.is_conj():
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
