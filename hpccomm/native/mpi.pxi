# MPI's functions, handles and tables, and the windows that a program leaves to MPI_Finalize.

cdef struct Library:  # first the functions, in the order of MPI_FUNCTIONS
    int (*bcast)(void*, int, Handle, int, Handle) noexcept nogil
    int (*allreduce)(const void*, void*, int, Handle, Handle, Handle) noexcept nogil
    int (*iallreduce)(const void*, void*, int, Handle, Handle, Handle, Handle*) noexcept nogil
    int (*reduce)(const void*, void*, int, Handle, Handle, int, Handle) noexcept nogil
    int (*allgather)(const void*, int, Handle, void*, int, Handle, Handle) noexcept nogil
    int (*alltoall)(const void*, int, Handle, void*, int, Handle, Handle) noexcept nogil
    int (*reduce_scatter_block)(const void*, void*, int, Handle, Handle, Handle) noexcept nogil
    int (*send)(const void*, int, Handle, int, int, Handle) noexcept nogil
    int (*recv)(void*, int, Handle, int, int, Handle, void*) noexcept nogil
    int (*isend)(const void*, int, Handle, int, int, Handle, Handle*) noexcept nogil
    int (*irecv)(void*, int, Handle, int, int, Handle, Handle*) noexcept nogil
    int (*sendrecv)(const void*, int, Handle, int, int, void*, int, Handle, int, int, Handle, void*) noexcept nogil
    int (*wait)(Handle*, void*) noexcept nogil
    int (*test)(Handle*, int*, void*) noexcept nogil
    int (*iprobe)(int, int, Handle, int*, void*) noexcept nogil
    int (*cancel)(Handle*) noexcept nogil
    int (*test_cancelled)(const void*, int*) noexcept nogil
    int (*barrier)(Handle) noexcept nogil
    int (*ibcast)(void*, int, Handle, int, Handle, Handle*) noexcept nogil
    int (*ibarrier)(Handle, Handle*) noexcept nogil
    int (*get_elements)(const void*, Handle, int*) noexcept nogil
    int (*create_keyval)(void*, void*, int*, void*) noexcept nogil
    int (*set_attribute)(Handle, int, void*) noexcept nogil
    int (*unlock_all)(Handle) noexcept nogil
    int (*free_window)(Handle*) noexcept nogil
    void* in_place
    Handle byte
    int any_source, any_tag, pairwise_tag, largest_tag
    int source_at  # the source's offset in an MPI_Status, in bytes
    int status_bytes
    int handle_bytes
    Handle datatypes[TYPES]  # in which arrays are sent, by NumPy's number of their dtype; 0: not by the fast path
    Handle reduced[OPS][TYPES]  # in which MPI reduces arrays without preparation; 0: it does not
    Handle ops[OPS][TYPES]
    const Fold* folds[OPS][TYPES]  # reductions in memory of the node; NULL: MPI reduces
    uint64_t kinds[TYPES]  # kind and itemsize of values: equal for long and long long

MPI_FUNCTIONS = (
    "MPI_Bcast", "MPI_Allreduce", "MPI_Iallreduce", "MPI_Reduce", "MPI_Allgather", "MPI_Alltoall",
    "MPI_Reduce_scatter_block", "MPI_Send", "MPI_Recv", "MPI_Isend", "MPI_Irecv", "MPI_Sendrecv", "MPI_Wait", "MPI_Test",
    "MPI_Iprobe", "MPI_Cancel", "MPI_Test_cancelled", "MPI_Barrier", "MPI_Ibcast", "MPI_Ibarrier", "MPI_Get_elements",
    "MPI_Comm_create_keyval", "MPI_Comm_set_attr", "MPI_Win_unlock_all", "MPI_Win_free",
)

cdef Library mpi
cdef unsigned long main_thread = threading.main_thread().ident
cdef tuple NO_ARGUMENTS = ()
cdef dict op_numbers = {}  # by the op, and by its name
cdef object usual_op  # is compared first
cdef type work_class
cdef int usual_place
cdef dict mpi_op_numbers = {}  # by the addresses of mpi4py's own ops
cdef set bfloat16_numbers = set()  # NumPy's numbers of bfloat16
cdef object exception_of, length_error, difference_error


cdef void* function(void* library, str name) except NULL:
    """Return a function of MPI: first a preloaded tool's, as the dynamic linker would."""
    cdef bytes text = name.encode()
    cdef void* found = dlsym(RTLD_DEFAULT, text)
    if found == NULL:
        found = dlsym(library, text)
    if found == NULL:
        raise ImportError(f"{name} is not in the library that mpi4py has loaded")
    return found


def set_up(str path, dict names, object exception, object length, object difference):
    """Find MPI's functions in the library that the extension module at `path` is linked to, and fill the tables.

    `names`: the handles, offsets and sizes by the names of Library's fields; `datatypes` by NumPy's number; and
    `reductions`: for each op its keys, its letter in fold.h, and (datatype, op, kind, itemsize) by NumPy's number; and
    `mpi_ops`: (mpi4py's op, key), where the op lives as long as mpi4py; `sum` and `average`: these ops; `work_class`: of
    asynchronous operations, a subclass of Pending.
    `exception` makes the exception for an error code of MPI, `length` for a message that is shorter than its array,
    `difference` for a call that differs on another rank.
    """
    global exception_of, length_error, difference_error, usual_op, usual_place, work_class
    cdef void* library = dlopen(path.encode(), RTLD_NOW | RTLD_NOLOAD)
    if library == NULL:
        raise ImportError(f"{path} is not loaded")
    for i, name in enumerate(MPI_FUNCTIONS):
        (<void**>&mpi)[<int>i] = function(library, name)
    mpi.in_place = <void*><uintptr_t>handle(names["in_place"])
    mpi.byte = handle(names["byte"])
    mpi.any_source, mpi.any_tag = names["any_source"], names["any_tag"]
    mpi.pairwise_tag, mpi.largest_tag = names["pairwise_tag"], names["largest_tag"]
    mpi.source_at = names["source_at"]
    mpi.status_bytes = names["status_bytes"]
    mpi.handle_bytes = names["handle_bytes"]
    if not 0 <= mpi.source_at <= mpi.status_bytes - 4 <= STATUS_BYTES - 4 or mpi.handle_bytes not in (4, 8):
        raise ImportError(f"an MPI_Status of {mpi.status_bytes} bytes, a handle of {mpi.handle_bytes}")
    for number, datatype in names["datatypes"].items():
        mpi.datatypes[<int>number] = handle(datatype)
    op_names[AVERAGE], op_names[PREMULTIPLIED] = "AVG", "PREMUL_SUM"
    for place, (keys, letter, table) in enumerate(names["reductions"]):
        op_names[place] = next(key.upper() for key in keys if isinstance(key, str))
        for key in keys:
            op_numbers[key] = place
        for number, (datatype, op, kind, itemsize) in table.items():
            mpi.reduced[<int>place][<int>number] = handle(datatype)
            mpi.ops[<int>place][<int>number] = handle(op)
            mpi.folds[<int>place][<int>number] = fold_of(ord(letter), ord(kind), itemsize)
            mpi.kinds[<int>number] = <uint64_t>ord(kind) << 8 | <uint64_t>itemsize
        if letter != "-":
            reduce_halves(place, letter)
    usual_op, usual_place, work_class = names["sum"], op_numbers[names["sum"]], names["work_class"]
    op_numbers[names["average"]] = op_numbers["avg"] = AVERAGE
    for op, key in names["mpi_ops"]:
        mpi_op_numbers[<uintptr_t><PyObject*>op] = op_numbers[key]
    reduce_halves(AVERAGE, "a")
    exception_of, length_error, difference_error = exception, length, difference


cdef int reduce_halves(int place, str letter) except -1:
    mpi.folds[place][NPY_HALF], mpi.folds[place][BFLOAT16] = fold_of(ord(letter), b"f", 2), fold_of(ord(letter), b"V", 2)
    mpi.kinds[NPY_HALF], mpi.kinds[BFLOAT16] = <uint64_t>b"f" << 8 | 2, <uint64_t>b"V" << 8 | 2


BFLOAT16_NUMBER = BFLOAT16  # in rows of the ring


def learn_bfloat16(int number):
    """Reduce arrays whose dtype has this number of NumPy's as bfloat16."""
    bfloat16_numbers.add(number)


ctypedef int (*CreateOp)(void*, int, Handle*) noexcept nogil


def make_op(str path, str op, str code):
    """Make an op of MPI that reduces floats of a dtype by an op of fold.h; return its handle. `path`: as in set_up."""
    cdef void* library = dlopen(path.encode(), RTLD_NOW | RTLD_NOLOAD)
    cdef Handle made = 0
    (<CreateOp>function(library, "MPI_Op_create"))(combine_of(ord(op), ord(code)), True, &made)
    return made


cdef Handle handle(object number) except? 0:
    """Return a handle, or MPI_IN_PLACE, from mpi4py's number for it, which may be negative."""
    return <Handle>(<intptr_t>number if number < 0 else <uintptr_t>number)


cdef inline Py_ssize_t received(void* status) noexcept:
    """Return the number of bytes of a received message."""
    cdef int count = -1
    mpi.get_elements(status, mpi.byte, &count)
    return count


cdef inline object source_of(char* status):
    cdef int source
    memcpy(&source, status + mpi.source_at, sizeof(int))
    return source


cdef inline bint may_block() noexcept nogil:
    """Return whether this is the main thread, which may block in MPI: the end of the program can't stop others there."""
    return PyThread_get_thread_ident() == main_thread


cdef inline int wait_for(Handle* request, void* status) noexcept nogil:
    return mpi.wait(request, status) if may_block() else node_poll(mpi.test, request, status)


cdef int send_values(const void* data, int count, Handle datatype, int peer, int tag, Handle comm) noexcept nogil:
    cdef char[STATUS_BYTES] status
    cdef Handle request
    if may_block():
        return mpi.send(data, count, datatype, peer, tag, comm)
    cdef int code = mpi.isend(data, count, datatype, peer, tag, comm, &request)
    return code or wait_for(&request, status)


cdef int recv_values(void* data, int count, Handle datatype, int peer, int tag, Handle comm, char* status) noexcept nogil:
    cdef Handle request
    if may_block():
        return mpi.recv(data, count, datatype, peer, tag, comm, status)
    cdef int code = mpi.irecv(data, count, datatype, peer, tag, comm, &request)
    return code or wait_for(&request, status)


cdef int pass_message(bint sends, char* data, size_t nbytes, int peer, Handle comm) noexcept nogil:
    """Send or receive a rank's part of a list for which memory of the node is too small."""
    cdef char[STATUS_BYTES] status
    cdef size_t at = 0
    cdef int code = 0, some
    while at < nbytes and code == 0:
        some = <int>min(nbytes - at, 1 << 30)
        if sends:
            code = send_values(data + at, some, mpi.byte, peer, mpi.pairwise_tag, comm)
        else:
            code = recv_values(data + at, some, mpi.byte, peer, mpi.pairwise_tag, comm, status)
        at += some
    return code


def wait_for_requests(requests, statuses):
    """Wait for all requests, also after an error. Both arguments are arrays (uintp) of addresses of MPI's objects."""
    cdef Handle** request = <Handle**>PyArray_DATA(<Array*>requests)
    cdef void** status = <void**>PyArray_DATA(<Array*>statuses)
    cdef Py_ssize_t i, n = PyArray_SIZE(<Array*>requests)
    cdef int code, first = 0
    with nogil:
        for i in range(n):
            code = wait_for(request[i], status[i])
            first = first or code
    if first:
        raise exception_of(first)


cdef int make_progress(void* comm) noexcept nogil:
    """Let MPI make progress while this rank waits for others; return its error code, as for a dead rank."""
    cdef char[STATUS_BYTES] status
    cdef int is_there
    return mpi.iprobe(mpi.any_source, mpi.any_tag, <Handle>comm, &is_there, status)


cdef struct Window:
    uint64_t name
    Handle handle

cdef Window* windows_left = NULL
cdef int windows_count = 0, windows_room = 0
cdef bint end_is_prepared = False


def set_crowded(bint crowded):
    """Set whether ranks outnumber cores, so that threads that poll MPI must sleep."""
    global ranks_outnumber_cores
    ranks_outnumber_cores = crowded


def prepare_end(comm_self):
    """Make MPI_Finalize first call `before_the_end`: it first deletes MPI_COMM_SELF's attributes (MPI-4.1 §11.2.4).

    Before that, MPICH already takes no locks: a thread inside MPI_Test would not unlock. So Python's end, the last time
    when threads can wait, stops them just before it calls MPI_Finalize.
    """
    global end_is_prepared
    cdef int keyval = 0
    if not end_is_prepared:
        end_is_prepared = True
        mpi.create_keyval(<void*>copy_nothing, <void*>before_the_end, &keyval, NULL)
        mpi.set_attribute(handle(comm_self), keyval, NULL)
        Py_AtExit(node_end)  # runs before mpi4py's, which came first


def keep_window(window, uint64_t name):
    """Make MPI_Finalize free a window before anything else, in the order of the windows' names.

    A window's name is the same on all its ranks. Otherwise Open MPI frees windows in the order of its table, which may
    differ between the ranks of two windows: each rank would wait for the other forever.
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
    """Forget a window that is about to be freed."""
    global windows_count
    cdef int i
    for i in range(windows_count):
        if windows_left[i].name == name:
            windows_count -= 1
            windows_left[i] = windows_left[windows_count]
            break


cdef inline int refuse_after_the_end() except -1:
    """Raise if MPI has been finalised: memory of the node has been freed, too."""
    if node_is_ending:
        raise DistBackendError(
            f"MPI has been finalised, and can't communicate any more: call MPI.Finalize() last{on_rank()}")
    return 0


cdef int copy_nothing(Handle comm, int key, void* extra, void* value, void* copied, int* has_copied) noexcept nogil:
    has_copied[0] = 0
    return 0


cdef int before_the_end(Handle comm, int key, void* value, void* extra) noexcept nogil:
    """Stop the program's threads that still wait for other ranks, then free the windows."""
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
