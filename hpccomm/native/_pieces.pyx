# cython: language_level=3
"""What a rank exchanges with the others of its node: packs, shows, looks and unpacks, in C (see pieces.h)."""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free


cdef extern from "pieces.h" nogil:
    enum: MOST_AXES
    ctypedef struct Piece:
        char* data
        char* slot[2]
        size_t run
        int axes
        ptrdiff_t count[MOST_AXES]
        ptrdiff_t stride[MOST_AXES]
    ctypedef struct Turn:
        pass
    void piece_copy(const Piece* piece, int set, int packs)


cdef extern from *:
    """
    #define show(turn, number) atomic_store_explicit((turn), (number), memory_order_release)
    #define look(turn) atomic_load_explicit((turn), memory_order_acquire)
    #if defined(__x86_64__)
    #define pause_core() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define pause_core() __asm__ volatile("yield")
    #else
    #define pause_core() ((void)0)
    #endif
    """
    void show(Turn* turn, uint64_t number) nogil
    uint64_t look(Turn* turn) nogil
    void pause_core() nogil


cdef class Pieces:
    """One rank's side of an exchange.

    `sent` and `received` are descriptions of pieces: (address, shape, strides, itemsize, addresses of the two slots);
    `mine` and `theirs` the addresses of the flags that this rank writes, and of those that it waits for.
    """

    cdef Piece* sent
    cdef Piece* received
    cdef Turn** mine
    cdef Turn** theirs
    cdef int to_send, to_receive, flags
    cdef readonly uint64_t number  # of the turn

    def __cinit__(self, sent, received, mine, theirs):
        self.to_send, self.to_receive, self.flags = len(sent), len(received), len(mine)
        self.sent = described(sent)
        self.received = described(received)
        self.mine = <Turn**>calloc(self.flags + 1, sizeof(Turn*))
        self.theirs = <Turn**>calloc(self.flags + 1, sizeof(Turn*))
        if not (self.sent and self.received and self.mine and self.theirs):
            raise MemoryError
        for i in range(self.flags):
            self.mine[i] = <Turn*><uintptr_t>mine[i]
            self.theirs[i] = <Turn*><uintptr_t>theirs[i]

    def __dealloc__(self):
        free(self.sent)
        free(self.received)
        free(self.mine)
        free(self.theirs)

    def start(self):
        """Begin a turn: pack, and show that to the other ranks."""
        cdef int i, set
        self.number += 1
        set = self.number & 1
        with nogil:
            for i in range(self.to_send):
                piece_copy(&self.sent[i], set, 1)
            for i in range(self.flags):
                show(self.mine[i], self.number)

    def has_come(self, int looks):
        """Return whether the turn of all other ranks has begun, after so many looks at most."""
        cdef int i
        with nogil:
            for i in range(self.flags):
                while look(self.theirs[i]) < self.number:
                    looks -= 1
                    if looks <= 0:
                        break
                    pause_core()
                if looks <= 0:
                    break
        return looks > 0

    def unpack(self):
        """Copy what has come into the arrays."""
        cdef int i, set = self.number & 1
        with nogil:
            for i in range(self.to_receive):
                piece_copy(&self.received[i], set, 0)


cdef Piece* described(pieces) except NULL:
    """Return the descriptions of pieces in C; axes without a gap between them become one."""
    cdef Piece* found = <Piece*>calloc(len(pieces) + 1, sizeof(Piece))
    cdef Piece* piece
    if not found:
        raise MemoryError
    for i, (address, shape, strides, itemsize, slots) in enumerate(pieces):
        piece = &found[i]
        piece.data = <char*><uintptr_t>address
        piece.slot[0] = <char*><uintptr_t>slots[0]
        piece.slot[1] = <char*><uintptr_t>slots[1]
        piece.run = itemsize
        axes = [(count, stride) for count, stride in zip(shape, strides) if count != 1]
        while axes and axes[-1][1] == piece.run:
            piece.run *= axes.pop()[0]
        piece.axes = len(axes)
        for number, (count, stride) in enumerate(axes):
            piece.count[number] = count
            piece.stride[number] = stride
    return found
