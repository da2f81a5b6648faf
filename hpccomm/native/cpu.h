/* Loops compiled twice: for every x86-64 machine, and for AVX2 with F16C (AArch64 always has vectors). The choice is
 * made here: target_clones and __builtin_cpu_supports ask the compiler's runtime library, and that of Zig, which
 * compiles the wheels, always answers no. */
#ifndef HPCCOMM_CPU_H
#define HPCCOMM_CPU_H

static int has_avx2;

#if defined(__x86_64__)
#include <cpuid.h>
#define AVX2 __attribute__((target("avx2,f16c")))
static inline int look_for_avx2(void)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_F16C))
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & 6) == 6 /* the system saves its registers */ && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           b & bit_AVX2;
}
#else
#define AVX2
static inline int look_for_avx2(void) { return 0; }
#endif

#endif
