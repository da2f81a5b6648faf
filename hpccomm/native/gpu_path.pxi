# The fast path of GPU arrays: operations that are one call of NCCL on the arrays themselves, or one group of calls.

cdef class GPUPending  # in gpu_works.pxi


cdef class Issuing:
    """The state of one communicator that the fast path and the checked path share; see nccl/connection.py."""

    cdef public intptr_t last_own, last
    cdef public bint has_failed
    cdef readonly Lock of_all, calling  # held during each call of any communicator, and of this one
    cdef public uintptr_t newest  # the event after the newest operation on the communicator's own stream; 0: none

    def __init__(self, Lock of_all):
        self.last_own = self.last = NO_STREAM
        self.of_all, self.calling = of_all, Lock()


cdef struct Call:  # of a function of NCCL
    int what
    Seen* sent
    Seen* received
    size_t count
    int datatype, op, peer


cdef int[4] CALLS_OF = [ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER]  # of the coalesced ones, from COALESCED on


cdef class GPUPath:
    """The fast path of one group's communicator; its subclass in nccl/fast_path.py has the parts that may be slow."""

    cdef Functions to
    cdef P comm, context, order
    cdef int device, rank, size
    cdef intptr_t own  # the communicator's stream
    cdef Issuing issuing
    cdef str device_name
    cdef public bint is_open, is_in_use  # connected; and the dispatcher's choice now
    cdef Path host  # counts the operations; None: the dispatcher does
    cdef readonly object dispatcher
    cdef dict in_flight
    cdef readonly dict kept
    cdef readonly list events
    cdef type work_class
    cdef P[2 * UNITS] kernels
    cdef public list memory  # temporary, of a current stream and of the communicator's
    cdef uint64_t[2] memory_of
    cdef Py_ssize_t[2] memory_bytes
    cdef readonly int holding  # Works in flight for which arrays are kept
    cdef GPUPending spare  # a `_rest` that has ended, for the next one
    cdef public long long period  # nanoseconds between two calls of `mark`
    cdef long long marked  # when it was last called
    cdef object timeout

    def connect(self, dict functions, uintptr_t comm, intptr_t own, uintptr_t order, int rank, int size, int device,
                str device_name, Issuing issuing, list events, dict kept, type work_class, list kernels):
        """Do operations from now on. `functions`: addresses by the names in FUNCTIONS; `own`: the communicator's stream;
        `order`: an event; `events`: unused ones; `kept`: arrays by the event until which they are kept; `kernels`:
        those of copies.cu for few axes, by unit: for one copy, then for MOST_COPIES.
        """
        for i, name in enumerate(FUNCTIONS):
            (<P*>&self.to)[<int>i] = <P><uintptr_t>functions.get(name, 0)
        self.comm, self.own, self.order, self.rank, self.size = <P>comm, own, <P>order, rank, size
        self.device, self.device_name, self.issuing = device, device_name, issuing
        self.events, self.kept, self.work_class, self.memory = events, kept, work_class, [None, None]
        for i in range(2 * UNITS):
            self.kernels[<int>i] = <P><uintptr_t>kernels[i]
        self.period = MARK_PERIOD
        self.is_open = self.to.context(&self.context) == 0

    def attach(self, dispatcher):
        """Count operations and keep Works in flight in the group's dispatcher from now on."""
        self.dispatcher, self.in_flight, self.timeout = dispatcher, dispatcher.in_flight, dispatcher.timeout

    # -- operations, as in core/backend.py's FastPath: a fast path of host arrays calls those in C, which `how` selects

    def broadcast(self, array, root): return self.broadcast_as(array, root, BLOCKING)
    def ibroadcast(self, array, root): return self.broadcast_as(array, root, ASYNC)
    def all_reduce(self, array, op): return self.all_reduce_as(array, op, BLOCKING)
    def iall_reduce(self, array, op): return self.all_reduce_as(array, op, ASYNC)
    def reduce(self, array, root, op): return self.reduce_as(array, root, op, BLOCKING)
    def ireduce(self, array, root, op): return self.reduce_as(array, root, op, ASYNC)
    def all_gather_single(self, output, array): return self.all_gather_single_as(output, array, BLOCKING)
    def iall_gather_single(self, output, array): return self.all_gather_single_as(output, array, ASYNC)
    def reduce_scatter_single(self, output, array, op): return self.reduce_scatter_single_as(output, array, op, BLOCKING)
    def ireduce_scatter_single(self, output, array, op): return self.reduce_scatter_single_as(output, array, op, ASYNC)
    def all_to_all_single(self, output, array): return self.all_to_all_single_as(output, array, BLOCKING)
    def iall_to_all_single(self, output, array): return self.all_to_all_single_as(output, array, ASYNC)
    def all_reduce_coalesced(self, arrays, op): return self.coalesced_as(COALESCED, arrays, arrays, op, 0, BLOCKING)
    def iall_reduce_coalesced(self, arrays, op): return self.coalesced_as(COALESCED, arrays, arrays, op, 0, ASYNC)
    def broadcast_coalesced(self, arrays, root): return self.coalesced_as(BROADCAST_COALESCED, arrays, arrays, None, root, BLOCKING)
    def ibroadcast_coalesced(self, arrays, root): return self.coalesced_as(BROADCAST_COALESCED, arrays, arrays, None, root, ASYNC)
    def all_gather_single_coalesced(self, outputs, arrays): return self.coalesced_as(ALL_GATHER_COALESCED, outputs, arrays, None, 0, BLOCKING)
    def iall_gather_single_coalesced(self, outputs, arrays): return self.coalesced_as(ALL_GATHER_COALESCED, outputs, arrays, None, 0, ASYNC)
    def reduce_scatter_single_coalesced(self, outputs, arrays, op): return self.coalesced_as(REDUCE_SCATTER_COALESCED, outputs, arrays, op, 0, BLOCKING)
    def ireduce_scatter_single_coalesced(self, outputs, arrays, op): return self.coalesced_as(REDUCE_SCATTER_COALESCED, outputs, arrays, op, 0, ASYNC)
    def send(self, array, dst, tag): return self.send_as(array, dst, tag, BLOCKING)
    def isend(self, array, dst, tag): return self.send_as(array, dst, tag, ASYNC)
    def recv(self, array, src, tag): return self.recv_as(array, src, tag, BLOCKING)
    def irecv(self, array, src, tag): return self.recv_as(array, src, tag, ASYNC)
    def sendrecv(self, array, dst, output, src, tag, recv_tag): return self.sendrecv_as(array, dst, output, src, tag, recv_tag, BLOCKING)
    def isendrecv(self, array, dst, output, src, tag, recv_tag): return self.sendrecv_as(array, dst, output, src, tag, recv_tag, ASYNC)

    def again(self, str operation, tuple arguments, int how):
        """Begin a persistent operation as START or RUN says, or return None."""
        if not self.is_in_use:
            return None
        if operation == "all_reduce":
            return self.all_reduce_as(arguments[0], arguments[1], how)
        if operation == "broadcast":
            return self.broadcast_as(arguments[0], arguments[1], how)
        if operation == "all_gather_single":
            return self.all_gather_single_as(arguments[0], arguments[1], how)
        if operation == "reduce_scatter_single":
            return self.reduce_scatter_single_as(arguments[0], arguments[1], arguments[2], how)
        if operation == "all_to_all_single":
            return self.all_to_all_single_as(arguments[0], arguments[1], how) if arguments[2] is arguments[3] is None else None
        return self.coalesced_as(COALESCED, arguments[0], arguments[0], arguments[1], 0, how)

    cdef object broadcast_as(self, object array, object root, int how):
        """Do a broadcast, or return None."""
        cdef Seen x
        cdef Packed packed
        packed.n = 0
        if not is_rank(root, self.size) or not self.takes(array, &x, self.role_of(root), &packed):
            return None
        cdef Call call = Call(BROADCAST, &x, &x, x.count * x.type.width, x.type.datatype, 0, root)
        return self.do(&call, 1, how, BROADCAST, &x, NOBODY, root, array, array, &packed)

    cdef object all_reduce_as(self, object array, object op, int how):
        """Do an all_reduce, or return None."""
        cdef Seen x
        cdef Packed packed
        cdef int place = gpu_op(op)
        packed.n = 0
        if place < 0 or not self.takes(array, &x, IS_SENT | IS_RECEIVED, &packed) or x.type.ops[place] < 0:
            return None
        cdef Call call = Call(ALL_REDUCE, &x, &x, x.count * x.type.width, x.type.datatype, x.type.ops[place], 0)
        return self.do(&call, 1, how, ALL_REDUCE, &x, place, NOBODY, array, array, &packed)

    cdef object reduce_as(self, object array, object root, object op, int how):
        """Do a reduce, or return None."""
        cdef Seen x
        cdef Packed packed
        cdef int place = gpu_op(op)
        packed.n = 0
        if place < 0 or not is_rank(root, self.size):
            return None
        if not self.takes(array, &x, IS_SENT | IS_RECEIVED if root == self.rank else IS_SENT, &packed) or x.type.ops[place] < 0:
            return None
        cdef Call call = Call(REDUCE, &x, &x, x.count * x.type.width, x.type.datatype, x.type.ops[place], root)
        return self.do(&call, 1, how, REDUCE, &x, place, root, array, array, &packed)

    cdef object all_gather_single_as(self, object output, object array, int how):
        """Do an all_gather_single, or return None."""
        cdef Seen x, y
        cdef Packed packed
        if not self.takes_pair(output, array, &y, &x, &packed) or y.count != x.count * self.size:
            return None
        cdef Call call = Call(ALL_GATHER, &x, &y, x.count * x.type.width, x.type.datatype, 0, 0)
        return self.do(&call, 1, how, ALL_GATHER, &y, NOBODY, NOBODY, output, (output, array), &packed)

    cdef object reduce_scatter_single_as(self, object output, object array, object op, int how):
        """Do a reduce_scatter_single, or return None."""
        cdef Seen x, y
        cdef Packed packed
        cdef int place = gpu_op(op)
        if place < 0 or not self.takes_pair(output, array, &y, &x, &packed):
            return None
        if x.type.ops[place] < 0 or x.count != y.count * self.size:
            return None
        cdef Call call = Call(REDUCE_SCATTER, &x, &y, y.count * x.type.width, x.type.datatype, x.type.ops[place], 0)
        return self.do(&call, 1, how, REDUCE_SCATTER, &y, place, NOBODY, output, (output, array), &packed)

    cdef object all_to_all_single_as(self, object output, object array, int how):
        """Do an all_to_all_single of equal parts, or return None."""
        cdef Seen x, y
        cdef Packed packed
        if self.to.all_to_all == NULL or not self.takes_pair(output, array, &y, &x, &packed) or y.count != x.count:
            return None
        if not (self.has_equal_parts(output, &y) and self.has_equal_parts(array, &x)):
            return None
        cdef Call call = Call(ALL_TO_ALL_SINGLE, &x, &y, x.count * x.type.width // self.size, x.type.datatype, 0, 0)
        return self.do(&call, 1, how, ALL_TO_ALL_SINGLE, &y, NOBODY, NOBODY, output, (output, array), &packed)

    cdef inline bint has_equal_parts(self, object array, Seen* x) except -1:
        if x.rows == NOBODY:
            shape = <tuple>GET(array_shape, array)
            x.rows = <Py_ssize_t>shape[0] if len(shape) > 0 else 0
        return x.rows > 0 and x.rows % self.size == 0

    cdef object send_as(self, object array, object dst, object tag, int how):
        """Send a message, or return None."""
        cdef Seen x
        cdef Packed packed
        packed.n = 0
        if not self.is_message(dst, tag) or not self.takes(array, &x, IS_SENT, &packed):
            return None
        cdef Call call = Call(SEND, &x, NULL, x.count * x.type.width, x.type.datatype, 0, dst)
        return self.do(&call, 1, how, SEND, &x, NOBODY, dst, array, array, &packed)

    cdef object recv_as(self, object array, object src, object tag, int how):
        """Receive a message, or return None."""
        cdef Seen x
        cdef Packed packed
        packed.n = 0
        if not self.is_message(src, tag) or not self.takes(array, &x, IS_RECEIVED, &packed):
            return None
        cdef Call call = Call(RECV, NULL, &x, x.count * x.type.width, x.type.datatype, 0, src)
        return self.do(&call, 1, how, RECV, &x, NOBODY, src, array, array, &packed, src)

    cdef object sendrecv_as(self, object array, object dst, object output, object src, object tag, object recv_tag, int how):
        """Send a message and receive another, or return None."""
        cdef Seen x, y
        cdef Call[2] both
        cdef Packed packed
        packed.n = 0
        if not self.takes(array, &x, IS_SENT, &packed) or not self.takes(output, &y, IS_RECEIVED, &packed):
            return None
        if not (are_seen_apart(&x, &y) and is_rank(dst, self.size) and is_rank(src, self.size) and recv_tag is None and self.is_no_tag(tag)):
            return None
        both[0] = Call(SEND, &x, NULL, x.count * x.type.width, x.type.datatype, 0, dst)
        both[1] = Call(RECV, NULL, &y, y.count * y.type.width, y.type.datatype, 0, src)
        return self.do(both, 2, how, SENDRECV, &y, NOBODY, dst, output, (output, array), &packed, src)

    cdef object coalesced_as(self, int what, object outputs, object arrays, object op, object root, int how):
        """Do an operation on each pair of arrays as one group of calls, or return None. In place both lists are one."""
        cdef int each = CALLS_OF[what - COALESCED]
        cdef bint reduces = each == ALL_REDUCE or each == REDUCE_SCATTER, is_in_place = each == ALL_REDUCE or each == BROADCAST
        cdef int place = gpu_op(op) if reduces else NOBODY
        cdef Call[MOST_CALLS] calls
        cdef Seen[MOST_CALLS] given, taken
        cdef Packed packed
        cdef Py_ssize_t nbytes = 0
        cdef int i, j, n, role
        cdef Seen *x
        cdef Seen *y
        packed.n = 0
        if type(outputs) is not list or type(arrays) is not list or not is_rank(root, self.size) or reduces and place < 0:
            return None
        if not 0 < PyList_GET_SIZE(arrays) <= MOST_CALLS or PyList_GET_SIZE(outputs) != PyList_GET_SIZE(arrays):
            return None
        n, outs, ins = <int>PyList_GET_SIZE(arrays), list(outputs), None if is_in_place else list(arrays)
        role = self.role_of(root) if each == BROADCAST else IS_SENT | IS_RECEIVED if is_in_place else IS_RECEIVED
        for i in range(n):
            x = y = &taken[i]
            if not self.takes((<list>outs)[i], y, role, &packed):
                return None
            if not is_in_place:
                x = &given[i]
                if not self.takes((<list>ins)[i], x, IS_SENT, &packed) or x.type != y.type:
                    return None
                if (x.count * self.size != y.count) if each == ALL_GATHER else (y.count * self.size != x.count):
                    return None
            if reduces and x.type.ops[place] < 0:
                return None
            calls[i] = Call(each, x, y, min(x.count, y.count) * x.type.width, x.type.datatype,
                            x.type.ops[place] if reduces else 0, root)
            nbytes += y.nbytes
        for i in range(n):
            for j in range(n):
                if not is_in_place and not are_seen_apart(&given[i], &taken[j]):
                    return None
                if j < i and not are_seen_apart(&taken[i], &taken[j]):
                    return None
        y.nbytes = nbytes
        return self.do(calls, n, how, what, y, place, root if what == BROADCAST_COALESCED else NOBODY, outputs,
                       (outs, ins), &packed)

    def batch(self, messages, kind, irecv):
        """Begin the messages of a list (`kind`: P2POp) as one group of calls, receives first; return Works, or None."""
        cdef Call[MOST_CALLS] calls
        cdef Seen[MOST_CALLS] seen
        cdef int[MOST_CALLS] places
        cdef long long[MOST_CALLS] numbers, entries
        cdef P[MOST_CALLS] ends
        cdef P current, own = <P>self.own
        cdef Message each
        cdef int i, n = 0, code = 0
        if type(messages) is not list or not 1 < PyList_GET_SIZE(messages) <= MOST_CALLS:
            return None
        messages = list(messages)  # as the lists below: other threads run while a tensor is looked at
        cdef list works = list(messages)
        for receives in (True, False):
            for i in range(<int>PyList_GET_SIZE(messages)):
                if type((<list>messages)[i]) is not kind:
                    return None
                each = <Message>(<list>messages)[i]
                if (each.op is irecv) is not receives:
                    continue
                if each.group is not None or each.group_peer is not None or not self.is_no_tag(each.tag):
                    return None
                works[i] = each.array
                if not is_rank(each.peer, self.size) or not self.takes(works[i], &seen[n], 0, NULL):
                    return None
                calls[n] = Call(RECV if receives else SEND, &seen[n], &seen[n], seen[n].count * seen[n].type.width,
                                seen[n].type.datatype, 0, each.peer)
                places[n] = i
                n += 1
        current = <P>self.to.current_stream(self.device)
        for i in range(n):
            ends[i], entries[i] = <P><uintptr_t>(self.events.pop() if self.events else self.new_event()), 0
            if ends[i] == NULL:
                code = LEFT
        with nogil:
            code = code or self.prepare(own, current, True)
            code = code or self.issue(calls, n, own)
        if code == LEFT:
            self.events.extend([<uintptr_t>end for end in ends[:n] if end != NULL])
            return None
        try:
            for i in range(n):
                numbers[i] = self.counted(calls[i].what, &seen[i], NOBODY, calls[i].peer, True, &entries[i])
            if code == NCCL_IN_PROGRESS:
                self.finish_call(code)
                code = 0
            with nogil:
                for i in range(n):
                    code = code or of_cuda(self.to.record(ends[i], own))
            self.check(code)
            self.issuing.newest = <uintptr_t>ends[n - 1]
        except Exception as error:
            for i in range(n):
                note_end(entries[i], True)
                self.events.append(<uintptr_t>ends[i])
            raise self.failed("batch_isend_irecv", numbers[0], True, error)
        finally:
            self.leave()
        for i in range(n):
            array = works[places[i]]
            works[places[i]] = self.followed(ends[i], current, calls[i].what, &seen[i], calls[i].peer, numbers[i],
                                             entries[i], array, array, calls[i].peer if calls[i].what == RECV else None)
        return works

    cdef inline bint takes(self, object array, Seen* x, int role, Packed* packed) except -1:
        """Take an array; one with gaps is added to `packed`, or refused if that is NULL."""
        if not self.is_open or not sees(array, self.device_name, &self.to, x) or x.device != self.device:
            return False
        return x.is_plain or packed != NULL and lays_out(array, x, role, packed)

    cdef inline bint takes_pair(self, object output, object array, Seen* y, Seen* x, Packed* packed) except -1:
        """Take two arrays of one dtype that share no memory."""
        packed.n = 0
        if not self.takes(array, x, IS_SENT, packed) or not self.takes(output, y, IS_RECEIVED, packed):
            return False
        return x.type == y.type and are_seen_apart(x, y)

    cdef inline int role_of(self, int root) noexcept:
        """Return the role of an array that is broadcast."""
        return IS_SENT if root == self.rank else IS_RECEIVED

    cdef inline bint is_no_tag(self, object tag) noexcept:
        return type(tag) is int and tag == 0  # NCCL's messages have none

    cdef inline bint is_message(self, object peer, object tag) noexcept:
        return is_rank(peer, self.size) and peer != self.rank and self.is_no_tag(tag)

    # -- the steps of all operations

    cdef object do(self, Call* calls, int n, int how, int what, Seen* x, int place, int peer, object result,
                   object arrays, Packed* packed, object source=None):
        """Do an operation, count it, and return its Work, or `source`, or True; or return None. `arrays`: those that an
        asynchronous operation keeps.
        """
        cdef P current = <P>self.to.current_stream(self.device), event = NULL
        cdef bint async_op = how == ASYNC or how == START
        cdef P stream = <P>self.own if async_op else current
        cdef long long number, entry = 0
        cdef int code, is_captured = 0
        cdef bint has_gaps = packed.n > 0
        cdef object memory = None
        if how >= START:
            what = start_of(what)
        if has_gaps:
            if self.to.capturing(current, &is_captured) != 0 or is_captured:
                return None
            memory = self.temporary(stream, packed.nbytes)
            if memory is None:
                return None  # and the checked path raises the error
            move_in(packed, <char*>PyLong_AsVoidPtr(GET(memory_address, GET(array_data, memory))))
        if async_op:
            event = <P><uintptr_t>(self.events.pop() if self.events else self.new_event())
            if event == NULL:
                return None
        with nogil:
            code = self.prepare(stream, current, async_op)
            code = code or has_gaps and of_cuda(launch(&self.to, self.kernels, packed, IS_SENT, stream))
            code = code or self.issue(calls, n, stream)
        if code == LEFT:
            if async_op:
                self.events.append(<uintptr_t>event)
            return None
        try:
            number = self.counted(what, x, place, peer, async_op, &entry)
            if code == NCCL_IN_PROGRESS:
                self.finish_call(code)
                code = 0
            if code == 0 and (async_op or has_gaps):
                with nogil:
                    if has_gaps:
                        code = of_cuda(launch(&self.to, self.kernels, packed, IS_RECEIVED, stream))
                    if code == 0 and async_op:
                        code = of_cuda(self.to.record(event, stream))
                        self.issuing.newest = <uintptr_t>event
            self.check(code)
        except Exception as error:
            note_end(entry, True)
            if async_op:
                self.events.append(<uintptr_t>event)
            raise self.failed(NAMES[what], number, async_op, error)
        finally:
            self.leave()
        if async_op:
            if has_gaps:
                arrays = arrays, memory
            return self.followed(event, current, what, x, peer, number, entry, result, arrays, source)
        note_end(entry, False)
        if now() - self.marked >= self.period:
            self.marked = now()
            self.mark(NAMES[what], result, peer if what >= SEND else None)
        return True if source is None else source

    cdef int check(self, int code) except -1:
        """Raise the error of a code of CUDA or NCCL."""
        if code:
            raise self.cuda_error(code - CUDA_ERROR) if code >= CUDA_ERROR else self.nccl_error(code)
        return 0

    cdef object temporary(self, P stream, Py_ssize_t nbytes):
        """Return temporary memory, the same for all operations of a stream: they come one after the other. None: none left."""
        cdef uint64_t name = 0
        cdef int of_own = <intptr_t>stream == self.own
        if stream != NULL and self.to.stream_id(stream, &name) != 0:  # a new stream may have an old one's handle
            name = 0
        if nbytes > MOST_KEPT:
            return self.allocate(nbytes, <intptr_t>stream)
        if self.memory[of_own] is None or self.memory_of[of_own] != name or self.memory_bytes[of_own] < nbytes:
            self.memory[of_own] = self.allocate(nbytes, <intptr_t>stream)
            self.memory_of[of_own], self.memory_bytes[of_own] = name, nbytes
        return self.memory[of_own]

    cdef int prepare(self, P stream, P current, bint async_op) noexcept nogil:
        """Take the locks, and make `stream` wait for earlier work; return LEFT, without the locks, if the checked path
        has to do it: on another GPU, in a capture, after a failure, or while another thread calls NCCL.
        """
        cdef P context = NULL
        cdef int is_captured = 0, code = 0
        if self.to.context(&context) != 0 or context != self.context:
            return LEFT
        if async_op and (self.to.capturing(current, &is_captured) != 0 or is_captured):
            return LEFT
        if pthread_mutex_trylock(&self.issuing.of_all.mutex) != 0:
            return LEFT
        if pthread_mutex_trylock(&self.issuing.calling.mutex) != 0:
            pthread_mutex_unlock(&self.issuing.of_all.mutex)
            return LEFT
        if self.issuing.has_failed:
            self.leave()
            return LEFT
        if stream != current:
            code = self.follow(stream, current)
        cdef intptr_t before = self.issuing.last_own, own = <intptr_t>stream
        if before != NO_STREAM and before != <intptr_t>current and before != own and self.issuing.last != own:
            if own != DEFAULT_STREAM and (self.to.capturing(stream, &is_captured) != 0 or is_captured):
                return code  # a graph can't wait for work outside of it; NCCL keeps the order
            if before == self.own and self.issuing.newest != 0:
                code = code or of_cuda(self.to.wait(stream, <P>self.issuing.newest, 0))
            else:
                code = code or self.follow(stream, <P>before)
        if own == self.own or own == DEFAULT_STREAM:
            self.issuing.last_own = own
        self.issuing.last = own
        return code

    cdef int follow(self, P stream, P earlier) noexcept nogil:
        """Make a stream wait for the work that is on another stream now."""
        cdef int code = self.to.record(self.order, earlier)
        return of_cuda(code or self.to.wait(stream, self.order, 0))

    cdef int issue(self, Call* calls, int n, P stream) noexcept nogil:
        """Make the calls of NCCL; return its result, NCCL_IN_PROGRESS only if that lasts."""
        cdef int i, state, code = 0 if n == 1 else self.to.group_start()
        cdef bint is_group = n > 1 and code == 0
        for i in range(n):
            if code == 0:
                code = self.call(&calls[i], stream)
                if is_group and code == NCCL_IN_PROGRESS:
                    code = 0
        if is_group:
            i = self.to.group_end()
            code = code or i
        for i in range(LOOKS_AT_STATE):
            if code != NCCL_IN_PROGRESS or self.to.state(self.comm, &state) != 0:
                break
            code = state
        return code

    cdef inline int call(self, Call* c, P stream) noexcept nogil:
        if c.what == ALL_REDUCE:
            return self.to.all_reduce(c.sent.data, c.received.data, c.count, c.datatype, c.op, self.comm, stream)
        if c.what == BROADCAST:
            return self.to.broadcast(c.sent.data, c.received.data, c.count, c.datatype, c.peer, self.comm, stream)
        if c.what == REDUCE:
            return self.to.reduce(c.sent.data, c.received.data, c.count, c.datatype, c.op, c.peer, self.comm, stream)
        if c.what == ALL_GATHER:
            return self.to.all_gather(c.sent.data, c.received.data, c.count, c.datatype, self.comm, stream)
        if c.what == ALL_TO_ALL_SINGLE:
            return self.to.all_to_all(c.sent.data, c.received.data, c.count, c.datatype, self.comm, stream)
        if c.what == REDUCE_SCATTER:
            return self.to.reduce_scatter(c.sent.data, c.received.data, c.count, c.datatype, c.op, self.comm, stream)
        if c.what == SEND:
            return self.to.send(c.sent.data, c.count, c.datatype, c.peer, self.comm, stream)
        return self.to.recv(c.received.data, c.count, c.datatype, c.peer, self.comm, stream)

    cdef inline void leave(self) noexcept nogil:
        pthread_mutex_unlock(&self.issuing.calling.mutex)
        pthread_mutex_unlock(&self.issuing.of_all.mutex)

    cdef long long counted(self, int what, Seen* x, int place, int peer, bint is_async, long long* entry) except -1:
        """Count an operation, note it in the ring, and return its number."""
        cdef object dispatcher
        cdef Path path = self.host
        cdef long long number
        if path is None:  # the group has no compiled fast path for host arrays yet
            dispatcher = self.dispatcher
            if what >= SEND:
                number = dispatcher.messages = dispatcher.messages + 1
                if what != RECV:
                    dispatcher.last_sent.append(("send", peer, 0))
            else:
                number = dispatcher.collectives = dispatcher.collectives + 1
                dispatcher.recent.append((number, NAMES[what], <object>gpu_dtypes[x.type - &gpu_types[0]], x.nbytes))
            return number
        entry[0] = note(path, what, x.type.number, x.nbytes, NOBODY if place < 0 else gpu_op_notes[place], peer,
                        0 if what >= SEND else NOBODY, is_async)
        if what >= SEND:
            path.messages += 1
            return path.messages + path.passed_messages
        path.count += 1
        return path.count + path.passed_collectives

    # -- Works

    cdef GPUPending followed(self, P event, P current, int what, Seen* x, int peer, long long number, long long entry,
                             object result, object arrays, object source):
        """Return the Work of an operation that has begun, which the group keeps."""
        cdef GPUPending work = <GPUPending>hc_new(self.work_class, NO_ARGUMENTS)
        work.path, work._event, work.called_on = self, <uintptr_t>event, <intptr_t>current
        work.name, work.number, work.entry, work.array, work.source = NAMES[what], number, entry, result, source
        work.dtype, work.count = <object>gpu_dtypes[x.type - &gpu_types[0]], x.nbytes // x.type.itemsize
        work.timeout = self.timeout
        if what >= SEND:
            work.peer, work.tag = peer, 0
        work.holds = work.has_event = True
        self.kept[work._event] = storages(arrays), arrays
        self.reap()
        self.holding += 1
        self.in_flight[work] = None
        return work

    cdef int reap(self) except -1:
        """Drop completed Works, oldest first; look only if some hold arrays, or if there are many."""
        cdef PyObject* found
        cdef Py_ssize_t place
        cdef GPUPending work
        cdef int status
        while self.holding > 0 or PyDict_Size(self.in_flight) >= REAP_ABOVE:
            place = 0
            if not PyDict_Next(self.in_flight, &place, &found, NULL):
                return 0
            if not isinstance(<object>found, GPUPending) or not (<GPUPending><object>found).is_ordinary():
                self.dispatcher.reap()
                return 0
            work = <GPUPending><object>found
            with nogil:
                status = self.to.query(<P>work._event)
            if status != 0:  # not ready; or an error, which a wait raises
                return 0
            if not work.is_ordinary():  # another thread has added a callback meanwhile
                self.dispatcher.reap()
                return 0
            self.in_flight.pop(work, None)
            work.release()
            work._status, work._notified = COMPLETED, True
            if work.called_on == NO_STREAM and hc_is_sole(work):  # no other Work, and no watchdog, looks at it
                self.spare = work
        return 0


cdef inline int start_of(int what) noexcept nogil:
    """Return the number of the persistent form of an operation."""
    if what == ALL_TO_ALL_SINGLE:
        return ALL_TO_ALL_START
    return COALESCED_START if what == COALESCED else what + BROADCAST_START - BROADCAST


cdef inline int of_cuda(int code) noexcept nogil:
    return code and code + CUDA_ERROR
