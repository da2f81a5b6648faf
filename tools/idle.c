/* Preloaded into the ranks of tests: a rank that waits sleeps, where MPI would poll and yield.
 *
 * Both MPIs, and hpccomm's own waits, call sched_yield each time that they have looked in vain. To a scheduler with other
 * work that means little: ranks that wait for each other in a test of a hang take the cores from all other tests.
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
