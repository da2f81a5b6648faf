/* Where processors differ.
 *
 * Loops compiled twice: for every x86-64 machine, and for AVX2 with F16C (AArch64 always has vectors). The choice is
 * made here: target_clones and __builtin_cpu_supports ask the compiler's runtime library, and that of Zig, which
 * compiles the wheels, always answers no. */
#ifndef HPCCOMM_CPU_H
#define HPCCOMM_CPU_H

#include <string.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

enum { LINE = 64 }; /* bytes of a cache's line */

static int has_avx2;

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
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

AVX2 static void copy_by_vectors(char *to, const char *from, size_t bytes /* at least 32 */)
{
    typedef char Vector __attribute__((vector_size(32), aligned(1)));
    size_t head = -(size_t)to & 31;
    memcpy(to, from, head);
    for (to += head, from += head, bytes -= head; bytes >= 128; to += 128, from += 128, bytes -= 128) {
        const Vector *x = (const Vector *)from;
        Vector a = x[0], b = x[1], c = x[2], d = x[3], *y = (Vector *)to;
        y[0] = a, y[1] = b, y[2] = c, y[3] = d;
    }
    memcpy(to, from, bytes);
}

/* The same past the caches; others see it with the next release. */
AVX2 static void stream_bytes(char *to, const char *from, size_t bytes /* at least 32 */)
{
    size_t head = -(size_t)to & 31;
    memcpy(to, from, head);
    for (to += head, from += head, bytes -= head; bytes >= 128; to += 128, from += 128, bytes -= 128) {
        const __m256i *x = (const __m256i *)from;
        __m256i a = _mm256_loadu_si256(x), b = _mm256_loadu_si256(x + 1), *y = (__m256i *)to;
        __m256i c = _mm256_loadu_si256(x + 2), d = _mm256_loadu_si256(x + 3);
        _mm256_stream_si256(y, a), _mm256_stream_si256(y + 1, b);
        _mm256_stream_si256(y + 2, c), _mm256_stream_si256(y + 3, d);
    }
    memcpy(to, from, bytes);
    _mm_sfence();
}
#else
#define AVX2
#define copy_by_vectors memcpy
#define stream_bytes memcpy
static inline int look_for_avx2(void) { return 0; }
#endif

__attribute__((constructor)) static void know_this_cpu(void) { has_avx2 = look_for_avx2(); }

/* memcpy, but from 2112 bytes on without `rep movsb`, which glibc uses there: on Zen 3 and 4 it copies 1.5 GB/s instead of
 * 25 if the addresses hardly differ modulo a page (glibc's bug 30994). Slots begin on a page, large NumPy arrays 16 bytes
 * behind one. */
static inline void copy_bytes(void *to, const void *from, size_t bytes)
{
    if (bytes > 2048 && has_avx2)
        copy_by_vectors(to, from, bytes);
    else
        memcpy(to, from, bytes);
}

#endif
