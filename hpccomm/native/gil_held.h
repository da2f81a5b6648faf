/* Two threads that report for this process while a C call holds the GIL, so that no Python thread can run. The prober
   asks for the GIL once a second; the watcher notices if it does not get it. The watcher then reports on stderr while
   operations are unfinished, answers other ranks that ask for this rank's report, and ends the job if a GPU has not
   completed an operation within its time limit. A host operation ends nothing: it may be complete, and only its thread
   can't run. The watcher never takes the GIL; of Python it only calls faulthandler's signal handler, without the GIL.

   Operations are noted with the GIL held, and read while a C call holds it. The mutex protects groups from being freed
   at the moment when the GIL is free again: no thread holds it while it writes output or waits. */
#pragma once
#include <Python.h>
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

#ifndef SIGRTMIN /* macOS */
#define SIGRTMIN 0
#define SIGRTMAX -1
#endif

enum { HELD_NOTES = 8, HELD_RING = 64, HELD_PLACES = 2, HELD_STACK = 1 << 16, HELD_STATUS = 124,
       HELD_NOT_READY = 600, /* CUDA_ERROR_NOT_READY */ HELD_RELAXED = 2, /* CU_STREAM_CAPTURE_MODE_RELAXED */
       HELD_GROUPS = 64, HELD_KNOWN = 8, HELD_TOKEN = 128, HELD_LINES = 4 };

static const double HELD_LOOK = 0.25;  /* seconds between two checks of the GIL */
static const double HELD_FROM = 2.0;   /* seconds without the GIL before other ranks are answered */
static const double HELD_TELLS = 5.0;  /* and before an unfinished operation is reported */
static const double HELD_CUDA[2] = {1.0, 5.0};  /* seconds to wait for CUDA's answer: before a report, before the end */
static const double HELD_STOPPED = 1.0;  /* so many seconds between two checks: this process was stopped */

typedef struct {  /* an operation that blocks, or that the GPU may not have completed */
    char name[40];
    long long number;
    double began;  /* CLOCK_MONOTONIC, minus the time in which this process was stopped; 0: no operation */
    void *event;   /* on the GPU; NULL if the operation blocks the host */
} HeldNote;

typedef struct HeldGroup {
    char key[40], name[80];
    double limit;                                    /* seconds */
    int ends;                                        /* whether an operation on the GPU that takes longer ends the job */
    int path;                                        /* its fast path's number in the ring; 0: none */
    const long long *counts[4];                      /* collectives: fast path's, others; messages: the same */
    HeldNote notes[HELD_NOTES];
    struct HeldGroup *next, *before;
} HeldGroup;

typedef struct {  /* a blocking operation in the ring of the compiled fast path */
    const char *name;
    long long number, began;  /* nanoseconds */
    int path;
} HeldRing;

static struct {
    pthread_mutex_t groups_lock, probing, clock;
    HeldGroup *groups;
    int (*ring)(HeldRing *, int);
    int (*cuda_event_query)(void *), (*cuda_capture_mode)(int *);
    int rank, size, signal_number, stack_file, terminal, has_started;
    struct stat stack_file_was;
    struct sigaction action_was;
    char package[1024], places[HELD_PLACES][1024], known[HELD_KNOWN][HELD_TOKEN];  /* answered questions */
    unsigned last_known;
    volatile double stopped, looked; /* seconds in which this process was stopped; the watcher's last look, or 0 */
    volatile int stops, asks;        /* asks: the prober waits for the GIL */
    volatile long long times;        /* how often the prober has got it */
} held = {.groups_lock = PTHREAD_MUTEX_INITIALIZER, .probing = PTHREAD_MUTEX_INITIALIZER, .clock = PTHREAD_MUTEX_INITIALIZER};

static double held_now(int clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* The seconds in which this process was stopped, also if the watcher has not run since. */
static double held_stopped(void)
{
    pthread_mutex_lock(&held.clock);
    double since = held.looked ? held_now(CLOCK_MONOTONIC) - held.looked : 0;
    double stopped = held.stopped + (since >= HELD_STOPPED ? since : 0);
    pthread_mutex_unlock(&held.clock);
    return stopped;
}

static void held_sleep(double seconds)
{
    struct timespec time = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
    while (nanosleep(&time, &time) != 0 && errno == EINTR) {}
}

/* -- groups and their operations; the caller holds the GIL -- */

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
            strncpy(note->name, name, sizeof note->name - 1);  /* the last byte stays 0 */
            note->number = number, note->event = event, note->began = held_now(CLOCK_MONOTONIC) - held.stopped;
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

/* Put the stacks of all Python threads into `text`, as faulthandler writes them; nothing if the program has taken over
   the signal or the file. */
static void held_stacks(char *text, size_t room)
{
    struct stat now;
    struct sigaction action;
    text[0] = 0;
    if (fstat(held.stack_file, &now) != 0 || now.st_dev != held.stack_file_was.st_dev ||
        now.st_ino != held.stack_file_was.st_ino || sigaction(held.signal_number, NULL, &action) != 0 ||
        action.sa_handler != held.action_was.sa_handler || ftruncate(held.stack_file, 0) != 0)
        return;
    lseek(held.stack_file, 0, SEEK_SET);
    pthread_kill(pthread_self(), held.signal_number);  /* handled before this returns */
    ssize_t length = pread(held.stack_file, text, room - 1, 0);
    text[length < 0 ? 0 : length] = 0;
}

/* Put a thread's innermost frame outside hpccomm and threading.py into `place`: "train.py:88 in load". Return 0 if it
   has none, as hpccomm's threads, also while they import a module. `waits`: whether the thread's innermost frame is in hpccomm or threading.py. */
static int held_place(const char *stack, const char *end, char *place, size_t room, int *waits)
{
    int first = 1, found = 0, imports = 0;
    for (const char *line = stack, *stop; line < end && (stop = strchr(line, '\n')) != NULL; line = stop + 1) {
        char path[1024], function[256];
        int number;
        if (sscanf(line, "  File \"%1023[^\"]\", line %d in %255[^\n]", path, &number, function) != 3) continue;
        const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
        int ours = strncmp(path, held.package, strlen(held.package)) == 0 || strcmp(name, "threading.py") == 0;
        if (first) *waits = ours;
        first = 0;
        if (!ours && !found) snprintf(place, room, "%s:%d in %s", name, number, function);
        found = ours ? found && !imports : 1;
        imports = strncmp(path, "<frozen importlib.", 18) == 0;
    }
    return found;
}

static const char *held_next_thread(const char *text)
{
    const char *next = strstr(text, "hread 0x");
    return next == NULL ? NULL : next + 1;
}

/* Put the lines that may hold the GIL into `place`: of the program's threads, those that do not wait in hpccomm. Put
   the stacks of the program's threads into `shown`. */
static void held_where(const char *stacks, char *place, size_t room, HeldText *shown)
{
    char here[512];
    int lines = 0;
    HeldText places = {place, 0, room};
    place[0] = shown->text[0] = 0;
    for (const char *thread = held_next_thread(stacks), *next; thread != NULL; thread = next) {
        int waits = 0;
        next = held_next_thread(thread);
        const char *end = next ? next : thread + strlen(thread);
        if (!held_place(thread, end, here, sizeof here, &waits)) continue;
        if (!waits && lines++ < HELD_LINES) held_add(&places, "%s%s", lines > 1 ? ", or " : "", here);
        if (shown->length) held_add(shown, "hpccomm:   in another thread:\n");
        for (const char *line = strchr(thread, '\n') + 1, *stop; line < end && *line == ' '; line = stop + 1) {
            if ((stop = strchr(line, '\n')) == NULL) break;
            held_add(shown, "hpccomm: %.*s\n", (int)(stop - line), line);
        }
    }
    if (lines == 0) held_add(&places, "an unknown line");
}

/* -- operations -- */

typedef struct {  /* copy of an unfinished operation, as its group may be freed meanwhile */
    char name[40], key[40], group[80];
    long long number;
    double seconds, limit;
    int ends;
    void *event;
} HeldWait;

typedef struct { char key[40], name[80]; long long collectives, messages; } HeldCounts;

static struct {
    HeldWait waits[HELD_RING];
    HeldCounts groups[HELD_GROUPS];
    int n_waits, n_groups;
} seen;  /* only the watcher uses it */

static void held_see_one(const HeldGroup *group, const char *name, long long number, double seconds, void *event)
{
    if (seen.n_waits == HELD_RING) return;
    HeldWait *wait = &seen.waits[seen.n_waits++];
    strncpy(wait->name, name, sizeof wait->name - 1);
    memcpy(wait->key, group->key, sizeof wait->key);
    memcpy(wait->group, group->name, sizeof wait->group);
    wait->number = number, wait->seconds = seconds, wait->event = event;
    wait->limit = group->limit, wait->ends = event && group->ends;
}

static void held_see(void)
{
    HeldRing ring[HELD_RING];
    int in_ring = held.ring ? held.ring(ring, HELD_RING) : 0;
    double now = held_now(CLOCK_MONOTONIC);
    memset(&seen, 0, sizeof seen);
    pthread_mutex_lock(&held.groups_lock);
    for (const HeldGroup *group = held.groups; group != NULL; group = group->next) {
        for (int i = 0; i < HELD_NOTES; i++) {
            const HeldNote *note = &group->notes[i];
            if (note->began != 0)
                held_see_one(group, note->name, note->number, now - held.stopped - note->began, note->event);
        }
        for (int i = 0; i < in_ring; i++)
            if (group->path != 0 && ring[i].path == group->path)
                held_see_one(group, ring[i].name, ring[i].number, now - 1e-9 * ring[i].began, NULL);
        if (group->key[0] && group->counts[0] && seen.n_groups < HELD_GROUPS) {
            HeldCounts *counts = &seen.groups[seen.n_groups++];
            memcpy(counts->key, group->key, sizeof counts->key);
            memcpy(counts->name, group->name, sizeof counts->name);
            counts->collectives = *group->counts[0] + *group->counts[1];
            counts->messages = *group->counts[2] + *group->counts[3];
        }
    }
    pthread_mutex_unlock(&held.groups_lock);
}

typedef struct { void *event; volatile int answer; } HeldQuery;  /* never freed: its thread may hang in CUDA */

static void *held_query(void *given)
{
    HeldQuery *query = given;
    int relaxed = HELD_RELAXED;  /* otherwise the query would invalidate other threads' captures */
    if (held.cuda_capture_mode != NULL) held.cuda_capture_mode(&relaxed);
    query->answer = held.cuda_event_query(query->event);
    return NULL;
}

/* Whether the GPU has not reached an event; also 1 if CUDA does not answer, because another thread is inside it. */
static int held_gpu_waits(void *event, int ends)
{
    pthread_t thread;
    if (held.cuda_event_query == NULL) return 1;
    HeldQuery *query = malloc(sizeof *query);
    if (query == NULL) return 0;
    query->event = event, query->answer = -1;
    if (pthread_create(&thread, NULL, held_query, query) != 0) return 0;
    pthread_detach(thread);
    for (double waited = 0; waited < HELD_CUDA[ends] && query->answer == -1; waited += 0.01) held_sleep(0.01);
    return query->answer == -1 || query->answer == HELD_NOT_READY;
}

/* -- reports -- */

static void held_tell(double seconds, const HeldWait *wait, const char *where, const HeldText *stacks, int ends)
{
    static char text[HELD_STACK + 4096];
    HeldText all = {text, 0, sizeof text};
    held_add(&all, "hpccomm: rank %d: Python has not run for %.0f s: the GIL is held in %s; unfinished%s: %s #%lld of '%s'%s, "
             "for %.1f s\n%s", held.rank, seconds, where, wait->event ? "" : ", or not yet seen to end", wait->name, wait->number,
             wait->group, wait->event ? " on the GPU" : "", wait->seconds, stacks->text);
    if (ends)
        held_add(&all, "hpccomm: the job ends with status %d, because the GIL can't be taken from a call of C; timeout= of the "
                 "group, or HPCCOMM_TIMEOUT in seconds, allows more time\n", HELD_STATUS);
    held_write(2, all.text, all.length);
    if (held.terminal >= 0) held_write(held.terminal, all.text, all.length);
}

/* Write this rank's report for `debug/held.py`. */
static void held_answer(int folder, const char *token, double seconds)
{
    static char text[2 * HELD_STACK], stacks[HELD_STACK], program[HELD_STACK];
    char where[2048], name[64], part[96], host[256] = "";
    HeldText all = {text, 0, sizeof text}, shown = {program, 0, sizeof program};
    held_stacks(stacks, sizeof stacks);
    held_where(stacks, where, sizeof where, &shown);
    gethostname(host, sizeof host - 1);
    held_add(&all, "held 1\nanswers %s\nrank %d of %d\nhost %s\npid %d\ntime %.3f\nseconds %.3f\nplace %s\n", token,
             held.rank, held.size, host, (int)getpid(), held_now(CLOCK_REALTIME), seconds, where);
    for (int i = 0; i < seen.n_waits; i++)
        if (seen.waits[i].key[0])
            held_add(&all, "operation %.3f %lld %s %s %s\n", seen.waits[i].seconds, seen.waits[i].number, seen.waits[i].name,
                     seen.waits[i].key, seen.waits[i].group);
    for (int i = 0; i < seen.n_groups; i++)
        held_add(&all, "group %lld %lld %s %s\n", seen.groups[i].collectives, seen.groups[i].messages, seen.groups[i].key,
                 seen.groups[i].name);
    held_add(&all, "stacks\n%s", stacks);
    snprintf(name, sizeof name, "rank%d.held", held.rank);
    snprintf(part, sizeof part, ".%s.%d.%lld", name, (int)getpid(), (long long)(1e6 * held_now(CLOCK_REALTIME)));
    int file = openat(folder, part, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0600);
    if (file < 0) return;
    held_write(file, all.text, all.length);
    close(file);
    if (renameat(folder, part, folder, name) != 0) unlinkat(folder, part, 0);
}

static int held_knows(const char *token)
{
    for (int i = 0; i < HELD_KNOWN; i++)
        if (strcmp(held.known[i], token) == 0) return 1;
    return 0;
}

static void held_know(const char *token)
{
    if (!held_knows(token)) strncpy(held.known[held.last_known++ % HELD_KNOWN], token, HELD_TOKEN - 1);
}

/* Answer a new question in a folder of the run, or obey the order to end, as `debug/report.py` does. */
static void held_look_into(const char *path, double seconds)
{
    char token[HELD_TOKEN];
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
        } else if (!held_knows(token)) {
            held_answer(folder, token, seconds);
            held_know(token);
        }
    }
    close(folder);
}

/* -- the threads -- */

static void *held_probe(void *nothing)
{
    PyThreadState *own = NULL;  /* kept: making another allocates memory; tracemalloc.stop() may crash meanwhile */
    for (;;) {
        pthread_mutex_lock(&held.probing);  /* so that Python does not end meanwhile */
        if (held.stops) {
            pthread_mutex_unlock(&held.probing);
            return nothing;
        }
        held.asks = 1;
        if (own == NULL)
            PyGILState_Ensure();
        else
            PyEval_RestoreThread(own);
        held.times++, held.asks = 0;
        own = PyEval_SaveThread();
        pthread_mutex_unlock(&held.probing);
        held_sleep(1.0);
    }
}

static void *held_watch(void *nothing)
{
    static char stacks[HELD_STACK], program[HELD_STACK], where[2048];
    long long times = -1;
    double seconds = 0;
    held.looked = held_now(CLOCK_MONOTONIC);
    int has_reported = 0;
    while (!held.stops) {
        held_sleep(HELD_LOOK);
        double now = held_now(CLOCK_MONOTONIC), step = now - held.looked;
        pthread_mutex_lock(&held.clock);
        if (step >= HELD_STOPPED) held.stopped += step, step = 0;
        held.looked = now;
        pthread_mutex_unlock(&held.clock);
        if (!held.asks || held.times != times) {
            seconds = has_reported = 0, times = held.times;
            continue;
        }
        seconds += step;
        if (seconds < HELD_FROM) continue;
        held_see();
        for (int i = 0; i < HELD_PLACES; i++) held_look_into(held.places[i], seconds);
        for (int i = 0; i < seen.n_waits; i++) {
            const HeldWait *each = &seen.waits[i];
            int ends = each->ends && each->seconds > each->limit;
            if ((!ends && (has_reported || seconds < HELD_TELLS)) || (each->event && !held_gpu_waits(each->event, ends))) continue;
            HeldText shown = {program, 0, sizeof program};
            held_stacks(stacks, sizeof stacks);
            held_where(stacks, where, sizeof where, &shown);
            if (held.times != times) break;  /* the prober has got the GIL meanwhile */
            held_tell(seconds, each, where, &shown, ends);
            has_reported = 1;
            if (ends) _exit(HELD_STATUS);
        }
    }
    held.looked = 0;
    return nothing;
}

/* Run in a forked process, which has neither thread. */
static void held_in_child(void)
{
    pthread_mutex_init(&held.groups_lock, NULL);
    pthread_mutex_init(&held.probing, NULL);
    pthread_mutex_init(&held.clock, NULL);
    held.stops = 1, held.looked = 0;
}

/* Return the first real-time signal from `from` on that has no handler; 0 if there is none. */
static int held_free_signal(int from)
{
    struct sigaction action;
    for (int number = from; number <= SIGRTMAX; number++)
        if (sigaction(number, NULL, &action) == 0 && !(action.sa_flags & SA_SIGINFO) && action.sa_handler == SIG_DFL)
            return number;
    return 0;
}

/* Start both threads, in which the program's signals are blocked. */
static int held_start(void)
{
    pthread_t thread;
    pthread_attr_t detached;
    if (held.has_started || sigaction(held.signal_number, NULL, &held.action_was) != 0 ||
        fstat(held.stack_file, &held.stack_file_was) != 0 || pthread_atfork(NULL, NULL, held_in_child) != 0)
        return -1;
    held.has_started = 1;
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

/* Make the threads end before Python does; the caller does not hold the GIL. */
static void held_stop(void)
{
    pthread_mutex_lock(&held.probing);
    held.stops = 1;
    pthread_mutex_unlock(&held.probing);
}
