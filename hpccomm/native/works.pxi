# Works: waiting for asynchronous operations.

cdef class Pending:
    """The first base class of the fast path's Works: it does the ordinary case of core/work.py in one step.

    It leaves all other cases to Work, which uses the attributes declared here and calls `poll` and `block`.
    """

    cdef Path path
    cdef Handle request
    cdef char[STATUS_BYTES] message  # MPI's status
    cdef Py_ssize_t expected  # bytes of a message to receive; -1: there is none
    cdef bint is_done  # the request is complete
    cdef int code  # MPI's, when the request is complete
    cdef object array, name, peer, tag, known_info
    cdef long long number, entry  # its own, and that in the ring
    cdef readonly long long took  # nanoseconds if operations are recorded, otherwise -1
    cdef readonly unsigned long waiting_thread  # the thread in `wait`, for the watchdog; 0: none
    cdef public object alive, source, operation, error, timeout
    cdef public object _status, _finish, _callbacks, _future
    cdef public bint _busy, _notified, was_asked, error_was_seen

    def __cinit__(self):
        self._status = IN_FLIGHT

    @property
    def info(self):
        """The WorkInfo, made when it is first read."""
        if self.known_info is None:
            self.known_info = new_info((self.path.dispatcher, self.name, self.number, self.array, self.peer,
                                            self.timeout, self.tag))
        return self.known_info

    @info.setter
    def info(self, info):
        self.known_info, self.timeout = info, info.timeout

    cdef inline bint is_ordinary(self) noexcept:
        """Whether only the dispatcher must be notified of its end."""
        return (
            self.operation is None and self._finish is None and self._callbacks is None and self.error is None
            and not self._busy and not self._notified
        )

    cdef bint ends(self) except -1:
        """Note the end and return True, if the operation has succeeded and only the dispatcher must be notified."""
        if self.code or not self.is_ordinary() or self._status is not IN_FLIGHT:
            return False
        if self.expected >= 0:
            if received(self.message) != self.expected:
                return False
            self.source = source_of(self.message)
        self.path.in_flight.pop(self, None)
        self.succeeds()
        return True

    cdef void succeeds(self) noexcept:
        """Note that the operation has succeeded, and that nobody else must be notified."""
        self._status, self.alive, self._notified = COMPLETED, None, True

    def wait(self, timeout=None):
        """See Work.wait."""
        if timeout is None and self._notified and self._status is COMPLETED:
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
        if self._notified:
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
                code = wait_for(&self.request, self.message)
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
        """Raise the operation's error; note the message's sender."""
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
        """See Work.cancel; only receives can be cancelled."""
        cdef int code, is_cancelled = 0
        if self.expected < 0:
            work_cancel(self)
        if not self.is_done:
            with nogil:
                code = mpi.cancel(&self.request)
                if code == 0:
                    code = wait_for(&self.request, self.message)
            self.code, self.is_done = code, True
        if self.code == 0:  # also if a signal handler has interrupted the first call
            self.code = mpi.test_cancelled(self.message, &is_cancelled)
        self.took = note_end(self.entry, self.code != 0 or is_cancelled != 0)
        if self.code:
            raise exception_of(self.code)
        return is_cancelled != 0


cdef struct Waited:
    PyObject* work
    Handle* request
    char* message
    unsigned long* thread
    bint is_done
    int code


def wait_all(list works):
    """Wait for Works of the fast path, skipping None; return False if Work.wait has to be called for each."""
    cdef Py_ssize_t first
    for first in range(0, PyList_GET_SIZE(works), WAITED):
        if not wait_some(works, first, min(first + WAITED, PyList_GET_SIZE(works))):
            return False
    return True


cdef bint wait_some(list works, Py_ssize_t first, Py_ssize_t last) except -1:
    """Do the same for WAITED Works at most."""
    cdef Waited[WAITED] waited
    cdef Py_ssize_t i, n = 0
    cdef bint is_ordinary = True
    cdef unsigned long thread = PyThread_get_thread_ident()
    cdef Pending work
    for i in range(first, last):
        if not is_ordinary:
            break
        each = works[i]
        if each is None or isinstance(each, Pending) and (<Pending>each)._notified and (<Pending>each)._status is COMPLETED:
            continue
        is_ordinary = (isinstance(each, Pending) and (<Pending>each).timeout is None and (<Pending>each).is_ordinary())
        if is_ordinary:  # and not busy, so not twice in the list
            work = <Pending>each
            work._busy = True
            waited[n] = Waited(<PyObject*>work, &work.request, &work.message[0], &work.waiting_thread, work.is_done, 0)
            n += 1
    if is_ordinary:
        with nogil:
            for i in range(n):
                if not waited[i].is_done:
                    waited[i].thread[0] = thread
                    waited[i].code = wait_for(waited[i].request, waited[i].message)
                    waited[i].thread[0] = 0
    for i in range(n):
        work = <Pending>waited[i].work
        if is_ordinary and not waited[i].is_done:
            work.request_ends(waited[i].code)
        work._busy = False
    for i in range(n):
        is_ordinary = is_ordinary and (<Pending>waited[i].work).ends()
    return is_ordinary


cdef object IN_FLIGHT, COMPLETED, new_info, work_wait, work_has_ended, work_cancel
cdef Py_ssize_t REAP_ABOVE, REAP_BYTES


def set_up_works(in_flight, completed, info, work, Py_ssize_t reap_above, Py_ssize_t reap_bytes):
    """Set the states of a Work, the function that makes a WorkInfo, and the class Work."""
    global IN_FLIGHT, COMPLETED, new_info, work_wait, work_has_ended, work_cancel, REAP_ABOVE, REAP_BYTES
    IN_FLIGHT, COMPLETED, new_info, REAP_ABOVE, REAP_BYTES = in_flight, completed, info, reap_above, reap_bytes
    work_wait, work_has_ended, work_cancel = work.wait, work.has_ended, work.cancel
