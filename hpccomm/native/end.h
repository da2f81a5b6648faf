/* The end of the process: threads of the program that still wait inside MPI stay where they are, before MPI_Finalize takes
   away what they look at: they would crash in it (MPICH 5.0, Open MPI 5.0), and with them the process.

   A signal stops them. They must not hold a lock of MPI's then, so another thread calls MPI all the time; where that does
   not go on, they do, for a moment, and are stopped again. (It also makes threads let the lock go by a call of the system,
   at whose end signals come.) */
#pragma once
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#define END_SIGNAL (SIGRTMAX - 2)
#endif

enum { END_THREADS = 256, END_TRIES = 200, END_STOP = 2000, END_PROBE = 20 };

static int end_threads[END_THREADS], end_count;      /* the system's numbers of the threads */
static _Atomic int end_stopped, end_turn;            /* how many are stopped; for how long */
static _Atomic int end_calls, end_is_over;           /* of MPI, that have ended; whether no more are wanted */

static void end_sleep(void)
{
    const struct timespec moment = {0, 1000000};
    nanosleep(&moment, NULL);
}

static void end_stop(int number)
{
    int error = errno, turn = end_turn;
    (void)number;
    end_stopped++;
    while (end_turn == turn)
        end_sleep();
    end_stopped--;
    errno = error;
}

typedef struct {
    int (*call)(void *);  /* of MPI */
    void *argument;
} EndProbe;

static void *end_probe(void *argument)
{
    EndProbe *probe = argument;
    while (!end_is_over) {
        probe->call(probe->argument);
        end_calls++;
    }
    return NULL;
}

/* Wait until a number is at least as large, or as small, for some looks. */
static int end_waits(_Atomic int *number, int least, int most, int looks)
{
    for (int look = 0; (*number < least || *number > most) && look < looks; look++)
        end_sleep();
    return *number >= least && *number <= most;
}

static void end_stop_threads(int (*call)(void *), void *argument)
{
#ifdef END_SIGNAL
    struct sigaction action = {.sa_handler = end_stop, .sa_flags = SA_RESTART};
    EndProbe probe = {call, argument};
    pthread_t prober;
    if (end_count == 0 || sigaction(END_SIGNAL, &action, NULL) != 0)
        return;
    if (pthread_create(&prober, NULL, end_probe, &probe) != 0)
        return;
    for (int tries = 0; tries < END_TRIES; tries++) {
        int sent = 0;
        for (int i = 0; i < end_count; i++)
            sent += syscall(SYS_tgkill, getpid(), end_threads[i], END_SIGNAL) == 0;  /* others have ended */
        end_waits(&end_stopped, sent, INT_MAX, END_STOP);
        int calls = end_calls;
        if (end_waits(&end_calls, calls + 2, INT_MAX, END_PROBE))
            break;
        end_turn++;
        end_waits(&end_stopped, 0, 0, END_STOP);
    }
    end_is_over = 1;
    pthread_join(prober, NULL);
#endif
}
