/* Persistent collectives of a node in two halves, with flags and slots of their own (see node.h for the protocol).
 *
 * `start` copies values into this rank's slot and waits for no other rank; `wait` meets the others (node_meet) and
 * copies the result out. `wait` does not need another rank to enter `wait`: that rank may enter it only after it has
 * heard from this one. So any rank must be able to reduce everything. Of a larger array, the first rank that claims a
 * share reduces it for all; the others wait only for claimed shares. The slots are the operation's own: between its
 * halves this rank does other operations, and their numbers in common flags would say that it has ended this one. */
#ifndef HPCCOMM_HALVES_H
#define HPCCOMM_HALVES_H

#include "node.h"

static inline size_t node_halves_bytes(int ranks, size_t slot)
{
    return (size_t)ranks * sizeof(Flags) + (2 * (size_t)ranks + 1) * slot;
}

static inline void node_make_halves(Node *n, char *memory /* zeroed */, size_t slot)
{
    n->flags = (Flags *)memory;
    n->cells = NULL;
    n->below = NULL; /* a rank waits for none that is not in `wait` */
    n->slots = memory + (size_t)n->ranks * sizeof(Flags);
    n->slot = n->stride = slot;
    n->number = n->settled = 0;
}

/* Bytes from `low` to `high` are this rank's own: not copied. The next set is free unless the last operation failed. */
static inline int node_start(Node *n, uint64_t call, const char *x, size_t bytes, size_t low, size_t high)
{
    int code = node_next(n, SETS);
    if (code)
        return code;
    char *slot = node_slot(n, n->number, n->rank);
    if (x) {
        node_put(n, slot, x, low);
        node_put(n, slot + high, x + high, bytes - high);
    }
    node_show(n, call, bytes, 0);
    return 0;
}

/* Whether all ranks have started. */
static inline int node_has_met(Node *n)
{
    for (int rank = 0; rank < n->ranks; rank++)
        if (atomic_load_explicit(&n->flags[rank].begun, memory_order_acquire) < n->number)
            return 0;
    return 1;
}

/* Reduce the values of all ranks, which have met, into x, which still has this rank's values. */
static inline int node_take_all_reduced(Node *n, const Fold *fold, char *x, size_t bytes)
{
    int code;
    if (n->ranks == 2) {
        node_fold(n, fold, x, x, 0, bytes);
        return 0;
    }
    if (bytes * (size_t)n->ranks <= n->one_phase) {
        node_fold(n, fold, x, NULL, 0, bytes);
        return 0;
    }
    for (int i = 0; i < n->ranks; i++) {
        int rank = (n->rank + i) % n->ranks;
        size_t from, part = node_share(n, bytes, rank, &from);
        uint64_t before = atomic_load_explicit(&n->flags[rank].claimed, memory_order_relaxed);
        if (before < n->number && atomic_compare_exchange_strong(&n->flags[rank].claimed, &before, n->number)) {
            node_fold(n, fold, node_result(n) + from, NULL, from, part);
            node_raise(n, rank, offsetof(Flags, reduced), 0);
        }
    }
    for (int rank = 0; rank < n->ranks; rank++)
        if ((code = node_wait(n, &n->flags[rank].reduced, n->number)))
            return code;
    copy_bytes(x, node_result(n), bytes);
    return 0;
}

#endif
