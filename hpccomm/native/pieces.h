/* Exchanges of parts of arrays, with any strides, among the ranks of a node. No Python, no MPI.
 *
 * In each pair of ranks that exchange parts, each rank has a line of flags for the other, and two slots that alternate
 * by turn. In turn n a rank packs into its slots of turn n, then stores n into `begun` with release; the receiver loads
 * `begun` with acquire and unpacks. Both ranks have a line, even if only one sends values. So a rank that has ended
 * turn n - 1 knows that its partners have begun turn n - 1, and hence have unpacked the slots of turn n - 2.
 *
 * Large parts are copied from array to array after both ranks have begun the turn: whichever of the two polls first
 * claims the direction and does the copy. (So no rank waits for a partner that is busy between `start` and `wait`.)
 * A rank ends a turn only after all direct copies from and to its arrays are done.
 *
 * Where ranks outnumber cores, each rank also has a line of Sleepers, on which it alone sleeps (sleep.h).
 */
#ifndef HPCCOMM_PIECES_H
#define HPCCOMM_PIECES_H

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu.h"
#include "sleep.h"

#if defined(__linux__)
#include <sys/uio.h>
#endif

enum { MOST_AXES = 32, MOST_VECTORS = 1024 /* of one system call: IOV_MAX */, BLOCK_BYTES = 8 << 10 };
#define MOST_BYTES ((size_t)1 << 30) /* of one vector: a system call moves less than 2 GiB */

/* The same cells at two places, a and b. */
typedef struct {
    size_t run; /* bytes that are contiguous at both places */
    int axes;   /* outside the run, the outermost first */
    ptrdiff_t count[MOST_AXES], a[MOST_AXES], b[MOST_AXES]; /* the strides are in bytes */
    ptrdiff_t block; /* indexes of the outermost axis: all, or about BLOCK_BYTES if runs are shorter than a line */
} Cells;

/* A part that is packed: cells of an array, and its slots in the two sets. */
typedef struct {
    Cells cells; /* a: the array, b: the slot */
    char *data, *slot[2];
} Piece;

/* A part that is copied directly: cells of this rank's array and of another rank's. */
typedef struct {
    Cells cells; /* a: this rank's array, b: the other rank's */
    char *data, *there;
    int pid; /* the process in which `there` is an address; 0: this one, which maps that memory */
} Direct;

typedef struct {
    _Atomic uint64_t begun;         /* the last turn that the owner of this line has begun */
    _Atomic uint64_t claimed, done; /* the last turn in which the direct copy of the owner's parts was claimed; done */
    _Atomic uint64_t failed;        /* errno of a failed copy; 0: none has failed */
} Flags;

#define ROW(bytes)                                                                                                     \
    case bytes:                                                                                                        \
        for (ptrdiff_t i = 0; i < count; i++)                                                                          \
            memcpy(to + i * to_stride, from + i * from_stride, bytes);                                                 \
        break;

/* Copy along one axis; for the usual element sizes the compiler makes single loads and stores. */
static inline void copy_row(char *to, ptrdiff_t to_stride, const char *from, ptrdiff_t from_stride, size_t run,
                            ptrdiff_t count)
{
    switch (run) {
        ROW(1)
        ROW(2)
        ROW(4)
        ROW(8)
        ROW(16)
    default:
        for (ptrdiff_t i = 0; i < count; i++)
            copy_bytes(to + i * to_stride, from + i * from_stride, run);
    }
}

/* Advance the index of the axes before `last`; return 0 after the last index. */
static inline int cells_next(const Cells *c, int last, ptrdiff_t *at, const char **a, const char **b)
{
    for (int axis = last - 1; axis >= 0; axis--) {
        *a += c->a[axis];
        *b += c->b[axis];
        if (++at[axis] < c->count[axis])
            return 1;
        *a -= c->a[axis] * c->count[axis];
        *b -= c->b[axis] * c->count[axis];
        at[axis] = 0;
    }
    return 0;
}

static inline int cells_empty(const Cells *c)
{
    for (int axis = 0; axis < c->axes; axis++)
        if (c->count[axis] == 0)
            return 1;
    return c->run == 0;
}

/* Copy the cells from a to b, or from b to a. */
static inline void cells_copy(const Cells *c, const char *a, const char *b, int into_b)
{
    ptrdiff_t at[MOST_AXES] = {0};
    int last = c->axes - 1;
    if (cells_empty(c))
        return;
    ptrdiff_t count = last < 0 ? 1 : c->count[last], a_stride = last < 0 ? 0 : c->a[last];
    ptrdiff_t b_stride = last < 0 ? 0 : c->b[last];
    do {
        if (into_b)
            copy_row((char *)b, b_stride, a, a_stride, c->run, count);
        else
            copy_row((char *)a, a_stride, b, b_stride, c->run, count);
    } while (cells_next(c, last, at, &a, &b));
}

/* Copy block `turn` of the cells; return whether there are more. */
static inline int cells_copy_block(const Cells *c, ptrdiff_t turn, const char *a, const char *b, int into_b)
{
    ptrdiff_t start = turn * c->block, left = c->axes ? c->count[0] - start : 0;
    if (turn == 0 && left <= c->block) {
        cells_copy(c, a, b, into_b);
    } else if (left > 0) {
        Cells block = *c;
        block.count[0] = left < c->block ? left : c->block;
        cells_copy(&block, a + start * c->a[0], b + start * c->b[0], into_b);
    }
    return left > c->block;
}

/* Copy pieces from or into their slots of a set. They take turns, for the ends of neighbouring rows share lines. */
static inline void pieces_copy(const Piece *pieces, int count, int set, int into_slot)
{
    int more = count > 0;
    for (ptrdiff_t turn = 0; more; turn++) {
        more = 0;
        for (const Piece *each = pieces; each < pieces + count; each++)
            more |= cells_copy_block(&each->cells, turn, each->data, each->slot[set], into_slot);
    }
}

#if defined(__linux__)

/* Copy vectors from or into another process; return 0 or an errno. */
static inline int vectors_move(int pid, const struct iovec *here, const struct iovec *there, int vectors, size_t bytes,
                               int into_there)
{
    ssize_t moved = into_there ? process_vm_writev(pid, here, (unsigned)vectors, there, (unsigned)vectors, 0)
                               : process_vm_readv(pid, here, (unsigned)vectors, there, (unsigned)vectors, 0);
    return moved < 0 ? errno : (size_t)moved < bytes ? EFAULT : 0;
}

/* Copy the cells from b, in another process, to a; or from a to b. Return 0 or an errno. */
static inline int cells_move(const Cells *c, int pid, const char *a, const char *b, int into_b)
{
    struct iovec here[MOST_VECTORS], there[MOST_VECTORS];
    ptrdiff_t at[MOST_AXES] = {0};
    int vectors = 0, failed = 0;
    size_t bytes = 0;
    if (cells_empty(c))
        return 0;
    do {
        for (size_t start = 0; start < c->run && !failed; start += MOST_BYTES) {
            size_t part = c->run - start < MOST_BYTES ? c->run - start : MOST_BYTES;
            if (vectors == MOST_VECTORS || bytes + part > MOST_BYTES) {
                failed = vectors_move(pid, here, there, vectors, bytes, into_b);
                vectors = 0;
                bytes = 0;
            }
            here[vectors] = (struct iovec){(char *)a + start, part};
            there[vectors++] = (struct iovec){(char *)b + start, part};
            bytes += part;
        }
    } while (!failed && cells_next(c, c->axes, at, &a, &b));
    return failed ? failed : vectors_move(pid, here, there, vectors, bytes, into_b);
}

#else

static inline int cells_move(const Cells *c, int pid, const char *a, const char *b, int into_b)
{
    (void)c, (void)pid, (void)a, (void)b, (void)into_b;
    return ENOSYS;
}

#endif

/* Store `turn` in a flag for which the partner may wait, and wake it; `partner` is NULL if no rank sleeps. */
static inline void flag_raise(_Atomic uint64_t *flag, uint64_t turn, Sleepers *partner)
{
    if (!partner) {
        atomic_store_explicit(flag, turn, memory_order_release);
        return;
    }
    atomic_store(flag, turn);
    if (sleepers_any(partner))
        sleepers_wake(partner);
}

static inline void flags_begin(Flags *mine, uint64_t turn, Sleepers *partner)
{
    flag_raise(&mine->begun, turn, partner);
}

/* Whether the partner has begun; sequentially consistent for sleepers_enter, as that of `done`. */
static inline int flags_have_begun(Flags *theirs, uint64_t turn)
{
    return atomic_load(&theirs->begun) >= turn;
}

/* Do this turn's direct copies of one direction, unless the partner has claimed them; return whether they are done. */
static inline int flags_direct(Flags *flags, uint64_t turn, const Direct *parts, int count, int into_there,
                               Sleepers *partner)
{
    uint64_t before = turn - 1;
    if (!atomic_compare_exchange_strong(&flags->claimed, &before, turn))
        return atomic_load(&flags->done) >= turn;
    for (const Direct *part = parts; part < parts + count; part++) {
        int failed = 0;
        if (part->pid)
            failed = cells_move(&part->cells, part->pid, part->data, part->there, into_there);
        else
            cells_copy(&part->cells, part->data, part->there, into_there);
        if (failed)
            atomic_store(&flags->failed, (uint64_t)failed);
    }
    flag_raise(&flags->done, turn, partner);
    return 1;
}

#endif
