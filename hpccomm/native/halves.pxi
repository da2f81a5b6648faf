# Persistent collectives in memory of the node: `start` and `wait` are its two halves, in slots of their own.

cdef class Halves:
    """The first base class of such an operation's PersistentWork: it does the ordinary case, PersistentWork the rest.

    Buffers are prepared as for MPI: `fill` fills the input before each start, `finish` completes the output. The
    `arrays` of a coalesced all_reduce need neither: they are packed into the slot and reduced from there.
    """

    cdef InNode path
    cdef Node node
    cdef list arrays
    cdef object fill, finish
    cdef tuple alive  # keeps the buffers and the memory
    cdef const Fold* fold
    cdef char *given
    cdef char *taken
    cdef Py_ssize_t nbytes, low, high  # from `low` to `high` the input is for this rank alone
    cdef uint64_t call_in_node
    cdef int what, number, place, root
    cdef int noted, noted_type, noted_op, noted_root  # for the ring; `noted` is 0 until is_noted has set them
    cdef Py_ssize_t noted_bytes
    cdef bint averages, has_taken
    cdef long long entry
    cdef readonly unsigned long waiting_thread
    cdef public object dispatcher, operation, call, _timeout
    cdef public bint is_active, _freed, was_asked

    def set_up(self, InNode path, str name, given, taken, fill, finish, op, int root, list arrays, bint averages, memory):
        """Use zeroed `memory` of `halves_bytes` that all ranks share. `op` is a reduction's op or None; with `averages`
        the sum of floats is divided by the number of ranks.
        """
        cdef Array* x = without_gaps(given)
        self.path, self.node = path, path.node
        self.root, self.arrays, self.averages = root, arrays, averages
        self.what = NAMES.index(f"{name}_start")
        self.fill, self.finish, self.alive = fill, finish, (given, taken, memory)
        self.given, self.taken = <char*>PyArray_DATA(x), <char*>PyArray_DATA(without_gaps(taken))
        self.nbytes, self.number = PyArray_NBYTES(x), PyArray_TYPE(x)
        self.place = NOBODY if op is None else path.place_of(op)
        cdef uint64_t kind = 0
        if op is not None:
            self.fold, kind = mpi.folds[self.place][self.number], mpi.kinds[self.number]
        self.call_in_node = call_of(self.what, root if op is None else self.place, kind)
        cdef Py_ssize_t part = self.nbytes // self.node.ranks
        if self.what == REDUCE_SCATTER_START or self.what == ALL_TO_ALL_START:
            self.low, self.high = part * self.node.rank, part * (self.node.rank + 1)
        if path.is_alone:  # its own values are copied at most once
            self.low, self.high, self.arrays = 0, self.nbytes, None
        if arrays is not None or self.what == BROADCAST_START and root != self.node.rank:
            self.given = NULL  # `start` copies no input
        node_make_halves(&self.node, <char*>PyArray_DATA(without_gaps(memory)), slot_for(self.nbytes))

    def start(self):
        """See PersistentWork.start."""
        if (self.is_active or self._freed or self.dispatcher is None or self.dispatcher.fast is not self.path
                or self.noted == 0 and not self.is_noted()):
            halves_start(self)  # there is a hook, a coalescing block, ...
            return
        if self.fill is not None:
            self.fill()
        self.entry = note(self.path, self.noted, self.noted_type, self.noted_bytes, self.noted_op, self.noted_root,
                          NOBODY, True)
        cdef int code = self.puts()
        if code:
            raise self.path.failed(self.call.name, code)
        self.path.count += 1
        self.is_active = True

    cdef bint is_noted(self) except -1:
        """Find the ring's values for each start, those that a hook would see; return False if it can't have them."""
        cdef tuple given = self.call.arguments
        cdef list arrays = given[0] if type(given[0]) is list else [each for each in given if PyArray_Check(each)]
        op, root, dtype = self.call.named.get("op"), self.call.named.get("root"), arrays[0].dtype
        if type_of(<Array*><PyObject*>arrays[0]) == 0:  # a structured one, for example
            return False
        self.noted_type, self.noted_bytes = dtype.num, sum([array.nbytes for array in arrays])
        self.noted_op = NOBODY if op is None else op_names.index(op.name)
        self.noted_root = NOBODY if root is None else root
        self.noted = NAMES.index(self.call.name)  # of the whole operation, if it is coalesced
        return True

    def begin(self):
        """See PersistentWork.begin."""
        refuse_after_the_end()
        self.entry = 0
        if self.fill is not None:
            self.fill()
        cdef int code = self.puts()
        if code:
            raise exception_of(code)
        self.is_active = True  # even if a signal handler raises from here on

    cdef int puts(self) noexcept:
        """Put this rank's values into its slot; return 0 or an error code."""
        cdef int code
        cdef char* slot
        self.has_taken = False
        if self.arrays is not None:
            slot = node_slot(&self.node, self.node.number + 1, self.node.rank)
            pack(self.arrays, 0, PyList_GET_SIZE(self.arrays), slot, 1, 0, True)
        with nogil:
            code = node_start(&self.node, self.call_in_node, self.given, self.nbytes, self.low, self.high)
        return code

    cdef int takes(self) noexcept:
        """Wait until all ranks have started, and copy this rank's results out; return 0 or an error code."""
        cdef int code
        self.waiting_thread = PyThread_get_thread_ident()
        with nogil:
            code = node_meet(&self.node)
            if code == 0:
                code = self.moves()
        self.waiting_thread = 0
        if code == 0 and self.arrays is not None:
            self.unpacks()
        note_end(self.entry, code != 0)
        return code

    cdef int moves(self) noexcept nogil:
        cdef int rank, code = 0
        cdef Py_ssize_t part = self.nbytes // self.node.ranks
        cdef uint64_t number = self.node.number
        if self.what == BROADCAST_START:
            if self.root != self.node.rank:
                copy_bytes(self.taken, node_slot(&self.node, number, self.root), self.nbytes)
        elif self.what == ALL_GATHER_START:
            for rank in range(self.node.ranks):
                copy_bytes(self.taken + rank * self.nbytes, self.given if rank == self.node.rank
                       else node_slot(&self.node, number, rank), self.nbytes)
        elif self.what == ALL_TO_ALL_START:
            for rank in range(self.node.ranks):
                copy_bytes(self.taken + rank * part, self.given + self.low if rank == self.node.rank
                       else node_slot(&self.node, number, rank) + self.low, part)
        elif self.what == REDUCE_SCATTER_START:
            node_fold(&self.node, self.fold, self.taken, self.given + self.low, self.low, part)
            self.averages_values(self.taken, part)
        elif self.given != NULL and not self.path.is_alone:
            code = node_take_all_reduced(&self.node, self.fold, self.taken, self.nbytes)
            self.averages_values(self.taken, self.nbytes)
        return code

    cdef void averages_values(self, char* data, Py_ssize_t nbytes) noexcept nogil:
        if self.averages:
            average(data, nbytes // <Py_ssize_t>(mpi.kinds[self.number] & 255), self.number, self.node.ranks)

    cdef void unpacks(self) noexcept:
        """Reduce all ranks' values from the slots into this rank's arrays."""
        cdef Py_ssize_t i, nbytes, at = 0
        cdef char* data
        for i in range(PyList_GET_SIZE(self.arrays)):
            data, nbytes = <char*>PyArray_DATA(<Array*>PyList_GET_ITEM(self.arrays, i)), nbytes_at(self.arrays, i)
            node_fold(&self.node, self.fold, data, NULL, at, nbytes)
            self.averages_values(data, nbytes)
            at += nbytes

    def wait(self, timeout=None):
        """See PersistentWork.wait."""
        if (not self.is_active or timeout is not None or self._timeout is not None or self.operation is not None
                or self.finish is not None or self.has_taken):
            return halves_wait(self, timeout)
        cdef int code = self.takes()
        if code:
            self.fail(self.error_of(code))
        self.is_active = False
        return True

    def block(self):
        """See PersistentWork.block."""
        cdef int code
        if not self.has_taken:  # otherwise a signal handler has interrupted `finish`
            code = self.takes()
            if code:
                raise self.error_of(code)
            self.has_taken = True
        if self.finish is not None:
            self.finish()

    def poll(self):
        """See PersistentWork.poll."""
        cdef int code
        if not (self.has_taken or node_has_met(&self.node)):
            with nogil:
                code = self.node.progress(self.node.context)
            if code:
                raise exception_of(code)
            return False
        self.block()
        return True

    cdef object error_of(self, int code):
        if code != NODE_DIFFERS:
            return exception_of(code)
        name = NAMES[self.what] if self.call is None else self.call.name  # a part of another operation has no call
        return difference_error(name, self.node.differing)

    def release(self):
        """See PersistentWork.release."""
        self.arrays = self.fill = self.finish = self.alive = None


cdef inline Py_ssize_t slot_for(Py_ssize_t nbytes) noexcept:
    return (nbytes + LINE - 1) // LINE * LINE


def halves_bytes(int ranks, Py_ssize_t nbytes):
    """Return the bytes of memory for a persistent operation with `nbytes` of input; a single rank needs only flags."""
    return node_halves_bytes(ranks, slot_for(nbytes if ranks > 1 else 0))


cdef object halves_start, halves_wait


def set_up_halves(work):
    """Set the methods of PersistentWork for cases that are not ordinary."""
    global halves_start, halves_wait
    halves_start, halves_wait = work.start, work.wait
