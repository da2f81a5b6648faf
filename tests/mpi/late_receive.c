/* Preloaded into ranks: each thread's second MPI_Irecv comes some milliseconds after the beginning of MPI_Finalize, as if
 * the thread had waited for a lock of MPI's, then been without a core. */
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { LOCKED = 1500, ALL_CAME = 50000 /* microseconds */,
    AFTER = 5000000 /* ns: of the first thread; each other comes so much later */ };

static volatile int is_ending;
static int threads;
static __thread int receives;

static void *of_library(const char *name)
{
    return dlsym(dlopen(getenv("LIBMPI"), RTLD_NOW | RTLD_NOLOAD), name);
}

static long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

static void come_late(void)
{
    if (++receives < 2)
        return;
    long after = AFTER * (long)__atomic_add_fetch(&threads, 1, __ATOMIC_SEQ_CST);
    while (!is_ending)
        usleep(100);
    usleep(LOCKED);
    for (long end = now() + after; now() < end;)
        ;
}

int MPI_Finalize(void)
{
    is_ending = 1;
    int code = ((int (*)(void))of_library("PMPI_Finalize"))();
    usleep(ALL_CAME); /* the process does not end before the last receive */
    return code;
}

int MPI_Irecv(long data, long count, long datatype, long source, long tag, long comm, long request)
{
    come_late();
    return ((int (*)(long, long, long, long, long, long, long))of_library("PMPI_Irecv"))(
        data, count, datatype, source, tag, comm, request);
}

int MPI_Irecv_c(long data, long count, long datatype, long source, long tag, long comm, long request)
{
    come_late();
    return ((int (*)(long, long, long, long, long, long, long))of_library("PMPI_Irecv_c"))(
        data, count, datatype, source, tag, comm, request);
}
