# The ring buffer of the last operations of this process's fast paths.

cdef enum:
    BROADCAST = 1
    ALL_REDUCE
    ALL_GATHER
    REDUCE_SCATTER
    BARRIER
    ALL_GATHER_LIST
    GATHER
    SCATTER
    ALL_TO_ALL
    REDUCE_SCATTER_LIST
    REDUCE
    SCAN
    EXSCAN
    ALL_TO_ALL_SINGLE
    COALESCED
    BROADCAST_COALESCED
    ALL_GATHER_COALESCED
    REDUCE_SCATTER_COALESCED
    ALL_GATHER_LISTS
    SPARSE
    BROADCAST_START  # persistent operations, in the order of the first ones
    ALL_REDUCE_START
    ALL_GATHER_START
    REDUCE_SCATTER_START
    ALL_TO_ALL_START
    COALESCED_START
    SEND  # messages from here on
    RECV
    SENDRECV


# the operations' names in rows of the ring
NAMES = ("", "broadcast", "all_reduce", "all_gather_single", "reduce_scatter_single", "barrier", "all_gather", "gather",
         "scatter", "all_to_all", "reduce_scatter", "reduce", "scan", "exscan", "all_to_all_single",
         "all_reduce_coalesced", "broadcast_coalesced", "all_gather_single_coalesced",
         "reduce_scatter_single_coalesced", "all_gather_coalesced", "exchange_sparse", "broadcast_start",
         "all_reduce_start", "all_gather_single_start", "reduce_scatter_single_start", "all_to_all_single_start",
         "all_reduce_coalesced_start", "send", "recv", "sendrecv")

cdef inline uint64_t call_of(int collective, int detail, uint64_t kind) noexcept nogil:
    """Return the key that ranks compare in memory of the node: the collective, root or op, and the kind of values."""
    return <uint64_t>collective << 56 | <uint64_t>detail << 24 | kind


cdef struct Entry:
    long long serial  # from 1 on
    long long began, ended  # nanoseconds, 0 while it is in flight
    long long number, nbytes
    int path, peer, tag  # `tag` of a sparse exchange: the number of elements
    signed char what, op, dtype  # `what` is 0 if the operation was left to the checks
    unsigned char is_async, has_failed, is_exact


cdef Entry* ring = <Entry*>calloc(RING, sizeof(Entry))
cdef long long ring_mask = RING - 1, written = 0, bytes_of_all = 0
cdef int paths = 0
cdef bint times_are_exact = False
cdef object caller = None  # returns the program's line that calls; None: it is not recorded
cdef list callers = []
cdef list op_names = [""] * OPS


cdef inline long long now() noexcept nogil:
    """Return the time; unless exact times are wanted, the time of the last tick, in 3 ns instead of 20."""
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC if times_are_exact else CLOCK_MONOTONIC_COARSE, &time)
    return time.tv_sec * 1000000000 + time.tv_nsec


cdef inline long long note(Path path, int what, int dtype, Py_ssize_t nbytes, int op, int peer, int tag,
                           bint is_async) except -1:
    """Note that an operation begins; return its serial number in the ring."""
    global written, bytes_of_all
    refuse_after_the_end()
    written += 1
    bytes_of_all += nbytes
    cdef long long serial = written
    cdef Entry* entry = &ring[serial & ring_mask]
    entry.serial, entry.began, entry.ended = serial, now(), 0
    entry.number = 1 + (path.messages + path.passed_messages if what >= SEND else path.count + path.passed_collectives)
    entry.nbytes, entry.path, entry.peer, entry.tag = nbytes, path.place, peer, tag
    entry.what, entry.op, entry.dtype = what, op, dtype
    entry.is_async, entry.has_failed, entry.is_exact = is_async, False, times_are_exact
    if caller is not None:
        callers[serial & ring_mask] = caller()
    return serial


cdef inline void leave_to_the_checks(long long serial) noexcept:
    """Forget a noted operation, which is not done here."""
    global bytes_of_all
    cdef Entry* entry = &ring[serial & ring_mask]
    entry.what, bytes_of_all = 0, bytes_of_all - entry.nbytes


cdef inline long long note_end(long long serial, bint has_failed) noexcept:
    """Note the end of an operation; return its duration in nanoseconds, or -1 if that is not known exactly."""
    cdef Entry* entry = &ring[serial & ring_mask]
    if entry.serial != serial or entry.ended != 0:
        return -1
    entry.ended, entry.has_failed = now(), has_failed
    return entry.ended - entry.began if entry.is_exact and times_are_exact else -1


def keep(long long size, bint is_exact, whose):
    """Remember at least `size` operations from now on, with exact times if asked for; record `whose()` if not None."""
    global ring, ring_mask, times_are_exact, caller, callers
    cdef long long serial, entries = RING
    while entries < size:
        entries *= 2
    cdef Entry* larger
    if entries > ring_mask + 1:
        larger = <Entry*>calloc(entries, sizeof(Entry))
        if larger == NULL:
            raise MemoryError
        for serial in range(max(written - ring_mask, 1), written + 1):
            larger[serial & (entries - 1)] = ring[serial & ring_mask]
        ring, ring_mask = larger, entries - 1  # the old ring is not freed: `blocking` may be reading it
    callers = [None] * (0 if whose is None else ring_mask + 1)
    times_are_exact, caller = is_exact, whose


def ring_rows(long long since=0):
    """Return a row for each remembered operation with a serial number above `since`, the oldest first.

    The number of elements is -1 if it follows from the bytes.
    """
    cdef Entry each
    cdef long long serial
    rows = []
    for serial in range(max(written - ring_mask, since + 1, 1), written + 1):
        each = ring[serial & ring_mask]
        if each.what:
            rows.append((
                serial, each.path, NAMES[each.what], each.number, each.dtype, each.nbytes,
                each.tag if each.what == SPARSE else -1, "" if each.op < 0 else op_names[each.op],
                None if each.peer < 0 else each.peer, None if each.tag < 0 or each.what == SPARSE else each.tag,
                bool(each.is_async), 1e-9 * each.began,
                1e-9 * max(each.began, each.ended) if each.ended else 0.0,  # two clocks, maybe
                bool(each.has_failed), callers[serial & ring_mask] if caller is not None else None,
            ))
    return rows


cdef struct Blocking:  # HeldRing in gil_held.h
    const char* name
    long long number, began
    int path


cdef const char* c_names[32]
for row, name in enumerate(NAMES):
    c_names[row] = PyUnicode_AsUTF8(name)


cdef int blocking(Blocking* found, int most) noexcept nogil:
    """Find the unfinished blocking operations; a thread without the GIL calls this while another thread holds it."""
    cdef long long serial
    cdef int count = 0
    cdef Entry* entry
    for serial in range(written, max(written - min(ring_mask, <long long>RING), 0), -1):
        entry = &ring[serial & ring_mask]
        if count < most and entry.what != 0 and entry.ended == 0 and not entry.is_async:
            found[count].name, found[count].number = c_names[entry.what], entry.number
            found[count].began, found[count].path = entry.began, entry.path
            count += 1
    return count


def blocking_address():
    """Return the address of `blocking`."""
    return <uintptr_t>&blocking


def last_serial():
    """Return the serial number of the last operation in the ring; 0 before the first."""
    return written


def noted_bytes():
    """Return the bytes of all operations that have taken a fast path."""
    return bytes_of_all
