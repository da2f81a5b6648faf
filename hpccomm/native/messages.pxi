# Messages, and asynchronous operations, which return Works.

cdef object send_function, recv_function, checked_constructor


def set_up_messages(isend, irecv, constructor):
    """Set the functions that `Message.op` may be, and P2POp's constructor in Python."""
    global send_function, recv_function, checked_constructor
    send_function, recv_function, checked_constructor = isend, irecv, constructor


cdef class Message:
    """The base class of P2POp: its attributes, and its constructor unless it raises or is given c10d's `tensor`."""

    cdef public object op, array, peer, group, tag, group_peer

    def __init__(self, op, array=None, peer=None, group=None, tag=0, group_peer=None, tensor=None):
        if tensor is not None or op is not send_function and op is not recv_function:
            checked_constructor(self, op, array, peer, group, tag, group_peer, tensor)
            return
        self.op, self.array, self.peer = op, array, peer
        self.group, self.tag, self.group_peer = group, tag, group_peer


cdef class FastPath(Sparse):
    """The fast path of one group; its subclass in mpi/compiled.py has the parts that may be slow."""

    cdef int unasked  # Works begun since those in flight were last polled
    cdef Py_ssize_t unasked_bytes  # bytes of arrays of Works since then

    def send(self, array, dst, tag):
        """Send a message, or return False."""
        if self.is_for_gpu(array):
            return self.gpu.send_as(array, dst, tag, BLOCKING)
        cdef Array* x = plain(array, LARGEST_COUNT)
        if x == NULL or not is_rank(dst, self.size) or not self.is_tag(tag) or type_of(x) == 0:
            return False
        cdef int code, peer = PyLong_AsLong(dst), label = PyLong_AsLong(tag)
        if peer == self.rank:
            return False
        cdef long long entry = note(self, SEND, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY, peer, label, False)
        with nogil:
            code = send_values(PyArray_DATA(x), count_of(x), type_of(x), peer, label, self.comm)
        return self.has_passed("send", entry, code, 0, 0)

    def recv(self, array, src, tag):
        """Receive a message and return its sender, or return None."""
        if self.is_for_gpu(array):
            return self.gpu.recv_as(array, src, tag, BLOCKING)
        cdef Array* x = plain(array, LARGEST_COUNT)
        if x == NULL or not is_rank(src, self.size) or not self.is_tag(tag) or type_of(x) == 0:
            return None
        cdef char[STATUS_BYTES] status
        cdef int code, peer = PyLong_AsLong(src), label = PyLong_AsLong(tag)
        if peer == self.rank:
            return None
        cdef long long entry = note(self, RECV, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY, peer, label, False)
        with nogil:
            code = recv_values(PyArray_DATA(x), count_of(x), type_of(x), peer, label, self.comm, status)
        self.has_passed("recv", entry, code, received(status) if code == 0 else 0, PyArray_NBYTES(x))
        return src

    def sendrecv(self, array, dst, output, src, tag, recv_tag):
        """Send a message and receive another, and return its sender; or return None."""
        if self.is_for_gpu(array):
            return self.gpu.sendrecv_as(array, dst, output, src, tag, recv_tag, BLOCKING)
        cdef Array* y = plain(output, LARGEST_COUNT)
        cdef Array* x = plain(array, LARGEST_COUNT)
        if y == NULL or x == NULL or not are_apart(y, x) or type_of(x) == 0 or type_of(y) == 0:
            return None
        if not (is_rank(dst, self.size) and is_rank(src, self.size) and self.is_tag(tag) and may_block()):
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
        self.has_passed("sendrecv", entry, code, received(status) if code == 0 else 0, PyArray_NBYTES(y))
        return src

    def isend(self, array, dst, tag):
        """Begin to send a message and return its Work, or return None."""
        if self.is_for_gpu(array):
            return self.gpu.send_as(array, dst, tag, ASYNC)
        return self.begun(self.prepared(False, array, dst, tag))

    def irecv(self, array, src, tag):
        """Begin to receive a message and return its Work, or return None."""
        if self.is_for_gpu(array):
            return self.gpu.recv_as(array, src, tag, ASYNC)
        return self.begun(self.prepared(True, array, src, tag))

    cdef inline Pending prepared(self, bint receives, object array, object peer, object tag):
        """Return the Work of a message that has not begun; None if the checks must do it."""
        cdef Array* x = plain(array, LARGEST_COUNT)
        if x == NULL or not self.is_tag(tag) or type_of(x) == 0:
            return None
        if not (is_rank(peer, self.size) or receives and peer is None):
            return None
        cdef Pending work = self.new_work(array)
        work.name, work.peer, work.tag = "recv" if receives else "send", peer, tag
        if receives:
            work.expected = PyArray_NBYTES(x)
        return work

    cdef Pending begun(self, Pending work):
        """Begin the message of a prepared Work, if there is one, and return the Work."""
        if work is None:
            return None
        cdef Array* x = <Array*><PyObject*>work.array
        cdef bint receives = work.expected >= 0
        cdef int code, label = PyLong_AsLong(work.tag)
        cdef int rank = mpi.any_source if work.peer is None else PyLong_AsLong(work.peer)
        work.entry = note(self, RECV if receives else SEND, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY,
                          NOBODY if work.peer is None else rank, label, True)
        with nogil:
            if receives:
                code = mpi.irecv(PyArray_DATA(x), count_of(x), type_of(x), rank, label, self.comm, &work.request)
            else:
                code = mpi.isend(PyArray_DATA(x), count_of(x), type_of(x), rank, label, self.comm, &work.request)
        if code:
            raise self.failed(work.name, code)
        self.messages += 1
        work.number = self.messages + self.passed_messages
        self.follow(work)
        return work

    def batch(self, messages, kind, irecv):
        """Begin the messages of a list of `kind` (P2POp), receives first; return their Works, or None."""
        if not PyList_CheckExact(messages):
            return None
        if messages and type(messages[0]) is kind and self.is_for_gpu((<Message>messages[0]).array):
            return self.gpu.batch(messages, kind, irecv)
        cdef list works = []
        cdef Message each
        cdef Pending work
        for item in <list>messages:
            if type(item) is not kind:
                return None
            each = <Message>item
            if each.group is not None or each.group_peer is not None or each.peer is None:
                return None
            work = self.prepared(each.op is irecv, each.array, each.peer, each.tag)
            if work is None:
                return None
            works.append(work)
        for receives in (True, False):
            for item in works:
                if ((<Pending>item).expected >= 0) is receives:
                    self.begun(<Pending>item)
        return works

    def ibroadcast(self, array, root):
        """Begin a broadcast and return its Work, or return None."""
        if self.is_for_gpu(array):
            return self.gpu.broadcast_as(array, root, ASYNC)
        cdef Array* x = plain(array, self.largest_async)
        if x == NULL or not is_rank(root, self.size) or type_of(x) == 0:
            return None
        cdef int code = 0, source = PyLong_AsLong(root)
        cdef Pending work = self.new_work(array)
        work.entry = note(self, BROADCAST, PyArray_TYPE(x), PyArray_NBYTES(x), NOBODY, source, NOBODY, True)
        if not self.is_alone:
            with nogil:
                code = mpi.ibcast(PyArray_DATA(x), count_of(x), type_of(x), source, self.comm, &work.request)
        return self.has_begun("broadcast", work, code)

    def ibarrier(self):
        """Begin a barrier and return its Work."""
        cdef int code = 0
        cdef Pending work = self.new_work(None)
        work.entry = note(self, BARRIER, NOBODY, 0, NOBODY, NOBODY, NOBODY, True)
        if not self.is_alone:
            with nogil:
                code = mpi.ibarrier(self.comm, &work.request)
        return self.has_begun("barrier", work, code)

    def iall_reduce(self, array, op):
        """Begin an all_reduce and return its Work, or return None."""
        if self.is_for_gpu(array):
            return self.gpu.all_reduce_as(array, op, ASYNC)
        cdef Array* x = plain(array, self.largest_async)
        cdef int code = 0, place = self.place_of(op)
        if x == NULL or not self.is_reducible(x, place):
            return None
        cdef int number = PyArray_TYPE(x)
        cdef Pending work = self.new_work(array)
        work.entry = note(self, ALL_REDUCE, number, PyArray_NBYTES(x), place, NOBODY, NOBODY, True)
        if not self.is_alone:
            with nogil:
                code = mpi.iallreduce(mpi.in_place, PyArray_DATA(x), count_of(x), mpi.reduced[place][number],
                                      mpi.ops[place][number], self.comm, &work.request)
        return self.has_begun("all_reduce", work, code)

    def ireduce(self, array, root, op):
        """Begin a reduce of a GPU array and return its Work, or return None; as all below."""
        return self.gpu.reduce_as(array, root, op, ASYNC) if self.is_for_gpu(array) else None

    def iall_gather_single(self, output, array):
        return self.gpu.all_gather_single_as(output, array, ASYNC) if self.is_for_gpu(output) else None

    def ireduce_scatter_single(self, output, array, op):
        return self.gpu.reduce_scatter_single_as(output, array, op, ASYNC) if self.is_for_gpu(output) else None

    def isendrecv(self, array, dst, output, src, tag, recv_tag):
        return self.gpu.sendrecv_as(array, dst, output, src, tag, recv_tag, ASYNC) if self.is_for_gpu(array) else None

    def iall_to_all_single(self, output, array):
        return self.gpu.all_to_all_single_as(output, array, ASYNC) if self.is_for_gpu(output) else None

    def iall_reduce_coalesced(self, arrays, op):
        return self.gpu.coalesced_as(COALESCED, arrays, arrays, op, 0, ASYNC) if self.are_for_gpu(arrays) else None

    def ibroadcast_coalesced(self, arrays, root):
        return self.gpu.coalesced_as(BROADCAST_COALESCED, arrays, arrays, None, root, ASYNC) if self.are_for_gpu(arrays) else None

    def iall_gather_single_coalesced(self, outputs, arrays):
        return self.gpu.coalesced_as(ALL_GATHER_COALESCED, outputs, arrays, None, 0, ASYNC) if self.are_for_gpu(arrays) else None

    def ireduce_scatter_single_coalesced(self, outputs, arrays, op):
        return self.gpu.coalesced_as(REDUCE_SCATTER_COALESCED, outputs, arrays, op, 0, ASYNC) if self.are_for_gpu(arrays) else None

    cdef Pending has_begun(self, str name, Pending work, int code):
        """Count a collective that has begun, and return its Work, already complete in a group of one rank."""
        if code:
            raise self.failed(name, code)
        self.count += 1
        work.name, work.number = name, self.count + self.passed_collectives
        if self.is_alone:
            work.succeeds()
            work.request_ends(0)
        else:
            self.follow(work)
        return work

    cdef Pending new_work(self, object array):
        cdef Pending work = <Pending>hc_new(work_class, NO_ARGUMENTS)
        work.array = work.alive = array
        work.expected = -1
        work.path = self
        work.timeout = self.timeout
        return work

    cdef int follow(self, Pending work) except -1:
        """Keep a Work, and thereby its array, while it is in flight."""
        if work.array is not None:
            self.unasked_bytes += PyArray_NBYTES(<Array*>work.array)
        cdef Py_ssize_t size = PyDict_Size(self.in_flight)
        self.unasked += 1
        if self.unasked_bytes >= REAP_BYTES or size >= REAP_ABOVE and (
            self.unasked >= max(REAP_EVERY, size // 4) or self.oldest().ob_refcnt == 1
        ):
            self.unasked = self.unasked_bytes = 0
            try:
                if self.has_dropped():
                    while self.forgets_oldest():
                        pass
                    self.dispatcher.reap()
            finally:  # a callback or a signal handler may raise
                self.in_flight[work] = None
        else:
            self.in_flight[work] = None
        return 0

    cdef bint has_dropped(self) noexcept:
        """Whether the program has dropped a Work in flight: only the dispatcher has it. It will wait for all others."""
        cdef PyObject* found
        cdef Py_ssize_t place = 0
        while PyDict_Next(self.in_flight, &place, &found, NULL):
            if found.ob_refcnt == 1:
                return True
        return False

    cdef PyObject* oldest(self) noexcept:
        """Return the oldest Work in flight; there must be one."""
        cdef PyObject* found
        cdef Py_ssize_t place = 0
        PyDict_Next(self.in_flight, &place, &found, NULL)
        return found

    cdef bint forgets_oldest(self) except -1:
        """Drop the oldest Work in flight if it has succeeded; the dispatcher polls all others."""
        if not self.in_flight or not isinstance(<object>self.oldest(), Pending):
            return False
        cdef Pending work = <Pending><object>self.oldest()
        return work.is_ordinary() and work.has_come() and work.ends()


def compiled_member(dict names, type kind, otherwise):
    """Return `otherwise`, the function that returns the group to call, with a shortcut for groups of exactly `kind` and
    for None, the world (`_world` in `names`).
    """
    def member(group):
        if group is None:
            group = names["_world"]
        return group if type(group) is kind else otherwise(group)
    return member
