/* Parts of arrays, of any strides, to and from memory that the ranks of a node share. No Python, no MPI.
 *
 * For each pair of ranks that exchange something there is a flag, which the sender writes, and two slots that turns use
 * alternately: in turn n a rank packs into the slots of n, then stores n into its flags with release; whoever receives
 * loads them with acquire, and unpacks. Both directions of a pair have a flag, also where only one has values. So who has
 * ended turn n - 1 knows that its partners have begun it, hence have unpacked what was in the slots of n - 2.
 */
#ifndef HPCCOMM_PIECES_H
#define HPCCOMM_PIECES_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST_AXES = 32 };

typedef struct {
    char *data;    /* of the array */
    char *slot[2]; /* where the values are, one after the other, in each of the two sets */
    size_t run;    /* bytes without a gap */
    int axes;      /* beyond the run, the outermost first */
    ptrdiff_t count[MOST_AXES], stride[MOST_AXES];
} Piece;

typedef _Atomic uint64_t Turn;

#define ROW(bytes)                                                                                                     \
    case bytes:                                                                                                        \
        for (ptrdiff_t i = 0; i < count; i++) {                                                                        \
            if (packs)                                                                                                 \
                memcpy(slot + i * bytes, data + i * stride, bytes);                                                    \
            else                                                                                                       \
                memcpy(data + i * stride, slot + i * bytes, bytes);                                                    \
        }                                                                                                              \
        break;

/* One axis; the compiler makes loads and stores of the sizes that elements have. */
static inline void piece_row(char *data, char *slot, size_t run, ptrdiff_t count, ptrdiff_t stride, int packs)
{
    switch (run) {
        ROW(1)
        ROW(2)
        ROW(4)
        ROW(8)
        ROW(16)
    default:
        for (ptrdiff_t i = 0; i < count; i++) {
            if (packs)
                memcpy(slot + (size_t)i * run, data + i * stride, run);
            else
                memcpy(data + i * stride, slot + (size_t)i * run, run);
        }
    }
}

static inline void piece_copy(const Piece *p, int set, int packs)
{
    char *data = p->data, *slot = p->slot[set];
    int last = p->axes - 1;
    if (last < 0) {
        if (packs)
            memcpy(slot, data, p->run);
        else
            memcpy(data, slot, p->run);
        return;
    }
    for (int axis = 0; axis <= last; axis++)
        if (p->count[axis] == 0)
            return;
    ptrdiff_t at[MOST_AXES] = {0};
    size_t row = (size_t)p->count[last] * p->run;
    for (;;) {
        piece_row(data, slot, p->run, p->count[last], p->stride[last], packs);
        slot += row;
        int axis = last - 1;
        for (; axis >= 0; axis--) {
            data += p->stride[axis];
            if (++at[axis] < p->count[axis])
                break;
            data -= p->stride[axis] * p->count[axis];
            at[axis] = 0;
        }
        if (axis < 0)
            return;
    }
}

#endif
