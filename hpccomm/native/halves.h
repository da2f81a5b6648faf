/* Persistent collectives of a node in two halves, in flags and slots of their own (node.h has the flags and slots).
 *
 * `start` puts values into this rank's slot and waits for nobody; `wait` meets the others (node_meet) and takes. It does
 * not wait for another rank to come to its `wait`: that rank may not get there before it has heard from this one. So each
 * rank could reduce everything; a share of a larger array is reduced by the rank that claims it first, for all, and the
 * others wait for a share that has been claimed. The slots are the operation's own: between the halves this rank does
 * other operations, whose numbers would tell that it has ended this one.
 */
#ifndef HPCCOMM_HALVES_H
#define HPCCOMM_HALVES_H

#include "node.h"

static inline size_t node_halves_bytes(int ranks, size_t slot)
{
    return (size_t)ranks * sizeof(Flags) + (2 * (size_t)ranks + 1) * slot;
}

static inline void node_make_halves(Node *n, char *memory /* of zeros */, size_t slot)
{
    n->flags = (Flags *)memory;
    n->slots = memory + (size_t)n->ranks * sizeof(Flags);
    n->slot = slot;
    n->number = n->settled = 0;
}

/* Values from `low` to `high` are for this rank alone. The next set is free, unless the operation before has failed. */
static inline int node_start(Node *n, uint64_t call, const char *x, size_t bytes, size_t low, size_t high)
{
    int code = node_next(n);
    if (code)
        return code;
    char *slot = node_slot(n, n->number, n->rank);
    if (x) {
        memcpy(slot, x, low);
        memcpy(slot + high, x + high, bytes - high);
    }
    node_show(n, call, bytes);
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

/* Reduce into x, which still has this rank's values, what all have started with; they have met. */
static inline int node_take_all_reduced(Node *n, Fold *fold, char *x, size_t bytes)
{
    int code;
    if (n->ranks == 2) {
        fold(x, n->rank == 0 ? x : node_slot(n, n->number, 0), n->rank == 1 ? x : node_slot(n, n->number, 1), bytes);
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
            atomic_store_explicit(&n->flags[rank].reduced, n->number, memory_order_release);
        }
    }
    for (int rank = 0; rank < n->ranks; rank++)
        if ((code = node_wait(n, &n->flags[rank].reduced, n->number)))
            return code;
    memcpy(x, node_result(n), bytes);
    return 0;
}

#endif
