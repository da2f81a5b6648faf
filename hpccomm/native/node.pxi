# Memory that the ranks of a node share: when it is used, and how parts of arrays move through it.

def node_memory(int rank, int ranks, bint has_cells, size_t slot):
    """Return the bytes of a rank's part of the shared memory, with slots of `slot` bytes; the parts are adjacent."""
    return node_bytes(rank, ranks, has_cells, slot)


cdef inline void copy_own(char* to, const char* source, size_t nbytes) noexcept nogil:
    """Copy this rank's own part, which may share memory with its place."""
    if to + nbytes <= source or source + nbytes <= to:
        copy_bytes(to, source, nbytes)
    else:
        memmove(to, source, nbytes)


cdef class InNode(Path):
    """A path whose operations may use memory of the node; a subclass in Python opens that memory."""

    cdef Node node  # its flags are NULL until it is open
    cdef Py_ssize_t node_largest, node_reduced  # most bytes: of an operation, of a reduction
    cdef int before_node  # operations that still go to MPI before the memory is opened
    cdef bint has_left  # memory of the node was too small: the checks and MPI do this operation
    cdef char *sent[PARTS]  # the parts of the current operation
    cdef char *received[PARTS]
    cdef size_t sent_bytes[PARTS]
    cdef size_t received_bytes[PARTS]
    cdef int below[PARTS]  # this rank in a tree; see meet.h

    def __cinit__(self):
        self.node_largest = self.node_reduced = -1

    def use_node(self, Py_ssize_t largest, Py_ssize_t reduced, int before):
        """Do operations of at most `largest` bytes (reductions: `reduced`) in memory of the node, after the first `before`."""
        if self.size <= PARTS:
            self.node_largest, self.node_reduced, self.before_node = largest, reduced, before
        self.is_alone = self.size == 1

    def map_node(self, uintptr_t address, size_t slot, size_t one_phase, int looks, int yields, list parents=None):
        """Use the memory at `address`, which all ranks of the group share, zero before its slots. Address 0: none.

        `parents` has the rank above each rank in the tree in which ranks meet, -1 for rank 0; None: there is no tree.
        """
        if address == 0:
            self.node_largest, self.node_reduced, self.node.flags = -1, -1, NULL
            return
        self.node.one_phase, self.node.looks, self.node.yields = one_phase, looks, yields
        self.node.rank, self.node.ranks = self.rank, self.size
        self.node.progress, self.node.context = make_progress, <void*>self.comm
        node_map(&self.node, <char*>address, yields >= 0, slot)
        if parents is not None:
            for rank, above in enumerate(parents):
                if above == self.rank:
                    self.below[self.node.ranks_below] = rank
                    self.node.ranks_below += 1
            self.node.below, self.node.above = self.below, parents[self.rank]

    cdef bint is_in_node(self, Py_ssize_t nbytes) except -1:
        """Whether an operation uses memory of the node, opened when worthwhile; all ranks give the same answer."""
        if nbytes > self.node_largest:
            return False
        refuse_after_the_end()
        if self.node.flags == NULL:
            if self.before_node > 0:
                self.before_node -= 1
                return False
            self.open_node()
        return self.node.flags != NULL

    cdef bint reduces_in_node(self, Py_ssize_t nbytes) except -1:
        """Like is_in_node, but open the memory at once: the first reductions by MPI could give other bits."""
        if nbytes > self.node_reduced:
            return False
        self.before_node = 0
        return self.is_in_node(0)

    cdef size_t largest_in_node(self, const size_t* nbytes, Py_ssize_t limit) noexcept:
        """Return the bytes of the largest part, at least 1; 0 if the parts have more than `limit` bytes together."""
        cdef int i
        cdef size_t total = 0, largest = 1
        for i in range(self.size):
            total += nbytes[i]
            largest = max(largest, nbytes[i])
        return largest if <Py_ssize_t>total <= limit else 0

    def opens_node(self, array, op):
        """Whether persistent operations on such arrays (reduced by `op`, if not None) can use memory of the node.

        All ranks call this together and get the same answer; it opens the memory if necessary.
        """
        cdef int place = 0 if op is None else self.place_of(op), number = PyArray_TYPE(without_gaps(array))
        if op is not None and (place < 0 or number >= TYPES or mpi.folds[place][number] == NULL):
            return False
        self.before_node = 0
        return self.is_in_node(0)

    def reduces_narrow(self, array, op, Py_ssize_t nbytes):
        """Whether memory of the node reduces `nbytes` bytes of this array's half precision by `op`, without float32
        arrays as MPI needs them; the answer is the same on all ranks.
        """
        return self.is_narrow(<Array*>array, self.place_of(op), nbytes)

    def is_node_open(self):
        """Whether the next operation may use memory of the node; the answer is the same on all ranks."""
        if self.has_left:
            self.has_left = False
            return False
        return self.is_in_node(0)

    cdef bint ends(self, int code, str name) except -1:
        """Count the noted collective, or raise its error, or return False to leave it to the checks and MPI."""
        if code == 0:
            self.count += 1
            note_end(self.entry, False)
            return True
        if code == NODE_LEAVES:
            self.has_left = True
            leave_to_the_checks(self.entry)
            return False
        raise self.failed(name, code)

    cdef bint has_ended(self, int code, str name) except -1:
        if code == NODE_LEAVES:
            return False
        if code == NODE_DIFFERS:
            raise self.differing(name)
        if code:
            raise exception_of(code)
        return True

    def differing(self, str name):
        """Return the error of an operation in memory of the node in which another rank's call differs."""
        return difference_error(name, self.node.differing)

    cdef inline bint is_foldable(self, Array* array, int place) noexcept:
        cdef int number = column_of(array)
        return (
            place >= 0 and number < TYPES and mpi.folds[place][number] != NULL
            and not self.may_be_shared(PyArray_NBYTES(array))
        )

    cdef bint is_narrow(self, Array* array, int place, Py_ssize_t nbytes) except -1:
        """Whether `nbytes` bytes of an array's half precision are reduced in memory of the node."""
        cdef int number = column_of(array)
        return (number == NPY_HALF or number == BFLOAT16) and self.folds_in_node(place, number, nbytes)

    cdef bint is_reduced(self, Array* array, int place) except -1:
        """Whether MPI or memory of the node reduces an ordinary array without preparation."""
        return self.is_reducible(array, place) or (
            not self.may_be_shared(PyArray_NBYTES(array)) and self.is_narrow(array, place, PyArray_NBYTES(array)))

    cdef bint folds_in_node(self, int place, int number, Py_ssize_t nbytes) except -1:
        """Whether a reduction of `nbytes` bytes of dtype `number` uses memory of the node."""
        return place >= 0 and number < TYPES and mpi.folds[place][number] != NULL and self.reduces_in_node(nbytes)

    cdef int move(self, int what, int n_sent, int n_received, int root, size_t largest, uint64_t kind=0):
        """Move the parts in `sent` to the places in `received`; `largest`: see node_begin."""
        cdef int first = root if what == SCATTER else 0
        cdef int part = 0 if what == ALL_GATHER_LIST or what == GATHER else self.rank
        cdef int own = self.rank - first, parts = n_sent
        if self.node.cells != NULL and (what == GATHER or what == SCATTER):
            return self.passes(what, call_of(what, root, 0), n_sent, n_received, first, part, root, NULL)
        if not 0 <= own < n_received or self.sent_bytes[part] != self.received_bytes[own]:
            own = -1
        elif what != ALL_GATHER_LIST:  # no other rank takes it
            self.sent_bytes[part] = 0
            parts -= what == ALL_TO_ALL_SINGLE
        return self.rounds(call_of(what, root, kind), n_sent, parts, n_received, first, part, NULL, largest, own)

    cdef int reduce_array(self, int what, Array* x, int place, int root, int ranks):
        """Reduce the arrays of ranks 0 to `ranks` - 1 into `x`, unless `ranks` is 0."""
        cdef int number = column_of(x)
        cdef size_t nbytes = PyArray_NBYTES(x)
        cdef uint64_t call = call_of(what, root << 4 | place, mpi.kinds[number])
        cdef bint is_taken = self.rank != root if what == REDUCE else self.rank < self.size - 1  # by other ranks
        self.sent[0] = self.received[0] = <char*>PyArray_DATA(x)
        self.sent_bytes[0], self.received_bytes[0] = nbytes if is_taken else 0, nbytes
        if what == SCAN and self.rank == 0:
            ranks = 0  # the array is the result
        if self.node.cells != NULL and nbytes <= node_cell_room():
            return self.passes(what, call, 1, ranks, 0, 0, root, mpi.folds[place][number])
        return self.rounds(call, 1, 1, ranks, 0, 0, mpi.folds[place][number], max(nbytes, 1), self.rank)

    cdef int reduce_parts(self, int number, int place, size_t largest):
        """Reduce all ranks' parts in `sent`; each rank receives its own part."""
        cdef uint64_t call = call_of(REDUCE_SCATTER_LIST, place, mpi.kinds[number])
        return self.rounds(call, self.size, self.size, self.size, 0, self.rank, mpi.folds[place][number], largest)

    cdef int rounds(self, uint64_t call, int n_sent, int parts, int ranks, int first, int part, const Fold* fold,
                    size_t largest, int own=-1):
        """Put the `n_sent` parts, at most `parts` of which have bytes, into memory of the node, and take part `part` of
        `ranks` ranks from `first` on: each to its place in `received`, but for place `own` from this rank's `sent`; or
        reduced by `fold` to the first place, which has the values of rank `own`. Large parts go in rounds.
        """
        cdef int code, i, differs = 0
        with nogil:
            node_begin(&self.node, parts, largest)
            while True:
                code = node_post(&self.node, call, n_sent, self.sent, self.sent_bytes)
                if code:
                    return code
                if fold == NULL:
                    if own >= 0 and self.node.at == 0:  # another part may be received where it is
                        copy_own(self.received[own], self.sent[part], self.received_bytes[own])
                    for i in range(ranks):
                        if i != own:
                            differs |= node_take(&self.node, first + i, part, self.received[i], self.received_bytes[i])
                elif ranks > 0:
                    differs |= node_take_reduced(&self.node, fold, ranks, part, self.received[0],
                                                 self.received_bytes[0], own)
                if not node_goes_on(&self.node):
                    return differs

    cdef int passes(self, int what, uint64_t call, int n_sent, int ranks, int first, int part, int root, const Fold* fold):
        """Do the same where ranks outnumber cores: this rank waits only for the `ranks` ranks from which it takes parts."""
        cdef int rank, code, differs = 0
        # Large parts of a gather are sent as messages: the other ranks do not wait to hear of them.
        cdef bint gathers = what == GATHER, collects = gathers and ranks > 0
        with nogil:
            node_begin(&self.node, n_sent, 0)
            code = node_give(&self.node, call, 0 if collects else n_sent, self.sent, self.sent_bytes)
            if code == NODE_LEAVES and gathers:
                code = pass_message(True, self.sent[0], self.sent_bytes[0], root, self.comm)
            if code:
                return code
            if collects:
                copy_own(self.received[root], self.sent[0], min(self.sent_bytes[0], self.received_bytes[root]))
            for rank in range(first, first + ranks):
                if collects and rank == root:
                    continue
                code = node_hear(&self.node, call, rank)
                if code == 0 and fold == NULL:
                    code = node_take(&self.node, rank, part, self.received[rank - first], self.received_bytes[rank - first])
                elif code == NODE_LEAVES and collects:
                    code = pass_message(False, self.received[rank], self.received_bytes[rank], rank, self.comm)
                if code > 0:
                    return code
                differs = code or differs
            if fold != NULL and ranks > 0 and differs == 0:
                differs = node_take_reduced(&self.node, fold, ranks, part, self.received[0], self.received_bytes[0],
                                            self.rank)
            return differs
