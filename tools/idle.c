/* Preloaded into the ranks of tests: a waiting rank sleeps, where MPI would poll and yield.
 *
 * Both MPIs and hpccomm call sched_yield after each unsuccessful poll. A busy scheduler hardly yields: ranks that wait
 * for each other in a test of a hang would take the cores from all other tests.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int sched_yield(void)
{
    static __thread unsigned looks;
    const struct timespec pause = {0, 50000};
    return ++looks % 16 ? (int)syscall(SYS_sched_yield) : nanosleep(&pause, NULL) && 0;
}
