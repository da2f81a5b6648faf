/* The protocol of node.h with threads as ranks, for ThreadSanitizer and to check every result.
 *
 *     node_threads RANKS ROUNDS YIELDS PATIENCE
 *
 * YIELDS is -2 (no rank sleeps, and the ranks meet in a tree), -1 (no rank sleeps) or 0. A sleep of PATIENCE seconds is
 * an error: a wake-up was lost. ROUNDS is 0: print how often the ranks load a line of another rank, and end.
 */
#define _GNU_SOURCE
static _Thread_local long loads;
#define LEAST_STREAMED 256
#define NODE_LOADS(is_of_another_rank) (loads += (is_of_another_rank))
#include "halves.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { SLOT = 1024, LARGEST = 5000 /* doubles */, OWN = 200 /* doubles, of an operation in two halves */, MOST = 256 /* ranks */ };

static int ranks, rounds, yields;
static struct timespec patience;
static _Atomic long sleeps, wakes;
static char *memory, *halves;

/* In the place of the C library's: count sleeps and wakes. In hpccomm a lost wake-up costs a millisecond; here it fails. */
long syscall(long number, ...)
{
    static _Atomic(long (*)(long, ...)) real;
    va_list rest;
    va_start(rest, number);
    void *word = va_arg(rest, void *);
    int what = va_arg(rest, int);
    unsigned value = va_arg(rest, unsigned);
    va_end(rest);
    if (!real)
        real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    *(what == FUTEX_WAIT ? &sleeps : &wakes) += 1;
    long code = real(number, word, what, value, what == FUTEX_WAIT ? &patience : NULL, NULL, 0);
    if (code < 0 && errno == ETIMEDOUT) {
        puts("wrong: a wake-up was lost");
        exit(1);
    }
    return code;
}

static int progress(void *context) /* an error of MPI, once, where `context` asks for it */
{
    int *error = context, code = error ? *error : 0;
    if (error)
        *error = 0;
    return code;
}

/* Return the rank above another in the tree: domains have about as many ranks as there are domains. */
static int above(int rank)
{
    int together = 2;
    while (together * together < ranks)
        together++;
    return rank == 0 ? -1 : rank % together ? rank - rank % together : 0;
}

static Node node_of(int rank, int *error)
{
    static int below[MOST][MOST];
    Node node = {.one_phase = rounds ? 512 : 16384, .rank = rank, .ranks = ranks, .looks = 10, .yields = yields, .progress = progress,
                 .context = error};
    node_map(&node, memory, yields >= 0, SLOT);
    for (int other = 0; yields == -2 && other < ranks; other++)
        if (above(other) == rank)
            below[rank][node.ranks_below++] = other;
    if (yields == -2)
        node.below = below[rank], node.above = above(rank);
    return node;
}

static double value(int rank, int round, size_t i) { return (double)((rank + 1) * ((int)(i % 97) + round % 13)); }

static void check(int is_right, const char *what, int round)
{
    if (!is_right) {
        printf("wrong: %s in round %d\n", what, round);
        exit(1);
    }
}

/* Operations in which a rank waits only for those whose values it takes, and one rank takes none; the last are large, or
 * too large, now and then. */
static void ahead(Node *n, int round)
{
    static const size_t counts[] = {1, 5, 40, 100, LARGEST};
    int giver = round / 30 % ranks;
    double *mine = malloc(sizeof(double) * LARGEST), *taken = malloc(sizeof(double) * LARGEST);
    unsigned seed = (unsigned)round;
    for (int operation = 0; operation < 3 * CELLS; operation++) {
        int which = rand_r(&seed) % (giver ? 2 : 3), root = which ? (giver + 1) % ranks : giver, code = 0;
        size_t count = counts[rand_r(&seed) % (operation < 2 * CELLS ? 3 : 5)], bytes = count * sizeof(double);
        char *own = (char *)mine;
        for (size_t i = 0; i < count; i++)
            mine[i] = value(n->rank, operation, i);
        if (which == 0) {
            check(node_broadcast(n, 20, root, own, bytes) == 0, "broadcast ahead", operation);
            for (size_t i = 0; i < count; i++)
                check(mine[i] == value(root, operation, i), "values of a broadcast ahead", operation);
            continue;
        }
        node_begin(n, 1, 0);
        code = node_give(n, 21, 1, &own, &bytes);
        check(code == (bytes > SLOT ? NODE_LEAVES : 0), "giving", operation);
        if (which == 1) { /* a gather */
            for (int r = 0; n->rank == root && r < ranks; r++) {
                check(node_hear(n, 21, r) == code, "hearing", operation);
                check(code || node_take(n, r, 0, (char *)taken, bytes) == 0, "taking", operation);
                for (size_t i = 0; code == 0 && i < count; i++)
                    check(taken[i] == value(r, operation, i), "values of a gather ahead", operation);
            }
            continue;
        }
        for (int r = 0; r <= n->rank; r++) /* a scan */
            check(node_hear(n, 21, r) == code, "hearing", operation);
        check(code || node_take_reduced(n, sum_f8, n->rank + 1, 0, (char *)taken, bytes, -1) == 0, "reducing", operation);
        for (size_t i = 0; code == 0 && i < count; i++) {
            double sum = 0;
            for (int r = 0; r <= n->rank; r++)
                sum += value(r, operation, i);
            check(taken[i] == sum, "values of a scan ahead", operation);
        }
    }
    /* a giver that differs: without its number, its call in an earlier barrier would be taken for this one */
    check(node_barrier(n, 22, 0) == 0 && node_barrier(n, 22, 0) == 0, "barriers", round);
    int code = n->rank ? node_barrier(n, 22, 0) : node_give(n, 21, 0, NULL, NULL);
    check(code == (n->rank ? NODE_DIFFERS : 0), "an operation ahead that differs", round);
    free(mine);
    free(taken);
}

static void *run(void *number)
{
    int rank = (int)(intptr_t)number;
    Node node = node_of(rank, NULL);
    Node own = node;
    node_make_halves(&own, halves, OWN * sizeof(double));
    double *x = malloc(sizeof(double) * LARGEST * (size_t)ranks), *y = malloc(sizeof(double) * LARGEST * (size_t)ranks);
    double z[OWN];
    unsigned seed = 1;
    for (int round = 0; round < rounds; round++) {
        int operation = rand_r(&seed) % 8, root = rand_r(&seed) % ranks;
        size_t count = (size_t)(rand_r(&seed) % 3 ? rand_r(&seed) % 40 : rand_r(&seed) % LARGEST);
        if (operation == 5 && count > 40) /* no room: all leave it to MPI */
            count = LARGEST;
        size_t count_own = (size_t)(rand_r(&seed) % (round % 2 ? OWN : 20));
        for (size_t i = 0; i < count_own; i++)
            z[i] = value(rank, round, i);
        check(node_start(&own, 11, (char *)z, sizeof(double) * count_own, 0, 0) == 0, "start", round);
        int code = 0;
        size_t all = count * (size_t)ranks;
        for (size_t i = 0; i < (operation == 3 || operation == 5 || operation == 7 ? all : count); i++)
            x[i] = value(rank, round, i);
        switch (operation) {
        case 0:
            code = node_all_reduce(&node, 1, sum_f8, sizeof(double), (char *)x, count);
            for (size_t i = 0; i < count; i++) {
                double sum = 0;
                for (int r = 0; r < ranks; r++)
                    sum += value(r, round, i);
                check(x[i] == sum, "all_reduce", round);
            }
            break;
        case 1:
            code = node_broadcast(&node, 2, root, (char *)x, count * sizeof(double));
            for (size_t i = 0; i < count; i++)
                check(x[i] == value(root, round, i), "broadcast", round);
            break;
        case 2:
            code = node_all_gather(&node, 3, (char *)y, (char *)x, count * sizeof(double));
            for (size_t i = 0; i < all; i++)
                check(y[i] == value((int)(i / count), round, i % count), "all_gather", round);
            break;
        case 3:
            code = node_reduce_scatter(&node, 4, sum_f8, sizeof(double), (char *)y, (char *)x, count);
            for (size_t i = 0; i < count; i++) {
                double sum = 0;
                for (int r = 0; r < ranks; r++)
                    sum += value(r, round, (size_t)rank * count + i);
                check(y[i] == sum, "reduce_scatter", round);
            }
            break;
        case 5: { /* all_to_all: each rank's parts have sizes of their own */
            char *parts[16];
            size_t sizes[16];
            for (int r = 0; r < ranks; r++) {
                parts[r] = (char *)(x + (size_t)r * count);
                sizes[r] = sizeof(double) * (count > 40 ? count : (count + (size_t)r) % (count + 1));
            }
            node_begin(&node, (size_t)ranks, 0);
            code = node_post(&node, 8, (size_t)ranks, parts, sizes);
            if (count > 40) {
                check(code == NODE_LEAVES, "all_to_all without room", round);
                code = 0;
                break;
            }
            size_t expected = (count + (size_t)rank) % (count + 1);
            for (int r = 0; r < ranks; r++) {
                code = code || node_take(&node, r, (size_t)rank, (char *)y, sizeof(double) * expected);
                for (size_t i = 0; i < expected; i++)
                    check(y[i] == value(r, round, (size_t)rank * count + i), "all_to_all", round);
            }
            break;
        }
        case 6: { /* scan, in y; the last rank gives nothing */
            char *own = (char *)y;
            size_t size = sizeof(double) * count, given = rank < ranks - 1 ? size : 0;
            memcpy(y, x, size);
            node_begin(&node, 1, size ? size : 1);
            do {
                code = node_post(&node, 9, 1, &own, &given);
                code = code || node_take_reduced(&node, sum_f8, rank + 1, 0, (char *)y, size, rank);
            } while (code == 0 && node_goes_on(&node));
            for (size_t i = 0; i < count; i++) {
                double sum = 0;
                for (int r = 0; r <= rank; r++)
                    sum += value(r, round, i);
                check(y[i] == sum, "scan", round);
            }
            break;
        }
        case 7: { /* reduce_scatter of a list, in as many rounds as it takes: the first rank's part is half as large */
            char *parts[16];
            size_t sizes[16], largest = 1, size;
            for (int r = 0; r < ranks; r++) {
                parts[r] = (char *)(x + (size_t)r * count);
                sizes[r] = sizeof(double) * (r ? count : count / 2);
                largest = sizes[r] > largest ? sizes[r] : largest;
            }
            size = sizes[rank];
            node_begin(&node, (size_t)ranks, largest);
            do {
                code = node_post(&node, 10, (size_t)ranks, parts, sizes);
                code = code || node_take_reduced(&node, sum_f8, ranks, (size_t)rank, (char *)y, size, -1);
            } while (code == 0 && node_goes_on(&node));
            for (size_t i = 0; i < size / sizeof(double); i++) {
                double sum = 0;
                for (int r = 0; r < ranks; r++)
                    sum += value(r, round, (size_t)rank * count + i);
                check(y[i] == sum, "reduce_scatter of a list", round);
            }
            break;
        }
        default:
            code = node_barrier(&node, 5, 0);
        }
        check(code == 0, "code", round);
        if (round % 50 == 49) { /* ranks that differ hear of it, and go on */
            code = node_all_reduce(&node, rank == root ? 6 : 7, sum_f8, sizeof(double), (char *)x, 3);
            check(code == NODE_DIFFERS, "difference", round);
        }
        if (node.cells && round % 30 == 29)
            ahead(&node, round);
        check(node_meet(&own) == 0, "meeting", round);
        check(node_has_met(&own), "has met", round);
        check(node_take_all_reduced(&own, sum_f8, (char *)z, sizeof(double) * count_own) == 0, "taking", round);
        for (size_t i = 0; i < count_own; i++) {
            double sum = 0;
            for (int r = 0; r < ranks; r++)
                sum += value(r, round, i);
            check(z[i] == sum, "all_reduce in two halves", round);
        }
    }
    free(x);
    free(y);
    return NULL;
}

/* An operation of two rounds. */
static int in_rounds(Node *node, int operation)
{
    static double x[2][2 * SLOT], y[2][4 * SLOT];
    char *in = (char *)x[node->rank], *out = (char *)y[node->rank];
    size_t bytes = SLOT + LINE;
    int code;
    switch (operation) {
    case 0:
        return node_broadcast(node, 2, 1, in, bytes);
    case 1:
        return node_all_gather(node, 3, out, in, bytes);
    case 2:
        return node_reduce_scatter(node, 4, sum_f8, sizeof(double), out, in, bytes / sizeof(double));
    default:
        node_begin(node, 1, bytes);
        do
            code = node_post(node, 8, 1, &in, &bytes);
        while (code == 0 && node_goes_on(node));
        return code;
    }
}

static void *first_rank(void *operation)
{
    Node node = node_of(0, NULL);
    return (void *)(intptr_t)in_rounds(&node, (int)(intptr_t)operation);
}

/* Rank 1 leaves because of an error of MPI, and calls the same again, while rank 0 is in the second round. */
static void leave_and_call_again(int operation, size_t size)
{
    int error = 5;
    Node node = node_of(1, &error);
    pthread_t thread;
    void *code;
    memset(memory, 0, size);
    check(in_rounds(&node, operation) == 5, "leaving", operation);
    pthread_create(&thread, NULL, first_rank, (void *)(intptr_t)operation);
    check(in_rounds(&node, operation) == NODE_DIFFERS, "again", operation);
    pthread_join(thread, &code);
    check((int)(intptr_t)code == NODE_DIFFERS, "the other rank", operation);
}

static void *load(void *number)
{
    int rank = (int)(intptr_t)number;
    Node node = node_of(rank, NULL);
    double x[2] = {rank, 1};
    static _Atomic long most[3], all[3];
    static _Atomic int ended;
    for (int call = 0; call < 9; call++) {
        int operation = call / 3;
        loads = 0;
        x[0] = rank;
        check((operation == 0   ? node_barrier(&node, 1, 0)
               : operation == 1 ? node_all_reduce(&node, 2, sum_f8, sizeof *x, (char *)x, 1)
                                : node_broadcast(&node, 3, ranks - 1, (char *)x, sizeof x)) == 0, "code", operation);
        check(*x == (operation == 0 ? rank : operation == 1 ? ranks * (ranks - 1) / 2 : ranks - 1), "value", operation);
        if (call % 3 < 2) /* count those of the third call */
            continue;
        all[operation] += loads;
        for (long before = most[operation]; before < loads;)
            atomic_compare_exchange_weak(&most[operation], &before, loads);
    }
    if (++ended == ranks)
        for (int operation = 0; operation < 3; operation++)
            printf("%s: %ld of all ranks, %ld of one\n", (const char *[]){"barrier", "all_reduce", "broadcast"}[operation],
                   all[operation], most[operation]);
    return NULL;
}

static int other_rank_comes(void *flags)
{
    atomic_store(&((Flags *)flags)->begun, 1);
    return 0;
}

/* Without sleepers there is no system call; among sleepers only the last rank, or a broadcast's root, wakes them. */
static void count_wakes(size_t size)
{
    Node nodes[16];
    char x[SLOT] = {0};
    memset(memory, 0, size);
    for (int rank = 0; rank < ranks; rank++) {
        nodes[rank] = node_of(rank, NULL);
        nodes[rank].yields = 0;
    }
    for (int asleep = 0; asleep < 2; asleep++) {
        memset(memory, 0, node_flags_bytes(ranks, 1));
        nodes->flags->sleepers.sleeping = (uint32_t)asleep;
        for (int rank = 0; rank < ranks; rank++) {
            wakes = 0;
            nodes[rank].number = 1;
            node_show(&nodes[rank], 1, 0, 0);
            check(wakes == (asleep && rank == ranks - 1), "wakes of the rank", rank);
        }
        for (size_t bytes = 8; bytes <= SLOT; bytes *= SLOT / 8) { /* in a cell; in a slot */
            wakes = 0;
            check(node_broadcast(&nodes[1], 2, 1, x, bytes) == 0, "broadcast", 1);
            check(wakes == asleep, "wakes of the root", asleep);
            nodes[1].number = 1;
        }
        nodes[1].number = 0;
    }
    memset(memory, 0, size);
    nodes[0].progress = other_rank_comes; /* between the last look and the sleep */
    nodes[0].context = &nodes[0].flags[1];
    sleeps = 0;
    check(node_wait(&nodes[0], &nodes[0].flags[1].begun, 1) == 0 && sleeps == 0, "sleeping although it has come", 1);
}

/* Ranks take the faster way, follow a change within three calls, and do not follow one interrupt. */
static void choose_ways(void)
{
    Ways ways = {0};
    int took[2][2] = {{16, 25}, {90, 25}}; /* through the caches, past them: between near cores, between distant ones */
    for (int call = 0; call < 1000; call++) {
        int is_far = call >= 400 && call < 700, is_interrupted = call == 300;
        int streams = ways_next(&ways);
        int is_trial = call < 8 || call % 128 == 127, is_settling = call >= 400 && call < 403 || call >= 700 && call < 768;
        check(is_trial || is_settling || streams == is_far, "the way", call);
        ways_took(&ways, streams, (uint64_t)(is_interrupted ? 9999 : took[is_far][streams]), 1 << 20);
    }
}

int main(int argc, char **argv)
{
    if (argc < 5)
        return 2;
    yields = atoi(argv[3]);
    patience.tv_sec = atoi(argv[4]);
    ranks = atoi(argv[1]);
    rounds = atoi(argv[2]);
    has_avx2 = look_for_avx2() && ranks != 2; /* both loops are run */
    size_t size = ((size_t)ranks * node_bytes(0, ranks, 1, SLOT) + LINE - 1) / LINE * LINE;
    memory = aligned_alloc(LINE, size);
    memset(memory, 0, size);
    size_t size_of_halves = (node_halves_bytes(ranks, OWN * sizeof(double)) + LINE - 1) / LINE * LINE;
    halves = aligned_alloc(LINE, size_of_halves);
    memset(halves, 0, size_of_halves);
    pthread_t threads[MOST];
    for (int rank = 0; rank < ranks; rank++)
        pthread_create(&threads[rank], NULL, rounds ? run : load, (void *)(intptr_t)rank);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    if (rounds == 0)
        return 0;
    for (int operation = 0; ranks == 2 && operation < 4; operation++)
        leave_and_call_again(operation, size);
    yields = yields < -1 ? -1 : yields;
    check((sleeps > 0) == (yields >= 0) && (wakes > 0) == (yields >= 0), "sleeps and wakes", 0);
    count_wakes(size);
    choose_ways();
    free(memory);
    free(halves);
    puts("right");
    return 0;
}
