# Lists of arrays: one array for each rank, or many arrays packed into few (coalesced). Lists of one array for each rank
# are done in memory of the node once it is open; the rest is left to the checks and MPI.

MOVES = {"all_gather": ALL_GATHER_LIST, "gather": GATHER, "scatter": SCATTER, "all_to_all": ALL_TO_ALL}


cdef class Lists(Collectives):
    """The operations on lists of arrays."""

    cdef char* scratch  # of coalesced arrays
    cdef Py_ssize_t scratch_bytes

    def __dealloc__(self):
        free(self.scratch)

    cdef bint takes_list(self, object items, Array* own, char** data, size_t* nbytes) except -1:
        """Note addresses and sizes of one array for each rank; return False unless all are ordinary and fit `own`."""
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

    cdef bint outputs_are_apart(self, int n):
        """Whether the first `n` places in `received` share no memory; the checks raise an error for others."""
        cdef int i, j, first = 0
        for i in range(1, n):
            if self.received[i] < self.received[i - 1] + self.received_bytes[i - 1]:
                first = n  # not in order
        for i in range(1, first):
            for j in range(i):
                if (self.received[i] < self.received[j] + self.received_bytes[j]
                        and self.received[j] < self.received[i] + self.received_bytes[i]):
                    return False
        return True

    cdef int takes_parts(self, list arrays, char** data, size_t* nbytes) except -1:
        """Note the addresses and sizes of arrays prepared for MPI."""
        cdef Array* x
        for i, array in enumerate(arrays):
            x = without_gaps(array)
            data[i], nbytes[i] = <char*>PyArray_DATA(x), PyArray_NBYTES(x)
        return 0

    cdef int notes_lists(self, int what, int dtype, int n_sent, int n_received, int op, int root) except -1:
        """Note in the ring a collective on the parts in `sent` and `received`."""
        cdef int i
        cdef Py_ssize_t nbytes = 0
        for i in range(n_sent):
            nbytes += self.sent_bytes[i]
        for i in range(n_received):
            nbytes += self.received_bytes[i]
        return self.notes(what, dtype, nbytes, op, root)

    def all_gather(self, outputs, array):
        """Do an all_gather, or return False."""
        cdef Array* x = plain(array, self.largest)
        if not (self.takes_list(outputs, x, self.received, self.received_bytes) and self.outputs_are_apart(self.size)):
            return False
        cdef size_t largest = self.largest_in_node(self.received_bytes, self.node_largest)
        if largest == 0 or largest > node_room(&self.node, 1) and may_overlap(outputs, [array]):
            return False  # it takes rounds, and the first would overwrite the input of the second
        self.sent[0], self.sent_bytes[0] = <char*>PyArray_DATA(x), PyArray_NBYTES(x)
        self.notes_lists(ALL_GATHER_LIST, PyArray_TYPE(x), 1, self.size, NOBODY, NOBODY)
        return self.ends(self.move(ALL_GATHER_LIST, 1, self.size, 0, largest), "all_gather")

    def gather(self, array, outputs, root):
        """Do a gather, or return False."""
        return self.moves_rooted(GATHER, array, outputs, root, self.sent, self.sent_bytes, self.received, self.received_bytes)

    def scatter(self, output, inputs, root):
        """Do a scatter, or return False."""
        return self.moves_rooted(SCATTER, output, inputs, root, self.received, self.received_bytes, self.sent, self.sent_bytes)

    cdef bint moves_rooted(self, int what, object array, object items, object root, char** one, size_t* one_bytes,
                           char** each, size_t* each_bytes) except -1:
        """Move `array` to the root's list or from it, or return False."""
        cdef Array* x = plain(array, self.largest)
        if x == NULL or not is_rank(root, self.size) or self.node.flags == NULL or type_of(x) == 0:
            return False
        cdef int of = PyLong_AsLong(root), n = self.size if self.rank == of else 0
        if not (self.takes_list(items, x, each, each_bytes) if n else items is None):
            return False
        one[0], one_bytes[0] = <char*>PyArray_DATA(x), PyArray_NBYTES(x)
        cdef int n_sent = 1 if what == GATHER else n, n_received = n if what == GATHER else 1
        if not self.outputs_are_apart(n_received):
            return False
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
        self.notes_lists(REDUCE_SCATTER_LIST, column_of(y), self.size, 1, place, NOBODY)
        return self.ends(self.reduce_parts(column_of(y), place, largest), "reduce_scatter")

    def all_to_all(self, outputs, inputs):
        """Do an all_to_all, or return False."""
        if not PyList_CheckExact(inputs) or PyList_GET_SIZE(inputs) != self.size:
            return False
        cdef Array* x = plain(inputs[self.rank], self.largest)
        if not self.takes_list(inputs, x, self.sent, self.sent_bytes):
            return False
        if not (self.takes_list(outputs, x, self.received, self.received_bytes) and self.outputs_are_apart(self.size)):
            return False
        self.notes_lists(ALL_TO_ALL, PyArray_TYPE(x), self.size, self.size, NOBODY, NOBODY)
        return self.ends(self.move(ALL_TO_ALL, self.size, self.size, 0, 0), "all_to_all")

    def node_move(self, str name, list sent, list received, int root):
        """Do a gather, scatter, all_gather or all_to_all of arrays without gaps, or return False.

        An all_gather may take rounds, so its arrays share no memory. The others first copy all input into the slots.
        """
        cdef int what = MOVES[name]
        cdef size_t largest = 0
        self.takes_parts(sent, self.sent, self.sent_bytes)
        self.takes_parts(received, self.received, self.received_bytes)
        if what == ALL_GATHER_LIST:
            largest = self.largest_in_node(self.received_bytes, self.node_largest)
            if largest == 0:
                return False
        return self.has_ended(self.move(what, len(sent), len(received), root, largest), name)

    def node_reduce_scatter_list(self, output, list sent, op):
        """Do a reduce_scatter of arrays without gaps that share no memory, or return False."""
        cdef int place = self.place_of(op), number = column_of(without_gaps(output))
        self.takes_parts(sent, self.sent, self.sent_bytes)
        cdef size_t largest = self.largest_in_node(self.sent_bytes, self.node_reduced)
        if largest == 0 or not self.folds_in_node(place, number, 0):
            return False
        self.takes_parts([output], self.received, self.received_bytes)
        return self.has_ended(self.reduce_parts(number, place, largest), "reduce_scatter")

    def all_reduce_coalesced(self, arrays, op):
        """Do an all_reduce of many arrays of one dtype, packed into few as in mpi/coalesced.py, or return False."""
        if self.are_for_gpu(arrays):
            return self.gpu.coalesced_as(COALESCED, arrays, arrays, op, 0, BLOCKING)
        cdef int code, number = self.type_of_first(arrays), place = self.place_of(op)
        cdef bint averages = place == AVERAGE
        if averages:
            place = usual_place
        if number < 0 or place < 0 or mpi.reduced[place][number] == 0:
            return False
        if averages and number != NPY_FLOAT and number != NPY_DOUBLE:
            return False
        cdef list xs = list(arrays)  # other threads may change the program's list
        cdef int itemsize = mpi.kinds[number] & 255
        cdef Py_ssize_t first = 0, n = PyList_GET_SIZE(xs), total = self.bytes_of(xs, number), i = n, run = total
        cdef Py_ssize_t largest = self.largest_run // itemsize * itemsize
        if total < 0 or self.may_be_shared(total) or not are_all_apart(xs):
            return False
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
        return self.ends(0, "all_reduce_coalesced")

    def broadcast_coalesced(self, arrays, root):
        """Do a broadcast of many arrays of one dtype, packed into few, or return False."""
        if self.are_for_gpu(arrays):
            return self.gpu.coalesced_as(BROADCAST_COALESCED, arrays, arrays, None, root, BLOCKING)
        return is_rank(root, self.size) and self.in_runs(BROADCAST_COALESCED, arrays, arrays, 1, PyLong_AsLong(root), NOBODY)

    def all_gather_single_coalesced(self, outputs, inputs):
        """Like broadcast_coalesced, for all_gather_single."""
        if self.are_for_gpu(inputs):
            return self.gpu.coalesced_as(ALL_GATHER_COALESCED, outputs, inputs, None, 0, BLOCKING)
        return self.in_runs(ALL_GATHER_COALESCED, outputs, inputs, self.size, NOBODY, NOBODY)

    def reduce_scatter_single_coalesced(self, outputs, inputs, op):
        """Like broadcast_coalesced, for reduce_scatter_single."""
        if self.are_for_gpu(inputs):
            return self.gpu.coalesced_as(REDUCE_SCATTER_COALESCED, outputs, inputs, op, 0, BLOCKING)
        cdef int place = self.place_of(op), number = self.type_of_first(inputs)
        if place < 0 or number < 0 or mpi.reduced[place][number] == 0:
            return False
        return self.in_runs(REDUCE_SCATTER_COALESCED, inputs, outputs, self.size, NOBODY, place)

    cdef bint in_runs(self, int what, larger, smaller, int rows, int root, int place) except -1:
        """Do a coalesced operation in runs of neighbours as in mpi/coalesced.py; `larger` arrays have `rows` parts."""
        cdef int code = 0, number = self.type_of_first(larger)
        cdef bint broadcasts = what == BROADCAST_COALESCED, has_root = self.rank == root
        if number < 0 or not PyList_CheckExact(smaller):
            return False
        cdef list ys = list(larger), xs = ys if broadcasts else list(smaller)  # other threads may change the program's lists
        cdef Py_ssize_t i, first, n = len(ys), total = self.bytes_of(ys, number)
        if len(xs) != n or total < 0 or what == REDUCE_SCATTER_COALESCED and self.may_be_shared(total):
            return False
        if not broadcasts:
            if self.bytes_of(xs, number) < 0:
                return False
            for i in range(n):
                if nbytes_at(ys, i) != nbytes_at(xs, i) * rows:
                    return False
            if not are_all_apart(xs if what == REDUCE_SCATTER_COALESCED else ys):
                return False
        cdef Py_ssize_t run, part, count, packed = min(total, self.largest_run)
        cdef int itemsize = PyArray_ITEMSIZE(<Array*>PyList_GET_ITEM(ys, 0))
        # If inputs and outputs share memory, all inputs are packed before any output is written.
        cdef bint communicates, packs_first = not broadcasts and may_overlap(xs, ys)
        packs_first = packs_first and (total <= self.largest_run or do_overlap(xs, ys))
        if packs_first:
            packed = total if what == REDUCE_SCATTER_COALESCED else total // rows
        self.make_scratch(packed if broadcasts else packed + self.largest_run)
        self.notes(what, number, total if broadcasts else total + total // rows, place, root)
        cdef char* data
        cdef char* out = self.scratch + (0 if broadcasts else packed)
        cdef list inputs = xs if what == ALL_GATHER_COALESCED else ys
        cdef list outputs = xs if what == REDUCE_SCATTER_COALESCED else ys
        cdef int rows_in = rows if what == REDUCE_SCATTER_COALESCED else 1
        cdef int rows_out = rows if what == ALL_GATHER_COALESCED else 1
        for communicates in range(not packs_first, 2):
            first, data = 0, self.scratch
            while first < n and code == 0:
                i, run = n, total
                if total > self.largest_run:
                    i, run = first, 0
                    while i < n and (i == first or run + nbytes_at(ys, i) <= self.largest_run):
                        run += nbytes_at(ys, i)
                        i += 1
                part = run // rows
                count = part // itemsize
                if communicates != packs_first and (has_root or not broadcasts):
                    pack(inputs, first, i, data, rows_in, part, True)
                if communicates:
                    if broadcasts:
                        code = self.broadcast_memory(data, count, part, mpi.datatypes[number], mpi.kinds[number], root)
                    elif what == ALL_GATHER_COALESCED:
                        code = self.all_gather_memory(out, data, count, part, mpi.datatypes[number], mpi.kinds[number])
                    else:
                        code = self.reduce_scatter_memory(out, data, count, number, itemsize, place)
                    if code == 0 and not has_root:
                        pack(outputs, first, i, out, rows_out, part, False)
                if packs_first:
                    data += part * rows_in
                first = i
        return self.ends(self.keep_scratch(code), NAMES[what])

    def all_gather_coalesced(self, output_lists, arrays):
        """Do an all_gather of each rank's arrays in runs of neighbours as in mpi/backend.py, or return False."""
        cdef int rank, code = 0, differs = 0, number = self.type_of_first(arrays)
        if self.node.flags == NULL or number < 0 or not PyList_CheckExact(output_lists):
            return False
        if PyList_GET_SIZE(output_lists) != self.size:
            return False
        cdef list xs = list(arrays), ys = []
        cdef Py_ssize_t i, first, n = len(xs), total = self.bytes_of(xs, number)
        for outputs in output_lists:
            if not PyList_CheckExact(outputs) or PyList_GET_SIZE(outputs) != n:
                return False
            ys += outputs
        cdef Py_ssize_t received = self.bytes_of(ys, number)
        if received < 0 or total < 0 or not are_all_apart(ys):
            return False
        for i in range(n):
            if nbytes_at(ys, self.rank * n + i) != nbytes_at(xs, i):
                return False
        cdef bint communicates, packs_first = may_overlap(xs, ys)
        packs_first = packs_first and (total <= <Py_ssize_t>self.node.slot or do_overlap(xs, ys))
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
                            differs = NODE_DIFFERS  # an error of this rank alone: it takes part in the other runs
                        else:
                            pack(ys, rank * n + first, rank * n + i, found, 1, 0, False)
                if packs_first:
                    self.sent[0] += self.received_bytes[self.rank]
                first = i
        return self.ends(self.keep_scratch(code or differs), "all_gather_coalesced")

    cdef Py_ssize_t end_of_run(self, list arrays, Py_ssize_t n, Py_ssize_t first) noexcept:
        """Return the end of a run of neighbours that fit into each rank's slot, and note their bytes."""
        cdef Py_ssize_t i
        cdef int rank
        for rank in range(self.size):
            self.received_bytes[rank] = 0
        for i in range(first, n):
            for rank in range(self.size):
                if self.received_bytes[rank] + nbytes_at(arrays, rank * n + i) > self.node.slot:
                    return i
            for rank in range(self.size):
                self.received_bytes[rank] += nbytes_at(arrays, rank * n + i)
        return n

    cdef int type_of_first(self, object items) except -2:
        if not PyList_CheckExact(items) or not items or Py_TYPE(items[0]) is not &PyArray_Type:
            return -1
        return PyArray_TYPE(<Array*><PyObject*>items[0]) if type_of(<Array*><PyObject*>items[0]) else -1

    cdef Py_ssize_t bytes_of(self, list arrays, int number) except -2:
        """Return the total bytes of arrays of one dtype; -1 if one is not ordinary."""
        cdef Array* x
        cdef Py_ssize_t i, total = 0
        for i in range(PyList_GET_SIZE(arrays)):
            x = plain(<object>PyList_GET_ITEM(arrays, i), self.largest_run)
            if x == NULL or PyArray_TYPE(x) != number:
                return -1
            total += PyArray_NBYTES(x)
        return total

    cdef int make_scratch(self, Py_ssize_t nbytes) except -1:
        if nbytes >= self.scratch_bytes:  # also at first for 0 bytes: memcpy takes no NULL
            free(self.scratch)
            self.scratch_bytes = 0
            self.scratch = <char*>malloc(nbytes + 1)
            if self.scratch == NULL:
                raise MemoryError
            self.scratch_bytes = nbytes + 1
        return 0

    cdef int keep_scratch(self, int code) noexcept:
        """Free the memory if it is large; return `code`."""
        if self.scratch_bytes > MOST_RUNS * self.largest_run:
            free(self.scratch)
            self.scratch, self.scratch_bytes = NULL, 0
        return code
