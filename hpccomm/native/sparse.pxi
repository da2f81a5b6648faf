# The sparse exchange in memory of the node: only senders know their receivers and arrays.

cdef class Sparse(Lists):
    """exchange_sparse."""

    def exchange_sparse(self, arrays, names):
        """Do a sparse exchange of ordinary arrays in memory of the node; return the received arrays, or None.

        `names`: the ranks' names in `arrays` and in the result; None: ranks are numbers.
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
            code = self.move_sparse(given, names, received)
        except BaseException as error:  # MPI's, a signal handler's, MemoryError: the other ranks have counted it
            self.note_failure()
            seen = self._failed("exchange_sparse", error)
            if seen is error:
                raise
            raise seen from error
        return received if self.ends(code, "exchange_sparse") else None

    cdef int move_sparse(self, list given, names, dict received) except? -3:
        """Exchange the arrays of tuples (rank, whether it is a single array, arrays); None: they are not ordinary."""
        cdef int code
        cdef list sends = [], receives = []
        with nogil:
            node_begin(&self.node, self.size, 0)
            code = node_next(&self.node, SETS)
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
        """Write a rank's arrays: their shapes, and their values if small; return the end, or 0 if there is no room."""
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
                copy_bytes(slot + end, PyArray_DATA(x), PyArray_NBYTES(x))
                end += PyArray_NBYTES(x)
            elif PyArray_NBYTES(x):
                sends.append((dst, array))
        (<Part*>slot)[dst].at, (<Part*>slot)[dst].nbytes = at, end - at
        return (end + LINE - 1) // LINE * LINE

    cdef int take_sparse(self, int source, name, dict received, list receives) except -1:
        """Make the arrays that a rank has sent; add those whose values are not in its slot to `receives`."""
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
                copy_bytes(PyArray_DATA(<Array*><PyObject*>array), data, nbytes)
                data += nbytes
            elif nbytes:
                receives.append((source, array))
        received[name] = arrays[0] if is_single else tuple(arrays)
        return 0

    def node_exchange_sparse(self, arrays, dict received, names):
        """Do a sparse exchange of tuples of arrays (a single array: a list) and fill `received`, or return False."""
        if not self.is_node_open():
            return False
        cdef list given = []
        for dst, each in arrays.items():
            sent = tuple([array if is_sendable(array) else array.copy(order="C") for array in each])
            if not all([is_sendable(array) for array in sent]):
                given = None
                break
            given.append((dst, type(each) is list, sent))
        return self.has_ended(self.move_sparse(given, names, received), "exchange_sparse")
