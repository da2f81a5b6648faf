/* Sums of numbers rounded to two fixed grids, as integers, four numbers at a time; exact/sums.py explains them. */

#ifndef HPCCOMM_SUMS_H
#define HPCCOMM_SUMS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef double Doubles __attribute__((vector_size(32)));
typedef int64_t Integers __attribute__((vector_size(32)));
typedef uint64_t Bits __attribute__((vector_size(32)));
#define EVERY(x) {x, x, x, x}

/* gcc compiles the function for AVX2 as well, and the loader chooses. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_THIS_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_THIS_CPU
#endif

/* Load four numbers from x[i] on; past the end of x, zeros. */
#define LOAD(four, x, i, n) \
    do { \
        if ((n) - (i) < 4) { \
            memset(&(four), 0, sizeof(four)); \
            memcpy(&(four), (x) + (i), ((n) - (i)) * sizeof(double)); \
        } else { \
            memcpy(&(four), (x) + (i), sizeof(four)); \
        } \
    } while (0)

/* Return the largest absolute value of x, or of the products of x and y; INFINITY if one is infinite or NaN. */
FOR_THIS_CPU
static double sums_largest(const double *x, const double *y, size_t n)
{
    const Integers no_sign = EVERY(INT64_MAX);
    Doubles most = EVERY(0.0), four, other;
    Integers is_special = EVERY(0);
    double largest = 0.0;
    for (size_t i = 0; i < n; i += 4) {
        LOAD(four, x, i, n);
        if (y) {
            LOAD(other, y, i, n);
            four *= other;
        }
        Integers size = (Integers)four & no_sign;
        Integers is_larger = (Doubles)size > most;
        is_special |= (Integers)(four - four); /* NaN; 0 for finite numbers */
        most = (Doubles)((size & is_larger) | ((Integers)most & ~is_larger));
    }
    for (int lane = 0; lane < 4; lane++) {
        if (is_special[lane] & INT64_MAX) return INFINITY;
        if (most[lane] > largest) largest = most[lane];
    }
    return largest;
}

/* Sums on two grids: of the bits of x + first, and of the bits of its remainder + second.

   Sums of bits wrap around, as unsigned integers do. `is_left`: the second grid leaves a remainder. */
typedef struct {
    Doubles first, second;
    Bits one, two;
    Integers is_left;
} Grids;

static inline Grids sums_grids(double first, double second)
{
    Grids grids = {EVERY(first), EVERY(second), EVERY(0), EVERY(0), EVERY(0)};
    return grids;
}

static inline __attribute__((always_inline)) void sums_add(Grids *grids, const Doubles *numbers)
{
    const Doubles four = *numbers;
    Doubles moved = four + grids->first;
    grids->one += (Bits)moved;
    Doubles rest = four - (moved - grids->first);
    moved = rest + grids->second;
    grids->two += (Bits)moved;
    grids->is_left |= (rest != (moved - grids->second));
}

/* Write the two sums of n numbers, without the bits of the grids; return 1 if there is no remainder. */
static int sums_end(const Grids *grids, size_t n, uint64_t sums[2])
{
    const Bits one = grids->one, two = grids->two;
    const Integers is_left = grids->is_left;
    size_t rounds = (n + 3) / 4 * 4; /* zeros have been added up as well */
    uint64_t bits[2];
    memcpy(&bits[0], &grids->first, sizeof(bits[0]));
    memcpy(&bits[1], &grids->second, sizeof(bits[1]));
    sums[0] = one[0] + one[1] + one[2] + one[3] - rounds * bits[0];
    sums[1] = two[0] + two[1] + two[2] + two[3] - rounds * bits[1];
    return !(is_left[0] | is_left[1] | is_left[2] | is_left[3]);
}

/* Add up numbers on two grids; return 1 if there is no remainder and all numbers are below the limit. */
FOR_THIS_CPU
static int sums_of_two_grids(const double *x, size_t n, double limit, double first, double second, uint64_t sums[2])
{
    const Integers no_sign = EVERY(INT64_MAX);
    const Doubles limits = EVERY(limit);
    Grids grids = sums_grids(first, second);
    Doubles four;
    for (size_t i = 0; i < n; i += 4) {
        LOAD(four, x, i, n);
        sums_add(&grids, &four);
        grids.is_left |= ~((Doubles)((Integers)four & no_sign) < limits);
    }
    return sums_end(&grids, n, sums);
}

/* Compute the rounded product of two numbers, and its rounding error (Dekker).

   `is_exact`: product + error is exact; nothing overflows or loses bits below 2^-1074. Every intermediate result is
   exact too, so it makes no difference whether the compiler fuses a product and a sum. */
static inline __attribute__((always_inline)) void sums_multiply(
    const Doubles *x, const Doubles *y, Doubles *product, Doubles *error, Integers *is_exact)
{
    const Doubles a = *x, b = *y;
    const Integers no_sign = EVERY(INT64_MAX), half = EVERY(1 << 26), upper = EVERY(-(1 << 27));
    const Doubles least = EVERY(0x1p-960), most = EVERY(0x1p1020), most_factor = EVERY(0x1p990), zero = EVERY(0.0);
    /* 26 bits, rounded, and 26 bits with a sign */
    Doubles a_high = (Doubles)(((Integers)a + half) & upper), a_low = a - a_high;
    Doubles b_high = (Doubles)(((Integers)b + half) & upper), b_low = b - b_high;
    Doubles p = a * b;
    *error = a_low * b_low - (((p - a_high * b_high) - a_low * b_high) - a_high * b_low);
    *product = p;
    Doubles size = (Doubles)((Integers)p & no_sign);
    Doubles of_a = (Doubles)((Integers)a & no_sign), of_b = (Doubles)((Integers)b & no_sign);
    *is_exact &= (size > least) | (a == zero) | (b == zero);
    *is_exact &= (size < most) & (of_a < most_factor) & (of_b < most_factor);
}

/* Add up products on the first two grids and their errors on the others; return 1 as `sums_of_two_grids` does. */
FOR_THIS_CPU
static int sums_of_products(
    const double *x, const double *y, size_t n, double limit, const double grid[4], uint64_t sums[4])
{
    const Integers no_sign = EVERY(INT64_MAX);
    const Doubles limits = EVERY(limit);
    Grids products = sums_grids(grid[0], grid[1]), errors = sums_grids(grid[2], grid[3]);
    Integers is_exact = EVERY(-1);
    Doubles a, b, product, error;
    for (size_t i = 0; i < n; i += 4) {
        LOAD(a, x, i, n);
        LOAD(b, y, i, n);
        sums_multiply(&a, &b, &product, &error, &is_exact);
        sums_add(&products, &product);
        sums_add(&errors, &error);
        is_exact &= (Doubles)((Integers)product & no_sign) < limits;
    }
    int is_whole = is_exact[0] && is_exact[1] && is_exact[2] && is_exact[3];
    is_whole &= sums_end(&products, n, sums);
    return sums_end(&errors, n, sums + 2) & is_whole;
}

/* Write the largest absolute value, and the smallest but 0 (INFINITY if all are 0); return 1 if all are finite. */
FOR_THIS_CPU
static int sums_extent(const double *x, size_t n, double extent[2])
{
    const Integers no_sign = EVERY(INT64_MAX);
    const Doubles none = EVERY(INFINITY), zero = EVERY(0.0);
    Doubles most = zero, least = none, four;
    Integers is_special = EVERY(0);
    for (size_t i = 0; i < n; i += 4) {
        LOAD(four, x, i, n);
        is_special |= (Integers)(four - four);
        Integers size = (Integers)four & no_sign;
        Integers is_larger = (Doubles)size > most;
        most = (Doubles)((size & is_larger) | ((Integers)most & ~is_larger));
        Integers is_smaller = ((Doubles)size < least) & ((Doubles)size > zero);
        least = (Doubles)((size & is_smaller) | ((Integers)least & ~is_smaller));
    }
    extent[0] = 0.0;
    extent[1] = INFINITY;
    for (int lane = 0; lane < 4; lane++) {
        if (is_special[lane] & INT64_MAX) return 0;
        if (most[lane] > extent[0]) extent[0] = most[lane];
        if (least[lane] < extent[1]) extent[1] = least[lane];
    }
    return 1;
}

/* Add up `count` rows, `stride` numbers apart, element by element on two grids; all numbers must fit the grids. */
FOR_THIS_CPU
static void sums_down(const double *x, size_t count, size_t columns, size_t stride, double first, double second,
                      uint64_t *one, uint64_t *two)
{
    memset(one, 0, columns * sizeof(*one));
    memset(two, 0, columns * sizeof(*two));
    uint64_t bits[2];
    memcpy(&bits[0], &first, sizeof(first));
    memcpy(&bits[1], &second, sizeof(second));
    for (size_t row = 0; row < count; row++, x += stride) {
        for (size_t i = 0; i < columns; i++) {
            double moved = x[i] + first;
            uint64_t added;
            memcpy(&added, &moved, sizeof(added));
            one[i] += added - bits[0];
            moved = x[i] - (moved - first) + second;
            memcpy(&added, &moved, sizeof(added));
            two[i] += added - bits[1];
        }
    }
}

#endif
