# State of a group's fast path that all operations need: rank and size, counts, notes in the ring.

cdef class Pending  # in works.pxi
cdef class GPUPath  # in gpu_path.pxi


cdef inline bint is_rank(object number, int size) noexcept:
    """Whether `number` is an int and a rank of a group of `size` ranks."""
    cdef int overflow  # not needed: a number too large for a long gives -1
    return PyLong_CheckExact(number) and 0 <= PyLong_AsLongAndOverflow(number, &overflow) < size


cdef class Path:
    """State of a group's fast path that all operations need. `windows` is empty until the program makes a node-shared
    array; mpi/shared_memory.py reduces such arrays of at least `shared_bytes`.
    """

    cdef public long long count, messages
    cdef public long long passed_collectives, passed_messages  # that went through the checks
    cdef readonly int place  # its number in the ring
    cdef long long entry  # the current blocking collective's, in the ring
    cdef Handle comm
    cdef int rank, size
    cdef bint is_alone  # the group has one rank: operations need neither communicate nor wait
    cdef Py_ssize_t largest, largest_async, largest_run  # most bytes; largest_run: of arrays packed into one
    cdef public Py_ssize_t shared_bytes
    cdef dict windows, in_flight
    cdef readonly object dispatcher
    cdef object timeout
    cdef GPUPath gpu  # does the operations on other arrays than NumPy's; None: nothing does

    def __init__(self, comm, int rank, int size, dict windows, Py_ssize_t largest, Py_ssize_t largest_async,
                 Py_ssize_t largest_run):
        """`comm`: the communicator's handle; `largest`: most bytes of a collective's array, `largest_run`: of
        arrays packed into one.
        """
        self.comm = handle(comm)
        self.rank, self.size = rank, size
        self.windows = windows
        self.largest = min(largest, LARGEST_COUNT)
        self.largest_async = min(largest_async, LARGEST_COUNT)
        self.largest_run = min(largest_run, self.largest)
        global paths
        paths += 1
        self.place = paths

    def attach(self, dispatcher):
        """Keep Works in flight in the group's dispatcher from now on."""
        self.dispatcher, self.in_flight, self.timeout = dispatcher, dispatcher.in_flight, dispatcher.timeout
        self.passed_collectives, self.passed_messages = dispatcher.collectives, dispatcher.messages
        dispatcher.notes.follow(self)

    def with_gpu(self, GPUPath gpu):
        """See FastPath.with_gpu."""
        self.gpu = gpu
        if gpu is not None:
            gpu.host = self
        return self

    cdef inline bint is_for_gpu(self, object array) noexcept:
        return Py_TYPE(array) is not &PyArray_Type and self.gpu is not None

    cdef inline bint are_for_gpu(self, object arrays) noexcept:
        return type(arrays) is list and PyList_GET_SIZE(arrays) > 0 and self.is_for_gpu(<object>PyList_GET_ITEM(arrays, 0))

    def addresses_of_counts(self):
        """Return the addresses of the counts: the fast path's collectives, others; its messages, others."""
        return (<uintptr_t>&self.count, <uintptr_t>&self.passed_collectives,
                <uintptr_t>&self.messages, <uintptr_t>&self.passed_messages)

    cdef inline int notes(self, int what, int dtype, Py_ssize_t nbytes, int op, int peer) except -1:
        """Note in the ring that a blocking collective begins."""
        self.entry = note(self, what, dtype, nbytes, op, peer, NOBODY, False)
        return 0

    cdef bint has_passed(self, str name, long long entry, int code, Py_ssize_t nbytes, Py_ssize_t expected) except -1:
        """Count a noted blocking message; raise if `code` is an MPI error or the message is shorter than its array."""
        if code:
            raise self.failed(name, code)
        self.messages += 1
        if ring[entry & ring_mask].serial == entry:
            ring[entry & ring_mask].number = self.messages + self.passed_messages  # threads may overtake each other
        note_end(entry, nbytes != expected)
        if nbytes != expected:
            raise self.short(name, nbytes, expected)
        return True

    def note_failure(self):
        """Note that the latest unfinished operation has failed."""
        cdef long long serial
        for serial in range(written, max(written - ring_mask, 1) - 1, -1):
            if ring[serial & ring_mask].path == self.place and ring[serial & ring_mask].ended == 0:
                note_end(serial, True)
                return

    cdef int place_of(self, object op) noexcept:
        """Return the row of an op in the tables; -1 if it has none."""
        if op is usual_op:
            return usual_place
        try:
            return op_numbers.get(op, -1)
        except TypeError:  # it is not hashable, as MPI.SUM
            return mpi_op_numbers.get(<uintptr_t><PyObject*>op, -1)

    cdef inline bint is_tag(self, object tag) noexcept:
        cdef int overflow
        return PyLong_CheckExact(tag) and 0 <= PyLong_AsLongAndOverflow(tag, &overflow) <= mpi.largest_tag

    cdef inline bint is_reducible(self, Array* array, int place) noexcept:
        return (
            place >= 0 and PyArray_TYPE(array) < TYPES and mpi.reduced[place][PyArray_TYPE(array)] != 0
            and not self.may_be_shared(PyArray_NBYTES(array))
        )

    cdef inline bint may_be_shared(self, Py_ssize_t nbytes) noexcept:
        """Whether the checks must look for node-shared arrays; the answer is the same on all ranks."""
        return nbytes >= self.shared_bytes and PyDict_Size(self.windows) != 0

    cdef inline bint is_pair(self, Array* output, Array* array) noexcept:
        return (
            output != NULL and array != NULL and PyArray_TYPE(output) == PyArray_TYPE(array)
            and are_apart(output, array)
        )
