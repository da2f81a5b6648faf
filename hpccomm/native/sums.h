/* Sums of numbers rounded to two fixed grids, as integers: what core/exact_sums.py explains, four numbers at a time. */

#ifndef HPCCOMM_SUMS_H
#define HPCCOMM_SUMS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef double Doubles __attribute__((vector_size(32)));
typedef int64_t Integers __attribute__((vector_size(32)));
#define EVERY(x) {x, x, x, x}

/* gcc makes it for AVX2 as well, and the loader chooses. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_THIS_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_THIS_CPU
#endif

/* Writes four numbers that begin at x[i], or what is left of them and zeros. */
#define LOAD(four, x, i, n) \
    do { \
        if ((n) - (i) < 4) memset(&(four), 0, sizeof(four)); \
        memcpy(&(four), (x) + (i), ((n) - (i) < 4 ? (n) - (i) : 4) * sizeof(double)); \
    } while (0)

/* Returns the largest absolute value; INFINITY if there is an infinity or a NaN. */
FOR_THIS_CPU
static double sums_largest(const double *x, size_t n)
{
    const Integers no_sign = EVERY(INT64_MAX);
    Doubles most = EVERY(0.0), four;
    Integers is_special = EVERY(0);
    double largest = 0.0;
    for (size_t i = 0; i < n; i += 4) {
        if (n - i >= 4) memcpy(&four, x + i, sizeof(four));
        else LOAD(four, x, i, n);
        Integers size = (Integers)four & no_sign;
        Integers is_larger = (Doubles)size > most;
        is_special |= (Integers)(four - four); /* NaN, and 0 of finite numbers */
        most = (Doubles)((size & is_larger) | ((Integers)most & ~is_larger));
    }
    for (int lane = 0; lane < 4; lane++) {
        if (is_special[lane] & INT64_MAX) return INFINITY;
        if (most[lane] > largest) largest = most[lane];
    }
    return largest;
}

/* Adds up the bits of x + first, and of what is left + second; returns 1 if nothing is left then.

   Sums of bits wrap around, as unsigned integers do. */
FOR_THIS_CPU
static int sums_of_two_grids(const double *x, size_t n, double first, double second, uint64_t sums[2])
{
    const Doubles a = EVERY(first), b = EVERY(second);
    typedef uint64_t Bits __attribute__((vector_size(32)));
    Bits one = EVERY(0), two = EVERY(0);
    Integers is_left = EVERY(0);
    Doubles four;
    for (size_t i = 0; i < n; i += 4) {
        if (n - i >= 4) memcpy(&four, x + i, sizeof(four));
        else LOAD(four, x, i, n);
        Doubles moved = four + a;
        one += (Bits)moved;
        Doubles rest = four - (moved - a);
        moved = rest + b;
        two += (Bits)moved;
        is_left |= (rest != (moved - b));
    }
    size_t rounds = (n + 3) / 4 * 4; /* zeros have been added up as well */
    uint64_t bits[2];
    memcpy(&bits[0], &first, sizeof(first));
    memcpy(&bits[1], &second, sizeof(second));
    sums[0] = one[0] + one[1] + one[2] + one[3] - rounds * bits[0];
    sums[1] = two[0] + two[1] + two[2] + two[3] - rounds * bits[1];
    return !(is_left[0] | is_left[1] | is_left[2] | is_left[3]);
}

/* Writes x * y as it is rounded, and what was rounded off (Dekker); returns 1 if all of it is exact.

   Every number here is exact, so that it makes no difference whether the compiler fuses a product and a sum. */
FOR_THIS_CPU
static int sums_products(const double *x, const double *y, size_t n, double *product, double *error)
{
    const Integers no_sign = EVERY(INT64_MAX), half = EVERY(1 << 26), upper = EVERY(-(1 << 27));
    const Doubles least = EVERY(0x1p-960), most = EVERY(0x1p1020), most_factor = EVERY(0x1p990), zero = EVERY(0.0);
    Integers is_exact = EVERY(-1);
    Doubles a, b;
    for (size_t i = 0; i < n; i += 4) {
        size_t count = n - i < 4 ? n - i : 4;
        if (count == 4) {
            memcpy(&a, x + i, sizeof(a));
            memcpy(&b, y + i, sizeof(b));
        } else {
            LOAD(a, x, i, n);
            LOAD(b, y, i, n);
        }
        /* 26 bits, rounded, and 26 bits with a sign */
        Doubles a_high = (Doubles)(((Integers)a + half) & upper), a_low = a - a_high;
        Doubles b_high = (Doubles)(((Integers)b + half) & upper), b_low = b - b_high;
        Doubles p = a * b;
        Doubles e = a_low * b_low - (((p - a_high * b_high) - a_low * b_high) - a_high * b_low);
        Doubles size = (Doubles)((Integers)p & no_sign);
        Doubles of_a = (Doubles)((Integers)a & no_sign), of_b = (Doubles)((Integers)b & no_sign);
        is_exact &= (size > least) | (a == zero) | (b == zero);
        is_exact &= (size < most) & (of_a < most_factor) & (of_b < most_factor);
        if (count == 4) {
            memcpy(product + i, &p, sizeof(p));
            memcpy(error + i, &e, sizeof(e));
        } else {
            memcpy(product + i, &p, count * sizeof(double));
            memcpy(error + i, &e, count * sizeof(double));
        }
    }
    return is_exact[0] && is_exact[1] && is_exact[2] && is_exact[3];
}

#endif
