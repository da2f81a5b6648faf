/* The end of the process, before memory is freed and MPI is finalized: stop the threads that still wait for other ranks,
 * and wait for those that are in a short call of MPI. */
#ifndef HPCCOMM_ENDING_H
#define HPCCOMM_ENDING_H

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sleep.h"

enum { LONGEST_END = 2000 /* milliseconds */, LONGEST_RUN = 500, QUIET = 3 };

/* Return the number of this process's threads, with this one, that have a core, or wait for one or for a page: states R
 * and D in /proc. */
static inline int threads_that_run(void)
{
    char path[sizeof "/proc/self/task//stat" + 256], text[128];
    DIR *threads = opendir("/proc/self/task"); /* only Linux has it */
    struct dirent *each;
    int running = 0;
    while (threads && (each = readdir(threads))) {
        if (each->d_name[0] == '.')
            continue; /* ../stat is of the process: it has the state of this thread */
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", each->d_name);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t bytes = file < 0 ? 0 : read(file, text, sizeof text - 1);
        text[bytes > 0 ? bytes : 0] = 0;
        const char *state = strrchr(text, ')'); /* after the name */
        running += state && (strncmp(state, ") R", 3) == 0 || strncmp(state, ") D", 3) == 0);
        if (file >= 0)
            close(file);
    }
    if (threads)
        closedir(threads);
    return running;
}

/* A thread that is in a short call of MPI, or about to wait or to copy, is not in `node_waiting`, but it runs. A look
 * that finds no thread may have missed one: a thread that sleeps until another lets MPI's lock go runs a moment later. */
static void node_end(void)
{
    const struct timespec moment = {0, 1000000};
    int looks = 0, quiet = 0;
    node_is_ending = 1;
    do {
        nanosleep(&moment, NULL);
        quiet = node_waiting || threads_that_run() > 1 ? 0 : quiet + 1;
    } while (quiet < QUIET && ++looks < (node_waiting ? LONGEST_END : LONGEST_RUN));
}

#endif
