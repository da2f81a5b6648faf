/* Collectives through memory that all ranks of a node share: copy in, meet, reduce, copy out. No Python, no MPI.
 *
 *     small     copy in | meet | each rank reduces all slots into its array
 *     larger    copy in all but the own share | meet | reduce the own share into the result | meet | copy out
 *     a line    in a tree (meet.h): its root reduces all slots into the result before it releases the others
 *
 * Values larger than a slot go in rounds, each an operation with its own number, if all ranks know their size.
 *
 * Where ranks outnumber cores, each wait costs a change of processes. There a rank waits only for the ranks whose values
 * it takes, in a gather, scatter, small broadcast, reduce or scan. Small values are in one of a rank's CELLS cells, with
 * the operation's number, so a rank that only gives values can be CELLS operations before the slowest.
 *
 * Reductions are in rank order. Each element is reduced once, or by all ranks in the same way: all get the same bits.
 */
#ifndef HPCCOMM_NODE_H
#define HPCCOMM_NODE_H

#include "fold.h"
#include "meet.h"

/* Reduce `bytes` bytes of all slots, from `at` on, in rank order into `out`; `mine`, if not NULL, has this rank's; it may
 * be `out`. */
static inline void node_fold(Node *n, const Fold *fold, char *out, const char *mine, size_t at, size_t bytes)
{
    Folded folded;
    char apart[NODE_BLOCK];
    for (size_t done = 0, block; done < bytes; done += block) {
        block = fold_block(fold, bytes - done);
        char *into = mine == out && n->rank > 1 ? apart : out + done; /* the own values are needed after others */
        for (int rank = 0; rank < n->ranks; rank++) {
            const char *next = rank == n->rank && mine ? mine + done : node_slot(n, n->number, rank) + at + done;
            fold_next(fold, &folded, rank, into, next, block);
        }
        fold_end(fold, &folded, n->ranks, into, block);
        if (into == apart)
            copy_bytes(out + done, apart, block);
    }
}

/* Return the size of a rank's share of `bytes`, in whole lines except at the end; `from`: its start. */
static inline size_t node_share(const Node *n, size_t bytes, int rank, size_t *from)
{
    size_t lines = (bytes + LINE - 1) / LINE, share = (lines + (size_t)n->ranks - 1) / (size_t)n->ranks * LINE;
    *from = share * (size_t)rank < bytes ? share * (size_t)rank : bytes;
    return *from + share < bytes ? share : bytes - *from;
}

static inline int node_all_reduce(Node *n, uint64_t call, const Fold *fold, size_t itemsize, char *x, size_t count)
{
    size_t bytes = count * itemsize;
    int code;
    if (n->below && bytes <= LINE) {
        if ((code = node_next(n, SETS)))
            return code;
        copy_bytes(node_slot(n, n->number, n->rank), x, bytes);
        node_show(n, call, count, 0);
        if ((code = node_climb(n)))
            return code;
        if (n->rank == 0 && n->flags->differing != n->number)
            node_fold(n, fold, node_result(n), NULL, 0, bytes);
        if ((code = node_descend(n)))
            return code;
        copy_bytes(x, node_result(n), bytes);
        return 0;
    }
    if (!n->below && bytes <= n->slot && bytes * (size_t)n->ranks <= n->one_phase) {
        if ((code = node_next(n, SETS)))
            return code;
        copy_bytes(node_slot(n, n->number, n->rank), x, bytes);
        node_show(n, call, count, 0);
        if ((code = node_meet(n)))
            return code;
        if (n->ranks == 2 && !fold->widen) {
            fold->reduce(x, node_slot(n, n->number, 0), node_slot(n, n->number, 1), bytes);
        } else {
            node_fold(n, fold, x, NULL, 0, bytes);
        }
        return 0;
    }
    for (size_t at = 0; at < bytes; at += n->slot) {
        size_t part = bytes - at < n->slot ? bytes - at : n->slot, low;
        size_t own = node_share(n, part, n->rank, &low), high = low + own;
        if ((code = node_next(n, SETS)))
            return code;
        char *slot = node_slot(n, n->number, n->rank), *result = node_result(n);
        node_put(n, slot, x + at, low);
        node_put(n, slot + high, x + at + high, part - high);
        node_show(n, call, count + at, 0);
        if ((code = node_meet(n)))
            return code;
        node_fold(n, fold, x + at + low, x + at + low, low, own);
        node_put(n, result + low, x + at + low, own);
        node_raise(n, n->rank, offsetof(Flags, reduced), 0);
        for (int i = 1; i < n->ranks; i++) {
            int rank = (n->rank + i) % n->ranks;
            size_t from, others = node_share(n, part, rank, &from);
            if (others && (code = node_wait(n, &n->flags[rank].reduced, n->number)))
                return code;
            copy_bytes(x + at + from, result + from, others);
        }
    }
    return 0;
}

static inline int node_reduce_scatter(Node *n, uint64_t call, const Fold *fold, size_t itemsize, char *out,
                                      const char *x, size_t count /* of out */)
{
    size_t bytes = count * itemsize, own = bytes * (size_t)n->rank, room = n->slot / (size_t)n->ranks / LINE * LINE;
    int code;
    for (size_t at = 0; at == 0 || at < bytes; at += room) {
        size_t part = bytes - at < room ? bytes - at : room;
        if ((code = node_next(n, SETS)))
            return code;
        char *slot = node_slot(n, n->number, n->rank);
        for (int rank = 0; rank < n->ranks; rank++)
            if (rank != n->rank)
                node_put(n, slot + (size_t)rank * room, x + (size_t)rank * bytes + at, part);
        node_show(n, call, count + at, 0);
        if ((code = node_meet(n)))
            return code;
        node_fold(n, fold, out + at, x + own + at, (size_t)n->rank * room, part);
    }
    return 0;
}

static inline int node_all_gather(Node *n, uint64_t call, char *out, const char *x, size_t bytes /* of x */)
{
    int code;
    for (size_t at = 0; at == 0 || at < bytes; at += n->slot) {
        size_t part = bytes - at < n->slot ? bytes - at : n->slot;
        if ((code = node_next(n, SETS)))
            return code;
        node_put(n, node_slot(n, n->number, n->rank), x + at, part);
        node_show(n, call, bytes + at, 0);
        copy_bytes(out + (size_t)n->rank * bytes + at, x + at, part);
        if ((code = node_meet(n)))
            return code;
        for (int i = 1; i < n->ranks; i++) {
            int rank = (n->rank + i) % n->ranks;
            copy_bytes(out + (size_t)rank * bytes + at, node_slot(n, n->number, rank), part);
        }
    }
    return 0;
}

/* -- lists: each rank puts any number of parts into its slot, and the others take their parts ----------------- */

typedef struct {
    size_t at, bytes;
} Part;

#define NODE_TOO_LARGE UINT64_MAX

/* Return the most bytes of one part that fits into a cell. */
static inline size_t node_cell_room(void)
{
    return (sizeof((Cell *)0)->data - sizeof(Part)) / LINE * LINE;
}

/* Return the most bytes of each part, so that `parts` parts fit into a slot. */
static inline size_t node_room(const Node *n, size_t parts)
{
    return n->slot / parts / LINE * LINE;
}

/* Begin to move parts. If all ranks know the size of the largest part, parts go in as many rounds as necessary;
 * otherwise (`largest` is 0) in one round, or not at all. */
static inline void node_begin(Node *n, size_t parts, size_t largest)
{
    n->at = 0;
    n->room = largest ? node_room(n, parts) : SIZE_MAX;
    n->largest = largest;
}

/* Advance to the next round; return 0 if there is none. */
static inline int node_goes_on(Node *n)
{
    if (n->room >= n->largest - n->at || !n->largest)
        return 0;
    n->at += n->room;
    return 1;
}

/* Return the bytes of a part that this round moves. */
static inline size_t node_slice(Node *n, size_t bytes)
{
    size_t left = bytes > n->at ? bytes - n->at : 0;
    return left < n->room ? left : n->room;
}

/* Announce that this rank's slot is filled, or that its parts do not fit (`size`: NODE_TOO_LARGE), and meet. Return
 * NODE_LEAVES, on all ranks, if some rank's parts do not fit. */
static inline int node_meet_filled(Node *n, uint64_t call, uint64_t size)
{
    int code, differs = 0, leaves = 0, set = n->number & 1;
    node_show(n, call, size, 0);
    if (n->below && (code = node_meet(n)) != NODE_DIFFERS)
        return !code && size == NODE_TOO_LARGE ? NODE_LEAVES : code;
    for (int rank = 0; rank < n->ranks; rank++) {
        Flags *other = &n->flags[rank];
        if ((code = node_wait(n, &other->begun, n->number)))
            return code;
        if (!node_calls(n, rank, call) ||
            (other->count[set] != n->largest + n->at && other->count[set] != NODE_TOO_LARGE)) {
            differs = NODE_DIFFERS;
            n->differing = rank;
        } else if (other->count[set] == NODE_TOO_LARGE) {
            leaves = NODE_LEAVES;
        }
    }
    n->settled = n->number;
    return differs ? differs : leaves;
}

static inline size_t node_filling(Node *n, size_t parts, const size_t *bytes)
{
    size_t end = 0;
    for (size_t i = 0; i < parts; i++)
        end += (node_slice(n, bytes[i]) + LINE - 1) / LINE * LINE;
    return end;
}

/* Put the parts into a cell or a slot; their places stand at its end, the first part's last. */
static inline void node_fill(Node *n, char *place, char *end, size_t parts, char *const *data, const size_t *bytes)
{
    for (size_t i = 0, at = 0, slice; i < parts; i++) {
        slice = node_slice(n, bytes[i]);
        ((Part *)end)[-1 - (ptrdiff_t)i] = (Part){at, slice};
        node_put(n, place + at, data[i] + (slice ? n->at : 0), slice);
        at += (slice + LINE - 1) / LINE * LINE;
    }
}

/* Put the parts into this rank's slot and meet. All ranks get the same error, which ends the operation. An error of
 * node_take is this rank's alone: it still takes part in the other rounds. */
static inline int node_post(Node *n, uint64_t call, size_t parts, char *const *data, const size_t *bytes)
{
    int fits = node_filling(n, parts, bytes) <= n->slot, code = node_next(n, SETS);
    if (code)
        return code;
    char *slot = node_slot(n, n->number, n->rank);
    if (fits)
        node_fill(n, slot, slot + n->stride, parts, data, bytes);
    return node_meet_filled(n, call, fits ? n->largest + n->at : NODE_TOO_LARGE);
}

/* Put the parts into this rank's cell or, if they are larger, its slot, and don't meet: a rank that takes them calls
 * node_hear. Return NODE_LEAVES if they fit into neither. */
static inline int node_give(Node *n, uint64_t call, size_t parts, char *const *data, const size_t *bytes)
{
    size_t filling = node_filling(n, parts, bytes);
    int in_cell = filling + parts * sizeof(Part) <= sizeof n->cells->data, fits = filling <= n->slot;
    int code = node_next(n, in_cell ? CELLS : SETS);
    if (code)
        return code;
    Cell *cell = node_cell(n, n->rank);
    char *place = in_cell ? cell->data : node_slot(n, n->number, n->rank);
    if (fits)
        node_fill(n, place, in_cell ? (char *)(cell + 1) : place + n->stride, parts, data, bytes);
    if (!in_cell) {
        node_show(n, call, fits ? 0 : NODE_TOO_LARGE, 1);
        return fits ? 0 : NODE_LEAVES;
    }
    cell->number = n->number;
    cell->call = call;
    node_raise(n, n->rank, offsetof(Flags, begun), 1);
    return 0;
}

static inline Cell *node_given(Node *n, int rank) /* the cell that has a rank's parts; NULL: its slot has them */
{
    return n->cells && node_cell(n, rank)->number == n->number ? node_cell(n, rank) : NULL;
}

/* Wait until a rank has given its parts. Return NODE_LEAVES if they did not fit. */
static inline int node_hear(Node *n, uint64_t call, int rank)
{
    int code = node_wait(n, &n->flags[rank].begun, n->number);
    if (code)
        return code;
    Cell *cell = node_given(n, rank);
    if (cell ? cell->call != call : !node_calls(n, rank, call)) {
        n->differing = rank;
        return NODE_DIFFERS;
    }
    return cell || n->flags[rank].count[n->number & 1] != NODE_TOO_LARGE ? 0 : NODE_LEAVES;
}

/* Return this round's slice of a part of a rank; NULL if its size differs. */
static inline const char *node_part(Node *n, int rank, size_t part, size_t bytes)
{
    Cell *cell = node_given(n, rank);
    const char *place = cell ? cell->data : node_slot(n, n->number, rank);
    const Part *found = (const Part *)(cell ? (char *)(cell + 1) : place + n->stride) - 1 - part;
    if (found->bytes == node_slice(n, bytes))
        return place + found->at;
    n->differing = rank;
    return NULL;
}

static inline int node_take(Node *n, int rank, size_t part, char *out, size_t bytes)
{
    const char *found = node_part(n, rank, part, bytes);
    if (found == NULL)
        return NODE_DIFFERS;
    size_t slice = node_slice(n, bytes);
    copy_bytes(out + (slice ? n->at : 0), found, slice);
    return 0;
}

/* Reduce part `part` of ranks 0 to `ranks` - 1, in rank order. `own`: the rank whose values are in `out`, or -1. */
static inline int node_take_reduced(Node *n, const Fold *fold, int ranks, size_t part, char *out, size_t bytes, int own)
{
    size_t slice = node_slice(n, bytes);
    Folded folded;
    char apart[NODE_BLOCK];
    for (int rank = 0; rank < ranks; rank++)
        if (rank != own && node_part(n, rank, part, bytes) == NULL)
            return NODE_DIFFERS;
    for (size_t done = 0, block; ranks && done < slice; done += block) {
        block = fold_block(fold, slice - done);
        char *place = out + n->at + done;
        char *into = own > 1 && own < ranks ? apart : place; /* the own values are needed after those of other ranks */
        for (int rank = 0; rank < ranks; rank++)
            fold_next(fold, &folded, rank, into, rank == own ? place : node_part(n, rank, part, bytes) + done, block);
        fold_end(fold, &folded, ranks, into, block);
        if (into == apart)
            copy_bytes(place, apart, block);
    }
    return 0;
}

/* The root does not wait: it is at most one operation ahead, and notices in its next operation (node_next) if calls
 * differ. In rounds it meets the others first: otherwise it would take more numbers than they do. */
static inline int node_broadcast(Node *n, uint64_t call, int root, char *x, size_t bytes)
{
    size_t at = 0;
    int code;
    if (n->cells && bytes <= node_cell_room()) {
        node_begin(n, 1, 0);
        code = node_give(n, call, n->rank == root, &x, &bytes);
        if (code || n->rank == root || (code = node_hear(n, call, root)))
            return code;
        return node_take(n, root, 0, x, bytes);
    }
    do {
        size_t part = bytes - at < n->slot ? bytes - at : n->slot;
        if ((code = node_next(n, SETS)))
            return code;
        if (n->rank == root)
            node_put(n, node_slot(n, n->number, root), x + at, part);
        node_show(n, call, bytes + at, n->rank == root);
        if (n->below || at == 0 && bytes > n->slot) {
            if ((code = node_meet(n)))
                return code;
        } else if (n->rank != root) {
            if ((code = node_wait(n, &n->flags[root].begun, n->number)))
                return code;
            if ((code = node_differs(n, root)))
                return code;
        }
        if (n->rank != root)
            copy_bytes(x + at, node_slot(n, n->number, root), part);
        at += part;
    } while (at < bytes);
    return 0;
}

static inline int node_barrier(Node *n, uint64_t call, uint64_t count)
{
    int code = node_next(n, SETS);
    if (code)
        return code;
    node_show(n, call, count, 0);
    return node_meet(n);
}

#endif
