/* Preloaded: at the end, print how often the process paused for a millisecond. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

static int pauses;

int nanosleep(const struct timespec *pause, struct timespec *left)
{
    pauses += pause->tv_nsec == 1000000;
    return ((int (*)(const struct timespec *, struct timespec *))dlsym(RTLD_NEXT, "nanosleep"))(pause, left);
}

__attribute__((destructor)) static void tell(void) { printf("%d pauses\n", pauses); }
