# Which way is faster on this node, memory of the node or MPI's own copy, for operations whose bits do not depend on it: a
# group's first calls of each size class try one after the other, and the ranks then agree. It differs from machine to
# machine: memory of the node needs two copies, which are fast between cores with a common cache.

cdef enum:
    SMALLEST_TRIED = 64 << 10  # bytes
    LARGEST_TRIED = 32 << 20  # of a broadcast: memory of the node may be faster far above node_bytes
    TRIED_SIZES = 9  # classes: from each power of two to the next
    TRIALS = 10  # of both ways together: first in memory of the node, for in turns each disturbs the other's caches
    UNDECIDED = 0
    IN_NODE = 1
    BY_MPI = 2

cdef struct Trial:
    int calls, way
    int64_t best[2]  # nanoseconds of the fastest call in memory of the node and by MPI, at last on the slowest rank


cdef class Trials(InNode):
    """A path that tries both ways if the program's tuning says nothing, and if no rank needs another one's core."""

    cdef Trial[3][TRIED_SIZES] trials
    cdef Trial* trial  # of the current operation, if it is timed
    cdef int64_t began  # nanoseconds, if it is timed
    cdef public bint tries
    cdef public object clock  # None: the system's; otherwise a function that returns nanoseconds

    cdef int choose(self, int what, int root, Py_ssize_t nbytes, Handle datatype, bint* in_node) except? -9:
        """Find the way of an operation of `nbytes` bytes; all ranks find the same. Return 0, an error code, or NODE_LEAVES
        if MPI should do it and `datatype` is 0.
        """
        self.trial = NULL
        cdef bint is_tried = self.tries and what == BROADCAST and self.node_largest < nbytes <= LARGEST_TRIED
        in_node[0] = self.is_in_node(0 if is_tried else nbytes)  # may open the memory, which sets node.yields
        in_node[0] = in_node[0] and (not is_tried or self.node.yields < 0)
        cdef bint tries = in_node[0] and self.tries and nbytes >= SMALLEST_TRIED and self.node.yields < 0
        cdef int code = self.choose_tried(what, root, nbytes, in_node) if tries else 0
        if code == 0 and not (in_node[0] or datatype):
            return NODE_LEAVES
        self.began = self.time()
        return code

    cdef int choose_tried(self, int what, int root, Py_ssize_t nbytes, bint* in_node) noexcept:
        cdef int code, size = 0
        while size < TRIED_SIZES - 1 and nbytes >> size >= 2 * SMALLEST_TRIED:
            size += 1
        cdef Trial* trial = self.trial_of(what, size)
        if trial.way == UNDECIDED:
            with nogil:  # calls that differ would otherwise leave the ranks with different counts
                code = node_barrier(&self.node, call_of(what, root, 1), nbytes)
            if code:
                return code
            if trial.calls < TRIALS:
                trial.calls += 1
                self.trial = trial
                in_node[0] = trial.calls <= TRIALS // 2
                return 0
            code = self.decide(trial)
            if code:
                return code
        in_node[0] = trial.way == IN_NODE
        return 0

    cdef inline Trial* trial_of(self, int what, int size) noexcept:
        return &self.trials[0 if what == BROADCAST else 1 if what == ALL_GATHER else 2][size]

    cdef int decide(self, Trial* trial) noexcept:
        """Agree on the faster way; it must be faster by a tenth to replace memory of the node."""
        cdef int64_t[2 * PARTS] each
        cdef int code, i
        with nogil:
            code = node_all_gather(&self.node, call_of(ALL_GATHER, 1, 1), <char*>each, <char*>trial.best, sizeof(trial.best))
        if code:
            return code
        cdef bint are_known = True
        for i in range(2 * self.size):
            are_known = are_known and each[i] > 0
            trial.best[i % 2] = max(trial.best[i % 2], each[i])
        trial.way = BY_MPI if are_known and 10 * trial.best[1] < 9 * trial.best[0] else IN_NODE
        return 0

    cdef inline int64_t time(self) except -1:
        """Return the time in nanoseconds if the current operation is timed."""
        if self.trial == NULL:
            return 0
        if self.clock is not None:
            return self.clock()
        return node_time()

    cdef int has_taken(self, bint in_node, int code) except? -9:
        """Note the time of the current operation if it is timed; return `code`."""
        cdef int64_t took
        if self.trial != NULL and code == 0:
            took = self.time() - self.began
            if self.trial.best[not in_node] == 0 or took < self.trial.best[not in_node]:
                self.trial.best[not in_node] = took
        return code

    def decided(self):
        """Return (name, smallest bytes, whether it goes by MPI, nanoseconds in memory of the node, by MPI) of each."""
        cdef int what, size
        cdef Trial* trial
        cdef list found = []
        for what in (BROADCAST, ALL_GATHER, ALL_TO_ALL_SINGLE):
            for size in range(TRIED_SIZES):
                trial = self.trial_of(what, size)
                if trial.way != UNDECIDED and trial.best[0] and trial.best[1]:
                    found.append((NAMES[what], SMALLEST_TRIED << size, trial.way == BY_MPI, trial.best[0], trial.best[1]))
        return found
