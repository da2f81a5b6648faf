# Works of GPU arrays: an event marks the end of each.

cdef class GPUPending:
    """The first base class of the fast path's Works on GPU arrays: the ordinary case of cuda/work.py in one step."""

    cdef readonly GPUPath path
    cdef public uintptr_t _event
    cdef public intptr_t called_on  # the current stream at the time of the call; NO_STREAM: the arrays were let go
    cdef public object _rest, source, operation, error, timeout, alive
    cdef public object _status, _finish, _callbacks, _future
    cdef public bint _busy, _notified, was_asked, error_was_seen
    cdef object name, array, peer, tag, known_info, dtype
    cdef Py_ssize_t count
    cdef long long number, entry
    cdef bint holds, has_event  # the group keeps its arrays; the event is its own

    def __cinit__(self):
        self._status = IN_FLIGHT

    @property
    def info(self):
        """The WorkInfo, made when it is first read."""
        if self.known_info is None:
            result = self.array
            if result is None:  # the program owns the arrays alone
                result = described(self.dtype, self.count)
            self.known_info = new_info((self.path.dispatcher, self.name, self.number, result, self.peer, self.timeout,
                                        self.tag))
        return self.known_info

    @info.setter
    def info(self, info):
        self.known_info, self.timeout, self.array = info, info.timeout, None

    cdef inline bint is_ordinary(self) noexcept:
        """Whether it is in flight, and only the dispatcher must be notified of its end."""
        return (
            self._status is IN_FLIGHT and self.operation is None and self._finish is None and self._callbacks is None
            and self.error is None and self._rest is None and self._event != 0 and not self._busy and not self._notified
            and not self.path.issuing.has_failed
        )

    def wait(self, timeout=None):
        """See CudaWork.wait."""
        cdef P current, context = NULL
        cdef GPUPath path = self.path
        cdef int code
        if timeout is not None or not self.is_ordinary() or not path.is_open:
            return gpu_work_wait(self, timeout)
        current = <P>path.to.current_stream(path.device)
        with nogil:
            code = path.to.context(&context) != 0 or context != path.context or path.to.wait(current, <P>self._event, 0)
        if code != 0:
            return gpu_work_wait(self, timeout)  # which sets the GPU, or raises the error
        if not self.is_ordinary():  # another thread has added a callback, or completed it, meanwhile
            return True
        if self._event == path.issuing.newest and path.issuing.last_own == path.own:
            path.issuing.last = <intptr_t>current  # later work on this stream is behind the newest operation
        if <intptr_t>current == self.called_on:
            self.let_go()
        return True

    def _let_go(self):
        """See CudaWork._let_go."""
        self.let_go()

    cdef int let_go(self) except -1:
        cdef GPUPath path = self.path
        if path.in_flight.pop(self, False) is False:  # it is part of another Work
            return 0
        cdef GPUPending rest = path.spare
        if rest is None:
            rest = <GPUPending>hc_new(path.work_class, NO_ARGUMENTS)
        else:
            path.spare, rest.known_info = None, None
            rest._status, rest._notified, rest.was_asked = IN_FLIGHT, False, False
        rest.path, rest._event, rest.name, rest.number, rest.entry = path, self._event, self.name, self.number, self.entry
        rest.dtype, rest.count, rest.peer, rest.tag, rest.timeout = self.dtype, self.count, self.peer, self.tag, self.timeout
        rest.called_on, rest.has_event = NO_STREAM, True
        self.holds_no_more()
        self._event, self.has_event, self._rest = 0, False, rest
        path.in_flight[rest] = None
        return 0

    cdef inline int holds_no_more(self) except -1:
        if self.holds:
            self.holds = False
            self.path.holding -= 1
            self.path.kept.pop(self._event, None)
        return 0

    def _release(self, event):
        """Release the event and the arrays in flight until it; a second call does nothing."""
        self.release()

    cdef inline int release(self) except -1:
        if self.has_event:
            self.has_event = False
            self.path.events.append(self._event)
            self.holds_no_more()
            note_end(self.entry, self.error is not None)
        return 0


cdef object described, gpu_work_wait


def set_up_gpu_works(work, describe):
    """Set the class CudaWork, and the function that describes an array by its dtype and size."""
    global described, gpu_work_wait
    described, gpu_work_wait = describe, work.wait
