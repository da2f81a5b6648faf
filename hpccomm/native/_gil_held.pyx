# cython: language_level=3, boundscheck=False
"""Threads that report for this process while a C call holds the GIL (`gil_held.h`), and the notes that they read."""

cimport cython
from libc.stdint cimport uintptr_t
from libc.string cimport memset, strncpy

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8(object text) except NULL

cdef extern from "gil_held.h" nogil:
    ctypedef struct HeldNote:
        double began
    ctypedef struct HeldGroup:
        char key[40]
        char name[80]
        double limit
        int ends, path
        const long long* counts[4]
        HeldNote notes[8]
    ctypedef struct Held:
        int rank, size, signal_number, stack_file, terminal
        char package[1024]
        char places[2][1024]
        void* ring
        void* cuda_event_query
        void* cuda_capture_mode
    Held held
    void held_link(HeldGroup* group)
    void held_unlink(HeldGroup* group)
    int held_begin(HeldGroup* group, const char* name, long long number, void* event)
    int held_start()
    void held_stop()
    void held_know(const char* token)
    double held_stopped()
    int held_free_signal(int first)
    const int SIGRTMIN

cdef int keep(char* place, size_t room, str text) except -1:
    """Copy a text, shortened if necessary, to a zeroed `place`; its last byte stays 0."""
    cdef bytes encoded = text.encode()
    strncpy(place, encoded, room - 1)
    return 0


@cython.no_gc_clear
cdef class Notes:
    """The unfinished operations of one group: those that block the host, and those on a GPU."""

    cdef HeldGroup group
    cdef object fast_path  # keeps the counters that are read

    def __cinit__(self, str name, double limit, str on_timeout):
        memset(&self.group, 0, sizeof(self.group))
        keep(self.group.name, sizeof(self.group.name), name)
        self.group.limit = limit
        self.group.ends = on_timeout == "abort"
        held_link(&self.group)

    def __dealloc__(self):
        held_unlink(&self.group)

    def identify(self, str key):
        """Set the group's name among all ranks, which is not known when the group is made."""
        if not self.group.key[0]:
            keep(self.group.key, sizeof(self.group.key), key)

    def follow(self, fast_path):
        """From now on read the counts of a compiled fast path, and its operations in the ring."""
        cdef uintptr_t address
        self.fast_path = fast_path
        for i, address in enumerate(fast_path.addresses_of_counts()):
            self.group.counts[i] = <const long long*>address
        self.group.path = fast_path.place

    def during(self, str name, long long number, function, tuple arguments):
        """Call a blocking operation and note it meanwhile; no signal handler runs between the call and the notes."""
        cdef int place = held_begin(&self.group, PyUnicode_AsUTF8(name), number, NULL)
        try:
            return function(*arguments)
        finally:
            self.end(place)

    def begin_on_gpu(self, str name, long long number, uintptr_t event):
        """Note a GPU operation that completes with an event; return the place to pass to `end`."""
        return held_begin(&self.group, PyUnicode_AsUTF8(name), number, <void*>event)

    cpdef end(self, int place):
        """Note that an operation has ended."""
        if place >= 0:
            self.group.notes[place].began = 0


def start(int rank, int size, str package, int signal_number, int stack_file, int terminal, uintptr_t ring):
    """Start the threads; return whether they run.

    `package`: hpccomm's folder, by which its frames are recognised; `signal_number`: a signal whose handler writes the
    stacks of all threads to `stack_file`; `terminal`: a file for reports beside stderr, or -1; `ring`: the result of
    `fastpath.blocking_address()`.
    """
    held.rank, held.size, held.signal_number, held.stack_file = rank, size, signal_number, stack_file
    held.terminal, held.ring = terminal, <void*>ring
    keep(held.package, sizeof(held.package), package)
    return held_start() == 0


def answer_in(str first, str second):
    """Set the folders in which other ranks may ask for a report."""
    keep(held.places[0], sizeof(held.places[0]), first)
    keep(held.places[1], sizeof(held.places[1]), second)


def ask_cuda(uintptr_t event_query, uintptr_t capture_mode):
    """Set the addresses of cuEventQuery and cuThreadExchangeStreamCaptureMode."""
    held.cuda_capture_mode, held.cuda_event_query = <void*>capture_mode, <void*>event_query


def know(str token):
    """Note a question that has been answered."""
    held_know(token.encode())


def stopped():
    """Return the seconds in which this process was stopped, or did not get a core; a second at least each time."""
    return held_stopped()


def free_signal():
    """Return a real-time signal without a handler, not even a library's; 0 if there is none."""
    return held_free_signal(SIGRTMIN + 8)


def stop():
    """Make the threads end before Python does."""
    with nogil:
        held_stop()
