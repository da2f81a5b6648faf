/* Waiting for other ranks of a node where ranks outnumber cores: sleep in the kernel, so that another rank has the core.
 *
 * sched_yield doesn't give the core away if each rank is in a session of its own, as under MPICH's mpiexec: Linux
 * schedules sessions, not processes (autogroup in sched(7)). So a rank that finds its condition false sleeps on a futex.
 * A rank that makes the condition true first stores this, then looks for sleepers; a sleeper first counts itself, then
 * checks its condition again. All four accesses are sequentially consistent, so one of the two ranks sees the other.
 * A sleep ends after at most a millisecond: another rank's large message may need this rank's progress in MPI. So a
 * lost wake-up would cost a millisecond.
 */
#ifndef HPCCOMM_SLEEP_H
#define HPCCOMM_SLEEP_H

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

enum { LONGEST_SLEEP = 1000000, NAP = 50000 /* nanoseconds */, LOOKS_BEFORE_NAP = 16 };

/* Zeroed, in memory that the ranks share. */
typedef struct {
    _Atomic uint32_t sleeping, wakes;
} Sleepers;

/* Sleep where nobody wakes the sleeper. */
static inline void nap(void)
{
    const struct timespec moment = {0, NAP};
    nanosleep(&moment, NULL);
}

/* Count this rank as asleep, and return the argument of sleepers_sleep. The caller then checks its condition again. */
static inline uint32_t sleepers_enter(Sleepers *s)
{
    uint32_t seen = atomic_load(&s->wakes);
    atomic_fetch_add(&s->sleeping, 1);
    return seen;
}

/* Sleep, unless another rank has woken the sleepers since sleepers_enter. It may also return for no reason. */
static inline void sleepers_sleep(Sleepers *s, uint32_t seen)
{
#if defined(SYS_futex)
    const struct timespec longest = {0, LONGEST_SLEEP};
    syscall(SYS_futex, &s->wakes, FUTEX_WAIT, seen, &longest, NULL, 0);
#else
    (void)s, (void)seen;
    nap();
#endif
}

static inline void sleepers_leave(Sleepers *s)
{
    atomic_fetch_sub(&s->sleeping, 1);
}

/* Whether somebody sleeps, after a store that may end the sleep. */
static inline int sleepers_any(Sleepers *s)
{
    return atomic_load(&s->sleeping) != 0;
}

static inline void sleepers_wake(Sleepers *s)
{
    atomic_fetch_add(&s->wakes, 1);
#if defined(SYS_futex)
    syscall(SYS_futex, &s->wakes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

static _Atomic int node_waiting, node_is_ending; /* threads that wait for other ranks; whether they must stop */
static int ranks_outnumber_cores;                /* on this node */

/* Wait for a request by MPI_Test, in a thread that node_end may stop; it can't stop a thread inside MPI_Wait. */
static inline int node_poll(int (*test)(uintptr_t *, int *, void *), uintptr_t *request, void *status)
{
    int code = 0, is_done = 0, looks = 0;
    node_waiting++;
    while (!node_is_ending && !(code = test(request, &is_done, status)) && !is_done)
        if (!ranks_outnumber_cores || ++looks % LOOKS_BEFORE_NAP)
            sched_yield();
        else
            nap();
    node_waiting--;
    while (node_is_ending)
        pause();
    return code;
}

#endif
