/* Two threads that speak for this process while a call of C holds the GIL, so that no thread of Python's can run: one asks
   for the GIL once a second, the other notices that it does not get it. That one says so on stderr while operations are
   unfinished, answers other ranks that ask for this one's report, and ends the job when a time limit has passed. It never
   takes the GIL, and calls nothing of Python's but faulthandler's handler of a signal, which needs no GIL.

   What it reads of operations is written with the GIL: nobody writes while it reads. Only the freeing of a group takes the
   mutex, for the moment in which the GIL is free again. */
#pragma once
#define _GNU_SOURCE
#include <Python.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HELD_NOTES = 8, HELD_RING = 64, HELD_PLACES = 2, HELD_STACK = 1 << 16, HELD_STATUS = 124,
       HELD_NOT_READY = 600 /* CUDA_ERROR_NOT_READY */ };

static const double HELD_LOOK = 0.25;  /* seconds between two looks at the GIL */
static const double HELD_FROM = 2.0;   /* seconds without the GIL from which on others are answered */
static const double HELD_TELLS = 5.0;  /* and from which on an unfinished operation is worth a word */
static const double HELD_CUDA = 1.0;   /* seconds for an answer of CUDA's */

typedef struct {  /* an operation that blocks, or whose end the GPU has not shown */
    char name[40];
    long long number;
    double began;  /* CLOCK_MONOTONIC; 0: none */
    void *event;   /* of the GPU's; NULL for one that blocks the host */
} HeldNote;

typedef struct HeldGroup {
    char key[40], name[80];
    double limit;                                    /* seconds */
    int ends_host, ends_gpu;                         /* whether an operation that takes longer ends the job */
    int path;                                        /* of its fast path in the ring; 0: none */
    const long long *counts[4];                      /* of the fast path: collectives, others; messages, others */
    HeldNote notes[HELD_NOTES];
    struct HeldGroup *next, *before;
} HeldGroup;

typedef struct {  /* a blocking operation in the ring of the compiled fast path */
    const char *name;
    long long number, began;  /* nanoseconds */
    int path;
} HeldRing;

static struct {
    pthread_mutex_t groups_lock, probing;
    HeldGroup *groups;
    int (*ring)(HeldRing *, int);
    int (*cuda_event_query)(void *);
    int rank, size, signal_number, stack_file;
    char package[1024], places[HELD_PLACES][1024];
    volatile int stops, asks;        /* asks: the prober waits for the GIL */
    volatile long long times;        /* that it has got it */
} held = {.groups_lock = PTHREAD_MUTEX_INITIALIZER, .probing = PTHREAD_MUTEX_INITIALIZER};

static double held_now(int clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void held_sleep(double seconds)
{
    struct timespec time = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
    while (nanosleep(&time, &time) != 0 && errno == EINTR) {}
}

/* -- groups, and what they are in: all of this with the GIL -- */

static void held_link(HeldGroup *group)
{
    pthread_mutex_lock(&held.groups_lock);
    group->next = held.groups;
    if (group->next) group->next->before = group;
    held.groups = group;
    pthread_mutex_unlock(&held.groups_lock);
}

static void held_unlink(HeldGroup *group)
{
    pthread_mutex_lock(&held.groups_lock);
    if (group->before) group->before->next = group->next; else held.groups = group->next;
    if (group->next) group->next->before = group->before;
    pthread_mutex_unlock(&held.groups_lock);
}

static int held_begin(HeldGroup *group, const char *name, long long number, void *event)
{
    for (int i = 0; i < HELD_NOTES; i++) {
        HeldNote *note = &group->notes[i];
        if (note->began == 0) {
            strncpy(note->name, name, sizeof note->name - 1);  /* whose last byte is 0, and stays so */
            note->number = number, note->event = event, note->began = held_now(CLOCK_MONOTONIC);
            return i;
        }
    }
    return -1;
}

/* -- text -- */

typedef struct { char *text; size_t length, room; } HeldText;

static void held_add(HeldText *to, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    size_t left = to->room - to->length;
    int added = vsnprintf(to->text + to->length, left, format, arguments);
    to->length += added < 0 ? 0 : (size_t)added < left ? (size_t)added : left - 1;
    va_end(arguments);
}

static void held_write(int file, const char *text, size_t length)
{
    while (length > 0) {
        ssize_t written = write(file, text, length);
        if (written < 0 && errno != EINTR) return;
        if (written > 0) text += written, length -= written;
    }
}

/* Put the stacks of all threads of Python's into `text`, as faulthandler writes them. */
static void held_stacks(char *text, size_t room)
{
    text[0] = 0;
    if (held.stack_file < 0 || ftruncate(held.stack_file, 0) != 0) return;
    lseek(held.stack_file, 0, SEEK_SET);
    pthread_kill(pthread_self(), held.signal_number);  /* has been handled when this returns */
    ssize_t length = pread(held.stack_file, text, room - 1, 0);
    text[length < 0 ? 0 : length] = 0;
}

/* Put "train.py:88 in load" into `place`, of the innermost frame of a thread's stack that is neither hpccomm's nor one of
   Python's own for threads; 0 without one, as in threads of hpccomm's. `waits`: whether the innermost of all is no such. */
static int held_place(const char *stack, const char *end, char *place, size_t room, int *waits)
{
    int first = 1;
    for (const char *line = stack, *stop; line < end && (stop = strchr(line, '\n')) != NULL; line = stop + 1) {
        char path[1024], function[256];
        int number;
        if (sscanf(line, "  File \"%1023[^\"]\", line %d in %255[^\n]", path, &number, function) != 3) continue;
        const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
        int ours = strncmp(path, held.package, strlen(held.package)) == 0 || strcmp(name, "threading.py") == 0;
        if (first) *waits = ours;
        first = 0;
        if (!ours) {
            snprintf(place, room, "%s:%d in %s", name, number, function);
            return 1;
        }
    }
    return 0;
}

static const char *held_next_thread(const char *text)
{
    const char *next = strstr(text, "hread 0x");
    return next == NULL ? NULL : next + 1;
}

/* Say in which line the GIL is held: that of the main thread, which faulthandler writes last, unless it waits in hpccomm.
   Put the stacks of the program's threads into `shown`. */
static void held_where(const char *stacks, char *place, size_t room, HeldText *shown)
{
    char here[512], last[512] = "", waiting[512] = "";
    for (const char *thread = held_next_thread(stacks), *next; thread != NULL; thread = next) {
        int waits = 0;
        next = held_next_thread(thread);
        const char *end = next ? next : thread + strlen(thread);
        if (!held_place(thread, end, here, sizeof here, &waits)) continue;
        snprintf(waits ? waiting : last, sizeof last, "%s", here);
        for (const char *line = strchr(thread, '\n') + 1, *stop; line < end && *line == ' '; line = stop + 1) {
            if ((stop = strchr(line, '\n')) == NULL) break;
            held_add(shown, "hpccomm: %.*s\n", (int)(stop - line), line);
        }
        held_add(shown, next ? "hpccomm:   in another thread:\n" : "");
    }
    snprintf(place, room, "%s", last[0] ? last : waiting[0] ? waiting : "an unknown line");
}

/* -- operations -- */

typedef struct { const HeldGroup *group; const char *name; long long number; double seconds; void *event; } HeldWait;

static int held_waits(HeldWait *found, int most)
{
    HeldRing ring[HELD_RING];
    int count = 0, in_ring = held.ring ? held.ring(ring, HELD_RING) : 0;
    double now = held_now(CLOCK_MONOTONIC);
    for (const HeldGroup *group = held.groups; group != NULL; group = group->next) {
        for (int i = 0; i < HELD_NOTES && count < most; i++) {
            const HeldNote *note = &group->notes[i];
            if (note->began != 0)
                found[count++] = (HeldWait){group, note->name, note->number, now - note->began, note->event};
        }
        for (int i = 0; i < in_ring && count < most; i++)
            if (group->path != 0 && ring[i].path == group->path)
                found[count++] = (HeldWait){group, ring[i].name, ring[i].number, now - 1e-9 * ring[i].began, NULL};
    }
    return count;
}

typedef struct { void *event; volatile int answer; } HeldQuery;  /* never freed: CUDA may keep it */

static void *held_query(void *given)
{
    HeldQuery *query = given;
    query->answer = held.cuda_event_query(query->event);
    return NULL;
}

/* Whether the GPU has not come to an event; so it is where CUDA does not answer, because a thread is inside it. */
static int held_gpu_waits(void *event)
{
    pthread_t thread;
    if (held.cuda_event_query == NULL) return 1;
    HeldQuery *query = malloc(sizeof *query);
    if (query == NULL) return 0;
    query->event = event, query->answer = -1;
    if (pthread_create(&thread, NULL, held_query, query) != 0) return 0;
    pthread_detach(thread);
    for (double waited = 0; waited < HELD_CUDA && query->answer == -1; waited += 0.01) held_sleep(0.01);
    return query->answer == -1 || query->answer == HELD_NOT_READY;
}

/* -- what it says -- */

static void held_tell(double seconds, const HeldWait *wait, const char *where, const HeldText *stacks, int ends)
{
    static char text[HELD_STACK + 4096];
    HeldText all = {text, 0, sizeof text};
    held_add(&all, "hpccomm: rank %d: Python has not run for %.0f s: the GIL is held in %s; unfinished: %s #%lld of '%s'%s, for "
             "%.1f s\n%s", held.rank, seconds, where, wait->name, wait->number, wait->group->name,
             wait->event ? " on the GPU" : "", wait->seconds, stacks->text);
    if (ends)
        held_add(&all, "hpccomm: the job ends with status %d, because the GIL can't be taken from a call of C; timeout= of the "
                 "group, or HPCCOMM_TIMEOUT in seconds, allows more time\n", HELD_STATUS);
    held_write(2, all.text, all.length);
}

/* Write this rank's report: `debug/held.py` reads it. */
static void held_answer(int folder, const char *token, double seconds, const HeldWait *waits, int count)
{
    static char text[2 * HELD_STACK], stacks[HELD_STACK], program[HELD_STACK];
    char where[512], name[64], part[96];
    HeldText all = {text, 0, sizeof text}, shown = {program, 0, sizeof program};
    held_stacks(stacks, sizeof stacks);
    held_where(stacks, where, sizeof where, &shown);
    held_add(&all, "held 1\nanswers %s\nrank %d of %d\npid %d\ntime %.3f\nseconds %.3f\nplace %s\n", token, held.rank, held.size,
             (int)getpid(), held_now(CLOCK_REALTIME), seconds, where);
    for (int i = 0; i < count; i++)
        if (waits[i].group->key[0])
            held_add(&all, "operation %.3f %lld %s %s %s\n", waits[i].seconds, waits[i].number, waits[i].name,
                     waits[i].group->key, waits[i].group->name);
    for (const HeldGroup *group = held.groups; group != NULL; group = group->next)
        if (group->key[0] && group->counts[0])
            held_add(&all, "group %lld %lld %s %s\n", *group->counts[0] + *group->counts[1],
                     *group->counts[2] + *group->counts[3], group->key, group->name);
    held_add(&all, "stacks\n%s", stacks);
    snprintf(name, sizeof name, "rank%d.held", held.rank);
    snprintf(part, sizeof part, ".%s.%d.%lld", name, (int)getpid(), (long long)(1e6 * held_now(CLOCK_REALTIME)));
    int file = openat(folder, part, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0600);
    if (file < 0) return;
    held_write(file, all.text, all.length);
    close(file);
    if (renameat(folder, part, folder, name) != 0) unlinkat(folder, part, 0);
}

/* Answer the question in a folder of the run, if there is a new one; obey the order to end. As `debug/report.py` does. */
static void held_look_into(const char *path, double seconds, const HeldWait *waits, int count)
{
    static char answered[256];
    char token[256];
    struct stat found;
    int folder = path[0] ? open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    if (folder < 0) return;
    int file = openat(folder, "ask", O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    ssize_t length = -1;
    if (file >= 0 && fstat(file, &found) == 0 && S_ISREG(found.st_mode) && (found.st_uid == geteuid() || found.st_uid == 0) &&
        fstat(folder, &found) == 0 && found.st_uid == geteuid() && !(found.st_mode & (S_IWGRP | S_IWOTH)))
        length = read(file, token, sizeof token - 1);
    if (file >= 0) close(file);
    if (length > 0) {
        token[length] = 0;
        token[strcspn(token, "\n")] = 0;
        if (strncmp(token, "end at ", 7) == 0) {
            double left = strtod(token + 7, NULL) - held_now(CLOCK_REALTIME);
            if (fabs(left) <= 2) {
                held_sleep(left > 0 ? left : 0);
                _exit(HELD_STATUS);
            }
        } else if (strcmp(token, answered) != 0) {
            held_answer(folder, token, seconds, waits, count);
            snprintf(answered, sizeof answered, "%s", token);
        }
    }
    close(folder);
}

/* -- the threads -- */

static void *held_probe(void *nothing)
{
    for (;;) {
        held_sleep(1.0);
        pthread_mutex_lock(&held.probing);  /* so that Python does not end in between */
        if (held.stops) {
            pthread_mutex_unlock(&held.probing);
            return nothing;
        }
        held.asks = 1;
        PyGILState_STATE state = PyGILState_Ensure();
        held.times++, held.asks = 0;
        PyGILState_Release(state);
        pthread_mutex_unlock(&held.probing);
    }
}

static void *held_watch(void *nothing)
{
    static char stacks[HELD_STACK], program[HELD_STACK];
    long long times = -1;
    double seconds = 0, last = held_now(CLOCK_MONOTONIC);
    int has_told = 0;
    while (!held.stops) {
        held_sleep(HELD_LOOK);
        double now = held_now(CLOCK_MONOTONIC), step = now - last < 1 ? now - last : 0;  /* 0: this process was stopped */
        last = now;
        if (!held.asks || held.times != times) {
            seconds = has_told = 0, times = held.times;
            continue;
        }
        seconds += step;
        if (seconds < HELD_FROM) continue;
        HeldWait waits[HELD_RING];
        pthread_mutex_lock(&held.groups_lock);
        int count = held_waits(waits, HELD_RING);
        for (int i = 0; i < HELD_PLACES; i++) held_look_into(held.places[i], seconds, waits, count);
        for (int i = 0; i < count; i++) {
            const HeldWait *each = &waits[i];
            int ends = each->seconds > each->group->limit && (each->event ? each->group->ends_gpu : each->group->ends_host);
            if ((!ends && (has_told || seconds < HELD_TELLS)) || (each->event && !held_gpu_waits(each->event))) continue;
            char where[512];
            HeldText shown = {program, 0, sizeof program};
            held_stacks(stacks, sizeof stacks);
            held_where(stacks, where, sizeof where, &shown);
            if (held.times != times) break;  /* it has got the GIL meanwhile */
            held_tell(seconds, each, where, &shown, ends);
            has_told = 1;
            if (ends) _exit(HELD_STATUS);
        }
        pthread_mutex_unlock(&held.groups_lock);
    }
    return nothing;
}

/* Start both threads; no signal of the program's is handled in them. */
static int held_start(void)
{
    pthread_t thread;
    pthread_attr_t detached;
    sigset_t all, before, own;
    sigfillset(&all);
    sigemptyset(&own);
    sigaddset(&own, held.signal_number);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &detached, held_probe, NULL);
    pthread_sigmask(SIG_UNBLOCK, &own, NULL);
    if (!error) error = pthread_create(&thread, &detached, held_watch, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    return error;
}

/* Let the threads end, before Python does; without the GIL. */
static void held_stop(void)
{
    pthread_mutex_lock(&held.probing);
    held.stops = 1;
    pthread_mutex_unlock(&held.probing);
}
