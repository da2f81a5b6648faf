/* How ranks of a node meet through memory that they share: flags, slots, and waiting. No Python, no MPI.
 *
 * Each rank has one slot for its values in each of two sets, which alternate by operation; there is one result. A rank
 * stores the number n of an operation in its flag to say "my slot has the values of operation n, and I have ended
 * operation n - 1". So a rank that has read at least n - 1 in all flags may write into the set of operation n. Flags
 * are C11 atomics: stored with release after the values, loaded with acquire before them.
 *
 * Beside its flag a rank writes its call and its round. So if calls differ, all ranks get an error and have taken one
 * number each: the next operation works again. After an MPI error they may have taken different numbers, and the
 * memory can't be used any more.
 *
 * Many ranks meet in a tree: otherwise each rank would load the flags of all others, which their cores have just
 * written. A rank stores the number in `arrived` when it and all ranks below it have begun, and in `released` when it
 * knows that all ranks have. Each operation in a tree meets, so the next set is always free.
 */
#ifndef HPCCOMM_MEET_H
#define HPCCOMM_MEET_H

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cpu.h"
#include "sleep.h"

#ifndef LEAST_STREAMED
#define LEAST_STREAMED (64 << 10) /* bytes */
#endif
#ifndef NODE_LOADS
#define NODE_LOADS(is_of_another_rank) ((void)0) /* tests count the uses of lines that other ranks write */
#endif

enum { NODE_DIFFERS = -1, NODE_LEAVES = -2, SETS = 2, CELLS = 64, YIELDS_BEFORE_PROGRESS = 4, NODE_PAGE = 4096 };

typedef struct {
    _Alignas(LINE) _Atomic uint64_t begun;
    uint64_t number[SETS]; /* one of each for each set: others may still compare the previous one */
    uint64_t call[SETS];   /* collective, root or op, dtype */
    uint64_t count[SETS];
    _Atomic uint64_t arrived;
    _Alignas(LINE) _Atomic uint64_t reduced;
    _Atomic uint64_t claimed; /* halves.h: the last operation in which a rank has claimed to reduce this rank's share */
    Sleepers sleepers;        /* of all ranks, in rank 0's flags */
    _Atomic uint64_t released;
    uint64_t differing; /* the last operation in which a call below differs; once released: in which any call does */
} Flags;

typedef struct {
    uint64_t number, call;
    char data[1024 - 2 * sizeof(uint64_t)];
} Cell;

/* Times of node_put on this rank. */
typedef struct {
    uint64_t calls, cost[2]; /* nanoseconds of 1 MiB through the caches, and past them */
} Ways;

typedef struct {
    Flags *flags;
    Cell *cells;      /* NULL: no rank goes on before the others */
    char *slots;      /* the result comes first */
    size_t slot, stride; /* bytes: of a slot's values, from slot to slot */
    size_t one_phase; /* if all ranks' bytes together are at most this, each rank reduces everything */
    int rank, ranks;
    const int *below;   /* ranks below this one in the tree; NULL: there is no tree (ranks that may sleep have none) */
    int ranks_below, above; /* above: the rank; -1 at the tree's root, which is rank 0 */
    int looks;                 /* polls before the core is yielded to other processes */
    int yields;                /* of the core before this rank sleeps; negative, on all ranks: it never sleeps */
    uint64_t number, settled;  /* the last operation; the last that all ranks are known to have begun */
    int (*progress)(void *);   /* called while waiting, for MPI's progress; returns 0 or MPI's error code */
    void *context;
    int differing; /* the rank whose call differs; -1 - rank: whose call of the operation before did */
    Ways ways;
    size_t at, room, largest; /* of parts: this round's first byte and most bytes, the largest part; see node_begin */
} Node;

/* Rank 0's part of the memory has flags and cells, the result and rank 0's slots; every other part its rank's slots. */
static inline size_t node_flags_bytes(int ranks, int has_cells)
{
    size_t bytes = (size_t)ranks * (sizeof(Flags) + (has_cells ? CELLS * sizeof(Cell) : 0));
    return (bytes + NODE_PAGE - 1) / NODE_PAGE * NODE_PAGE;
}

static inline size_t node_bytes(int rank, int ranks, int has_cells, size_t slot)
{
    return (slot + NODE_PAGE) * (rank ? SETS : SETS + 1) + (rank ? 0 : node_flags_bytes(ranks, has_cells));
}

static inline void node_map(Node *n, char *memory /* flags and cells are zero */, int has_cells, size_t slot)
{
    n->flags = (Flags *)memory;
    n->cells = has_cells ? (Cell *)(n->flags + n->ranks) : NULL;
    n->slots = memory + node_flags_bytes(n->ranks, has_cells);
    n->slot = slot;
    n->stride = slot + NODE_PAGE; /* the last bytes are for the places of a list's parts */
}

static inline char *node_slot(Node *n, uint64_t number, int rank)
{
    NODE_LOADS(rank != n->rank);
    return n->slots + (1 + SETS * (size_t)rank + (number & 1)) * n->stride;
}

static inline Cell *node_cell(Node *n, int rank)
{
    return &n->cells[(size_t)rank * CELLS + n->number % CELLS];
}

/* Whether the next values go past the caches; `ways` counts the calls. The first calls take turns, later one in 128. */
static inline int ways_next(Ways *w)
{
    int streams = 3 * w->cost[1] < 2 * w->cost[0];
    w->calls++;
    return w->calls <= 8 ? w->calls & 1 : w->calls % 128 ? streams : !streams;
}

/* Note the time of `bytes` bytes; a single interrupt at most doubles the cost known so far. */
static inline void ways_took(Ways *w, int streams, uint64_t nanoseconds, size_t bytes)
{
    uint64_t took = (nanoseconds << 20) / bytes, known = w->cost[streams];
    w->cost[streams] = known == 0 || took < 2 * known ? took : 2 * known;
}

static inline uint64_t node_time(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* Copy values to memory that other ranks read, as this rank has found faster: through the caches or past them. A line
 * that a distant core has read is slow to write and to read again through the caches. */
static inline void node_put(Node *n, char *to, const char *from, size_t bytes)
{
    if (bytes < LEAST_STREAMED || !has_avx2) {
        copy_bytes(to, from, bytes);
        return;
    }
    int streams = ways_next(&n->ways);
    uint64_t began = node_time();
    (streams ? stream_bytes : copy_by_vectors)(to, from, bytes);
    ways_took(&n->ways, streams, node_time() - began, bytes);
}

/* Both sets share it: a rank writes into it after all ranks have begun, hence have copied out the previous result. */
static inline char *node_result(Node *n)
{
    return n->slots;
}

static inline void node_sleep(Node *n, _Atomic uint64_t *flag, uint64_t number)
{
    Sleepers *s = &n->flags->sleepers;
    uint32_t seen = sleepers_enter(s);
    if (atomic_load(flag) < number)
        sleepers_sleep(s, seen);
    sleepers_leave(s);
}

static inline int node_wait(Node *n, _Atomic uint64_t *flag, uint64_t number)
{
    NODE_LOADS(1);
    int code = 0, looks = 0, yields = n->yields;
    while (atomic_load_explicit(flag, memory_order_acquire) < number && !code) {
        if (looks < n->looks) {
            looks++;
            PAUSE();
            continue;
        }
        if (looks == n->looks) {
            looks++;
            node_waiting++;
        }
        if (node_is_ending)
            break;
        code = yields > 0 && yields % YIELDS_BEFORE_PROGRESS ? 0 : n->progress(n->context);
        if (!code && yields == 0)
            node_sleep(n, flag, number);
        else if (!code)
            sched_yield();
        yields -= yields > 0;
    }
    if (looks > n->looks) {
        node_waiting--;
        while (node_is_ending)
            pause();
    }
    return code;
}

/* Store n->number in a flag, which is `field` bytes from the beginning of the flags of `rank`. Only the last of all
 * ranks wakes the sleepers, because they need this flag of all ranks; except if `is_awaited`. */
static inline void node_raise(Node *n, int rank, size_t field, int is_awaited)
{
#define FLAG_OF(rank) ((_Atomic uint64_t *)((char *)&n->flags[rank] + field))
    if (n->yields < 0) {
        atomic_store_explicit(FLAG_OF(rank), n->number, memory_order_release);
        return;
    }
    atomic_store(FLAG_OF(rank), n->number);
    if (!sleepers_any(&n->flags->sleepers))
        return;
    for (int other = 0; !is_awaited && other < n->ranks; other++)
        if (atomic_load(FLAG_OF(other)) < n->number)
            return;
    sleepers_wake(&n->flags->sleepers);
#undef FLAG_OF
}

/* Announce operation n->number, whose values are in this rank's slot. `is_awaited`: ranks may wait for this one alone. */
static inline void node_show(Node *n, uint64_t call, uint64_t count, int is_awaited)
{
    Flags *mine = &n->flags[n->rank];
    mine->number[n->number & 1] = n->number;
    mine->call[n->number & 1] = call;
    mine->count[n->number & 1] = count;
    node_raise(n, n->rank, offsetof(Flags, begun), is_awaited);
}

/* Whether a rank that has begun operation n->number has shown it in its flags, as this call. */
static inline int node_calls(Node *n, int rank, uint64_t call)
{
    const Flags *other = &n->flags[rank];
    return other->number[n->number & 1] == n->number && other->call[n->number & 1] == call;
}

#define NODE_REFUSED UINT64_MAX /* the call of a rank that takes no part, because calls of the operation before differ */

/* Whether a rank's call of operation `number`, shown in its flags, was another one. */
static inline int node_differed(Node *n, int rank, uint64_t number)
{
    const Flags *mine = &n->flags[n->rank], *other = &n->flags[rank];
    int set = number & 1;
    return mine->number[set] == number && other->number[set] == number && mine->call[set] != other->call[set]
        && mine->call[set] != NODE_REFUSED && other->call[set] != NODE_REFUSED;
}

static inline int node_differs(Node *n, int rank)
{
    int set = n->number & 1;
    Flags *mine = &n->flags[n->rank];
    if (node_calls(n, rank, mine->call[set]) && n->flags[rank].count[set] == mine->count[set])
        return 0;
    n->differing = rank;
    return NODE_DIFFERS;
}

/* Wait until all ranks have begun operation n->number, and compare their calls. */
static inline int node_look(Node *n)
{
    int code, differs = 0;
    for (int rank = 0; rank < n->ranks; rank++) {
        if ((code = node_wait(n, &n->flags[rank].begun, n->number)))
            return code;
        differs = differs ? differs : node_differs(n, rank);
    }
    n->settled = n->number;
    return differs;
}

/* Wait until all ranks below this one in the tree have begun operation n->number. */
static inline int node_climb(Node *n)
{
    Flags *mine = &n->flags[n->rank];
    int code, differs = 0;
    for (int i = 0; i < n->ranks_below; i++) {
        Flags *below = &n->flags[n->below[i]];
        if ((code = node_wait(n, &below->arrived, n->number)))
            return code;
        differs |= below->differing == n->number || node_differs(n, n->below[i]);
    }
    if (differs)
        mine->differing = n->number;
    atomic_store_explicit(&mine->arrived, n->number, memory_order_release);
    return 0;
}

/* Wait until all ranks have begun operation n->number, and release those below; compare the calls like node_look. */
static inline int node_descend(Node *n)
{
    Flags *mine = &n->flags[n->rank];
    if (n->above >= 0) {
        int code = node_wait(n, &n->flags[n->above].released, n->number);
        if (code)
            return code;
        if (n->flags[n->above].differing == n->number)
            mine->differing = n->number;
    }
    atomic_store_explicit(&mine->released, n->number, memory_order_release);
    n->settled = n->number;
    return mine->differing == n->number ? node_look(n) : 0;
}

static inline int node_meet(Node *n)
{
    int code = n->below ? node_climb(n) : node_look(n);
    return code || !n->below ? code : node_descend(n);
}

/* Take the next number, and wait until its set, of SETS, or its cell, of CELLS, is free: the operation `sets` before it
 * has ended on all ranks. A rank that must wait for a cell waits until half of them are free. A broadcast's root has not
 * seen the others' calls: with SETS all ranks compare those of the operation before, and all get the same error. */
static inline int node_next(Node *n, uint64_t sets)
{
    int code, differs = 0;
    uint64_t before = n->number++, begun = n->number > sets / 2 ? n->number - sets / 2 : 0;
    if (n->settled + sets > n->number)
        return 0;
    for (int rank = 0; rank < n->ranks; rank++) {
        if ((code = node_wait(n, &n->flags[rank].begun, begun)))
            return code;
        if (begun == before && node_differed(n, rank, before)) {
            differs = NODE_DIFFERS;
            n->differing = -1 - rank;
        }
    }
    n->settled = begun;
    if (differs)
        node_show(n, NODE_REFUSED, 0, 1);
    return differs;
}

#endif
