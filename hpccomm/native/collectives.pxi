# Collectives of one array. `NAME` does the operation or returns False. `node_NAME` does it in memory of the node, for
# arrays that the checked path has prepared for MPI, or returns False. Both end in the same function.

cdef class Collectives(Trials):
    """The collectives of one array."""

    def broadcast(self, array, root):
        """Do a broadcast, or return False."""
        if self.is_for_gpu(array):
            return self.gpu.broadcast_as(array, root, BLOCKING)
        cdef Array* x = plain(array, self.largest)
        if x == NULL or not is_rank(root, self.size) or type_of(x) == 0:
            return False
        cdef int source = PyLong_AsLong(root)
        self.notes(BROADCAST, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY, source)
        return self.ends(
            self.broadcast_memory(<char*>PyArray_DATA(x), count_of(x), PyArray_NBYTES(x), type_of(x), kind_of(x), source),
            "broadcast")

    def node_broadcast(self, array, int root):
        """Do a broadcast of an array prepared for MPI in memory of the node, or return False."""
        cdef Array* x = without_gaps(array)
        cdef Handle datatype = type_of(x) if PyArray_NBYTES(x) <= LARGEST_TRIED else 0
        return self.has_ended(
            self.broadcast_memory(<char*>PyArray_DATA(x), count_of(x), PyArray_NBYTES(x), datatype, kind_of(x), root),
            "broadcast")

    cdef int broadcast_memory(self, char* data, int count, Py_ssize_t nbytes, Handle datatype, uint64_t kind,
                              int root) except? -9:
        """Broadcast `nbytes` bytes, which are `count` values (datatype 0: not by MPI); return 0 or an error code."""
        cdef bint in_node
        if self.is_alone:
            return 0
        cdef int code = self.choose(BROADCAST, root, nbytes, datatype, &in_node)
        if code:
            return code
        with nogil:
            if in_node:
                code = node_broadcast(&self.node, call_of(BROADCAST, root, kind), root, data, nbytes)
            else:
                code = mpi.bcast(data, count, datatype, root, self.comm)
        return self.has_taken(in_node, code)

    def all_reduce(self, array, op):
        """Do an all_reduce, or return False."""
        if self.is_for_gpu(array):
            return self.gpu.all_reduce_as(array, op, BLOCKING)
        cdef Array* x = plain(array, self.largest)
        cdef int place = self.place_of(op)
        if x == NULL or not self.is_reduced(x, place):
            return self.all_reduce_prepared(array, op)
        self.notes(ALL_REDUCE, column_of(x), PyArray_NBYTES(x), place, NOBODY)
        return self.ends(
            self.all_reduce_memory(<char*>PyArray_DATA(x), PyArray_SIZE(x), column_of(x), place), "all_reduce")

    def node_all_reduce(self, array, op):
        """Like node_broadcast, for an all_reduce in place."""
        cdef Array* x = without_gaps(array)
        cdef int place = self.place_of(op), number = column_of(x)
        return self.folds_in_node(place, number, PyArray_NBYTES(x)) and self.has_ended(
            self.all_reduce_memory(<char*>PyArray_DATA(x), PyArray_SIZE(x), number, place), "all_reduce")

    cdef int all_reduce_memory(self, char* data, Py_ssize_t count, int number, int place) except? -9:
        """Reduce `count` values of dtype `number` in place; return 0 or an error code."""
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
        """Do an all_reduce of an array with gaps, of float16, or with AVG, prepared as in mpi/reductions.py."""
        cdef Array* x = <Array*>array
        cdef int code, place = self.place_of(op)
        cdef bint averages = place == AVERAGE
        if Py_TYPE(array) is not &PyArray_Type or not PyArray_ISWRITEABLE(x) or not PyArray_ISNOTSWAPPED(x):
            return False
        cdef Py_ssize_t i, count = PyArray_SIZE(x)
        cdef int number = column_of(x)
        cdef bint is_narrow = self.is_narrow(x, place, PyArray_NBYTES(x)), is_half = number == NPY_HALF and not is_narrow
        if is_half:
            number = NPY_FLOAT
        elif averages and number != NPY_FLOAT and number != NPY_DOUBLE and not is_narrow:
            return False
        if averages and not is_narrow:
            place = usual_place
        if place < 0 or number >= TYPES or not (is_narrow or mpi.reduced[place][number]) or (
                self.may_be_shared(PyArray_NBYTES(x))):
            return False
        if count > SMALL or count * <Py_ssize_t>(mpi.kinds[number] & 255) > self.largest:
            return False
        # reduce in the array itself or in a copy; float16 in float32
        cdef object own = array if PyArray_ISCARRAY(x) else PyArray_NewCopy(x, NPY_CORDER)
        cdef char* data = <char*>PyArray_DATA(<Array*>own)
        cdef float[SMALL] wide
        if is_half:
            for i in range(count):
                wide[i] = half_to_float((<uint16_t*>data)[i])
        self.notes(ALL_REDUCE, column_of(x), PyArray_NBYTES(x), AVERAGE if averages else place, NOBODY)
        code = self.all_reduce_memory(<char*>wide if is_half else data, count, number, place)
        if code:
            raise self.failed("all_reduce", code)
        if averages and not is_narrow:
            average(<char*>wide if is_half else data, count, number, self.size)
        if is_half:
            for i in range(count):
                (<uint16_t*>data)[i] = float_to_half(wide[i])
        if own is not array:
            PyArray_CopyInto(x, <Array*>own)
        return self.ends(0, "all_reduce")

    def reduce(self, array, root, op):
        """Do a reduce, or return False."""
        if self.is_for_gpu(array):
            return self.gpu.reduce_as(array, root, op, BLOCKING)
        cdef Array* x = plain(array, self.largest)
        cdef int code, place = self.place_of(op)
        if x == NULL or not is_rank(root, self.size) or not self.is_reduced(x, place):
            return False
        cdef int number = column_of(x), destination = PyLong_AsLong(root)
        self.notes(REDUCE, number, PyArray_NBYTES(x), place, destination)
        if self.is_alone:
            return self.ends(0, "reduce")
        if mpi.folds[place][number] != NULL and self.reduces_in_node(PyArray_NBYTES(x)):
            return self.ends(self.reduce_array(REDUCE, x, place, destination, self.size if self.rank == destination else 0), "reduce")
        cdef void* sent = mpi.in_place if self.rank == destination else PyArray_DATA(x)
        cdef void* received = PyArray_DATA(x) if self.rank == destination else NULL
        with nogil:
            code = mpi.reduce(sent, received, count_of(x), mpi.reduced[place][number], mpi.ops[place][number],
                              destination, self.comm)
        return self.ends(code, "reduce")

    # scan and exscan are done here only in memory of the node, once it is open; otherwise they are left to MPI.

    def node_reduce(self, str name, array, op, int root):
        """Like node_broadcast, for a reduce, scan or exscan in place."""
        cdef Array* x = without_gaps(array)
        cdef int place = self.place_of(op), what = SCAN if name == "scan" else EXSCAN if name == "exscan" else REDUCE
        cdef int ranks = (self.size if self.rank == root else 0) if what == REDUCE else self.rank + (what == SCAN)
        return self.folds_in_node(place, column_of(x), PyArray_NBYTES(x)) and self.has_ended(
            self.reduce_array(what, x, place, root, ranks), name)

    def scan(self, array, op):
        """Do a scan, or return False."""
        return self.scans(SCAN, array, op, self.rank + 1)

    def exscan(self, array, op):
        """Do an exscan, or return False."""
        return self.scans(EXSCAN, array, op, self.rank)

    cdef bint scans(self, int what, object array, object op, int ranks) except -1:
        """Reduce the arrays of the first `ranks` ranks, or return False."""
        cdef Array* x = plain(array, self.largest)
        cdef int place = self.place_of(op)
        if self.node.flags == NULL or x == NULL or place == AVERAGE or not self.is_foldable(x, place):
            return False
        if not self.reduces_in_node(PyArray_NBYTES(x)):
            return False
        self.notes(what, column_of(x), PyArray_NBYTES(x), place, NOBODY)
        return self.ends(self.reduce_array(what, x, place, 0, ranks), NAMES[what])

    def all_gather_single(self, output, array):
        """Do an all_gather_single, or return False."""
        if self.is_for_gpu(output):
            return self.gpu.all_gather_single_as(output, array, BLOCKING)
        cdef Array* y = plain(output, self.largest)
        cdef Array* x = plain(array, self.largest)
        if not self.is_pair(y, x) or PyArray_NBYTES(y) != PyArray_NBYTES(x) * self.size or type_of(x) == 0:
            return False
        self.notes(ALL_GATHER, PyArray_TYPE(x), PyArray_NBYTES(y) + PyArray_NBYTES(x), NOBODY, NOBODY)
        return self.ends(
            self.all_gather_memory(<char*>PyArray_DATA(y), <char*>PyArray_DATA(x), count_of(x), PyArray_NBYTES(x),
                                   type_of(x), kind_of(x)), "all_gather_single")

    def node_all_gather(self, output, array):
        """Like node_broadcast, for an all_gather_single of arrays that share no memory."""
        cdef Array* y = without_gaps(output)
        cdef Array* x = without_gaps(array)
        return self.is_in_node(PyArray_NBYTES(y)) and self.has_ended(
            self.all_gather_memory(<char*>PyArray_DATA(y), <char*>PyArray_DATA(x), count_of(x), PyArray_NBYTES(x),
                                   type_of(x), kind_of(x)), "all_gather_single")

    cdef int all_gather_memory(self, char* y, char* x, int count, Py_ssize_t nbytes, Handle datatype,
                               uint64_t kind) except? -9:
        """Like broadcast_memory, for `nbytes` bytes from each rank."""
        if self.is_alone:
            copy_bytes(y, x, nbytes)
            return 0
        cdef bint in_node
        cdef int code = self.choose(ALL_GATHER, 0, nbytes * self.size, datatype, &in_node)
        if code:
            return code
        with nogil:
            if in_node:
                code = node_all_gather(&self.node, call_of(ALL_GATHER, 0, kind), y, x, nbytes)
            else:
                code = mpi.allgather(x, count, datatype, y, count, datatype, self.comm)
        return self.has_taken(in_node, code)

    def reduce_scatter_single(self, output, array, op):
        """Do a reduce_scatter_single, or return False."""
        if self.is_for_gpu(output):
            return self.gpu.reduce_scatter_single_as(output, array, op, BLOCKING)
        cdef Array* y = plain(output, self.largest)
        cdef Array* x = plain(array, self.largest)
        cdef int place = self.place_of(op)
        if not self.is_pair(y, x) or PyArray_NBYTES(x) != PyArray_NBYTES(y) * self.size:
            return False
        if not self.is_reduced(x, place):
            return False
        self.notes(REDUCE_SCATTER, column_of(x), PyArray_NBYTES(y) + PyArray_NBYTES(x), place, NOBODY)
        return self.ends(
            self.reduce_scatter_memory(<char*>PyArray_DATA(y), <char*>PyArray_DATA(x), count_of(y), column_of(x),
                                       PyArray_ITEMSIZE(x), place), "reduce_scatter_single")

    def node_reduce_scatter(self, output, array, op):
        """Like node_broadcast, for a reduce_scatter_single of arrays that share no memory."""
        cdef Array* y = without_gaps(output)
        cdef Array* x = without_gaps(array)
        cdef int place = self.place_of(op), number = column_of(x)
        return self.folds_in_node(place, number, PyArray_NBYTES(x)) and self.has_ended(
            self.reduce_scatter_memory(<char*>PyArray_DATA(y), <char*>PyArray_DATA(x), PyArray_SIZE(y), number,
                                       PyArray_ITEMSIZE(x), place), "reduce_scatter_single")

    cdef int reduce_scatter_memory(self, char* y, char* x, Py_ssize_t count, int number, int itemsize,
                                   int place) except? -9:
        """Reduce parts of `count` values of dtype `number`; return 0 or an error code."""
        cdef int code
        cdef size_t nbytes = <size_t>count * itemsize
        if self.is_alone:
            copy_bytes(y, x, nbytes)
            return 0
        cdef bint in_node = mpi.folds[place][number] != NULL and self.reduces_in_node(nbytes * self.size)
        with nogil:
            if in_node:
                code = node_reduce_scatter(&self.node, call_of(REDUCE_SCATTER, place, mpi.kinds[number]),
                                           mpi.folds[place][number], itemsize, y, x, count)
            else:
                code = mpi.reduce_scatter_block(x, y, <int>count, mpi.reduced[place][number], mpi.ops[place][number],
                                                self.comm)
        return code

    def all_to_all_single(self, output, array):
        """Do an all_to_all_single of equal parts, or return False."""
        if self.is_for_gpu(output):
            return self.gpu.all_to_all_single_as(output, array, BLOCKING)
        cdef Array* y = plain(output, LARGEST_COUNT)
        cdef Array* x = plain(array, LARGEST_COUNT)
        if not self.is_pair(y, x) or PyArray_NBYTES(x) != PyArray_NBYTES(y) or type_of(x) == 0:
            return False
        if not (PyArray_NDIM(x) and PyArray_NDIM(y)) or PyArray_DIM(x, 0) % self.size or PyArray_DIM(y, 0) % self.size:
            return False
        self.notes(ALL_TO_ALL_SINGLE, PyArray_TYPE(x), PyArray_NBYTES(y) + PyArray_NBYTES(x), NOBODY, NOBODY)
        return self.ends(self.move_equal_parts(y, x, type_of(x)), "all_to_all_single")

    def node_all_to_all(self, output, array):
        """Like node_broadcast, for an all_to_all_single of equal parts of arrays that share no memory."""
        cdef Array* y = without_gaps(output)
        cdef Array* x = without_gaps(array)
        return self.is_in_node(PyArray_NBYTES(x)) and self.has_ended(
            self.move_equal_parts(y, x, type_of(x)), "all_to_all_single")

    cdef int move_equal_parts(self, Array* y, Array* x, Handle datatype) except? -9:
        """Like broadcast_memory, for an all_to_all_single of equal parts."""
        if self.is_alone:
            copy_bytes(PyArray_DATA(y), PyArray_DATA(x), PyArray_NBYTES(x))
            return 0
        cdef bint in_node
        cdef int i, part, code = self.choose(ALL_TO_ALL_SINGLE, 0, PyArray_NBYTES(x), datatype, &in_node)
        if code:
            return code
        cdef size_t nbytes = PyArray_NBYTES(x) // self.size
        if in_node:
            for i in range(self.size):
                self.sent[i] = <char*>PyArray_DATA(x) + i * nbytes
                self.received[i] = <char*>PyArray_DATA(y) + i * nbytes
                self.sent_bytes[i] = self.received_bytes[i] = nbytes
            code = self.move(ALL_TO_ALL_SINGLE, self.size, self.size, 0, max(nbytes, 1), kind_of(x))
        else:
            part = count_of(x) // self.size
            with nogil:
                code = mpi.alltoall(PyArray_DATA(x), part, datatype, PyArray_DATA(y), part, datatype, self.comm)
        return self.has_taken(in_node, code)

    def barrier(self):
        """Do a barrier."""
        self.notes(BARRIER, NOBODY, 0, NOBODY, NOBODY)
        return self.ends(self.meet(), "barrier")

    def node_barrier(self):
        """Like node_broadcast, for a barrier."""
        return self.is_in_node(0) and self.has_ended(self.meet(), "barrier")

    cdef int meet(self) except? -9:
        if self.is_alone:
            return 0
        cdef int code
        cdef bint in_node = self.is_in_node(0)
        with nogil:
            if in_node:
                code = node_barrier(&self.node, call_of(BARRIER, 0, 0), 0)
            else:
                code = mpi.barrier(self.comm)
        return code
