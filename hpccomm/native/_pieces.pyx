# cython: language_level=3
"""One rank's side of exchanges within a node, in C: pack, announce, poll, copy and unpack (see pieces.h)."""

import math

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free


cdef extern from "pieces.h" nogil:
    enum: MOST_AXES, LINE, BLOCK_BYTES
    ctypedef struct Cells:
        size_t run
        int axes
        ptrdiff_t count[MOST_AXES]
        ptrdiff_t a[MOST_AXES]
        ptrdiff_t b[MOST_AXES]
        ptrdiff_t block
    ctypedef struct Piece:
        Cells cells
        char* data
        char* slot[2]
    ctypedef struct Direct:
        Cells cells
        char* data
        char* there
        int pid
    ctypedef struct Flags:
        pass
    ctypedef struct Sleepers:
        pass
    unsigned sleepers_enter(Sleepers* own)
    void sleepers_sleep(Sleepers* own, unsigned seen)
    void sleepers_leave(Sleepers* own)
    void pieces_copy(const Piece* pieces, int count, int set, int into_slot)
    void PAUSE()
    void flags_begin(Flags* mine, uint64_t turn, Sleepers* partner)
    bint flags_have_begun(Flags* theirs, uint64_t turn)
    int flags_direct(Flags* flags, uint64_t turn, const Direct* parts, int count, int into_there, Sleepers* partner)


cdef extern from *:
    "#define failure(flags) ((int)atomic_load(&(flags)->failed))"
    int failure(Flags* flags) nogil


cdef struct Partner:
    Flags* mine  # written by this rank for the partner
    Flags* theirs
    Sleepers* sleepers  # of the partner; NULL: no rank sleeps
    Direct* gives  # direct copies to the partner
    Direct* takes
    int to_give
    int to_take


cdef class Pieces:
    """One rank's side of an exchange.

    `sent` and `received` describe the packed parts: (address, shape, itemsize, strides, strides in the slot, addresses
    of the two slots). `partners` describes the other ranks: (address of the flags for it, address of its flags, address
    of its Sleepers, direct copies to it, direct copies from it). A direct copy is (address, shape, itemsize, strides,
    strides there, address there, pid or 0). `sleepers`: the address of this rank's Sleepers. If it is 0, as are those of
    all ranks, no rank sleeps.
    """

    cdef Piece* sent
    cdef Piece* received
    cdef Partner* partners
    cdef Sleepers* sleepers
    cdef int to_send, to_receive, ranks
    cdef readonly uint64_t number  # of the current turn

    def __cinit__(self, sent, received, partners, uintptr_t sleepers):
        self.sent = pieces_of(sent)
        self.to_send = len(sent)
        self.received = pieces_of(received)
        self.to_receive = len(received)
        self.partners = <Partner*>calloc(len(partners) + 1, sizeof(Partner))
        if not self.partners:
            raise MemoryError
        self.ranks = len(partners)
        self.sleepers = <Sleepers*>sleepers
        for i, (mine, theirs, of_partner, gives, takes) in enumerate(partners):
            self.partners[i].mine = <Flags*><uintptr_t>mine
            self.partners[i].theirs = <Flags*><uintptr_t>theirs
            self.partners[i].sleepers = <Sleepers*><uintptr_t>of_partner
            self.partners[i].gives = directs_of(gives)
            self.partners[i].to_give = len(gives)
            self.partners[i].takes = directs_of(takes)
            self.partners[i].to_take = len(takes)

    def __dealloc__(self):
        for i in range(self.ranks):
            free(self.partners[i].gives)
            free(self.partners[i].takes)
        free(self.partners)
        free(self.sent)
        free(self.received)

    def start(self):
        """Begin a turn: pack, and announce it to the other ranks."""
        cdef int i, set
        self.number += 1
        set = self.number & 1
        with nogil:
            pieces_copy(self.sent, self.to_send, set, 1)
            for i in range(self.ranks):
                flags_begin(self.partners[i].mine, self.number, self.partners[i].sleepers)

    def go_on(self, int looks):
        """Poll at most `looks` times; return whether all partners have begun and all direct copies are done."""
        cdef bint is_done = False
        with nogil:
            while not is_done and looks > 0:
                is_done = self.look()
                looks -= 1
                if not is_done:
                    PAUSE()
        return is_done

    def sleep(self):
        """Poll once; if not all is done, sleep until a partner has begun or copied, at most a millisecond."""
        cdef bint is_done
        cdef unsigned seen
        with nogil:
            seen = sleepers_enter(self.sleepers)
            is_done = self.look()
            if not is_done:
                sleepers_sleep(self.sleepers, seen)
            sleepers_leave(self.sleepers)

    cdef bint look(self) noexcept nogil:
        cdef bint all_done = True, is_done
        cdef Partner* other
        cdef int i
        for i in range(self.ranks):  # first the parts that this rank needs
            other = &self.partners[i]
            is_done = flags_have_begun(other.theirs, self.number)
            if is_done and other.to_take:
                is_done = flags_direct(other.theirs, self.number, other.takes, other.to_take, 0,
                                       other.sleepers)
            all_done = all_done and is_done
        for i in range(self.ranks):
            other = &self.partners[i]
            if other.to_give:
                is_done = flags_have_begun(other.theirs, self.number)
                is_done = is_done and flags_direct(other.mine, self.number, other.gives, other.to_give, 1,
                                                   other.sleepers)
                all_done = all_done and is_done
        return all_done

    def unpack(self):
        """Copy the received slots into the arrays; return 0, or the errno of a direct copy that failed."""
        cdef int i, set = self.number & 1, failed = 0
        with nogil:
            pieces_copy(self.received, self.to_receive, set, 0)
            for i in range(self.ranks):
                failed = failed or failure(self.partners[i].mine) or failure(self.partners[i].theirs)
        return failed


cdef Piece* pieces_of(descriptions) except NULL:
    cdef Piece* found = <Piece*>calloc(len(descriptions) + 1, sizeof(Piece))
    if not found:
        raise MemoryError
    for i, (address, shape, itemsize, strides, slot_strides, slots) in enumerate(descriptions):
        found[i].data = <char*><uintptr_t>address
        found[i].slot[0] = <char*><uintptr_t>slots[0]
        found[i].slot[1] = <char*><uintptr_t>slots[1]
        set_cells(&found[i].cells, shape, itemsize, strides, slot_strides)
    return found


cdef Direct* directs_of(descriptions) except NULL:
    cdef Direct* found = <Direct*>calloc(len(descriptions) + 1, sizeof(Direct))
    if not found:
        raise MemoryError
    for i, (address, shape, itemsize, strides, strides_there, there, pid) in enumerate(descriptions):
        found[i].data = <char*><uintptr_t>address
        found[i].there = <char*><uintptr_t>there
        found[i].pid = pid
        set_cells(&found[i].cells, shape, itemsize, strides, strides_there)
    return found


cdef int set_cells(Cells* cells, shape, itemsize, a_strides, b_strides) except -1:
    cells.run, axes = walk(shape, itemsize, a_strides, b_strides)
    cells.axes = len(axes)
    if cells.axes > MOST_AXES:
        raise ValueError(f"an array has {len(axes)} axes with gaps between them; at most {MOST_AXES} can be copied")
    for number, (count, a, b) in enumerate(axes):
        cells.count[number] = count
        cells.a[number] = a
        cells.b[number] = b
    cells.block = cells.count[0]
    if cells.run < LINE:
        cells.block = max(1, BLOCK_BYTES // max(1, cells.run * math.prod(count for count, _, _ in axes[1:])))
    return 0


def walk(shape, itemsize, a_strides, b_strides):
    """Return the bytes contiguous at two places of the same cells, and the outer axes: (count, stride, stride).

    The axes are in the order of place `a`, and joined where both places allow it.
    """
    axes = [axis for axis in zip(shape, a_strides, b_strides) if axis[0] != 1]
    axes.sort(key=lambda axis: -abs(axis[1]))
    run = itemsize
    while axes and axes[-1][1] == axes[-1][2] == run:
        run *= axes.pop()[0]
    joined = []
    for count, a, b in axes:
        if joined and joined[-1][1:] == (count * a, count * b):
            joined[-1] = joined[-1][0] * count, a, b
        else:
            joined.append((count, a, b))
    return run, joined
