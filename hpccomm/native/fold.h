/* Reductions of two ranks' values and of many, in rank order. */
#ifndef HPCCOMM_FOLD_H
#define HPCCOMM_FOLD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

/* A reduction. Half precisions are widened to float32, reduced, and rounded once; AVG divides before that. */
typedef struct {
    void (*reduce)(void *out, const void *a, const void *b, size_t bytes);
    void (*widen)(float *wide, const void *half, size_t count); /* NULL: `reduce` takes the values themselves */
    void (*narrow)(void *half, const float *wide, size_t count);
    int averages;
} Fold;

enum { NODE_BLOCK = 16384 /* bytes that are reduced at a time */, WIDE = 1024 /* halves that are widened at a time */ };

/* The state of one block's reduction, to which fold_next adds the values of one rank after another. */
typedef struct {
    const char *first;
    float sum[WIDE], next[WIDE];
} Folded;

static inline size_t fold_block(const Fold *fold, size_t bytes)
{
    size_t most = fold->widen ? sizeof(uint16_t) * WIDE : NODE_BLOCK;
    return bytes < most ? bytes : most;
}

static inline void fold_next(const Fold *fold, Folded *f, int rank, char *out, const char *values, size_t bytes)
{
    if (fold->widen) {
        fold->widen(rank ? f->next : f->sum, values, bytes / sizeof(uint16_t));
        if (rank)
            fold->reduce(f->sum, f->sum, f->next, 2 * bytes);
    } else if (rank == 0) {
        f->first = values;
    } else {
        fold->reduce(out, rank == 1 ? f->first : out, values, bytes);
    }
}

static inline void fold_end(const Fold *fold, Folded *f, int ranks, char *out, size_t bytes)
{
    if (fold->widen) {
        for (size_t i = 0; fold->averages && i < bytes / sizeof(uint16_t); i++)
            f->sum[i] /= (float)ranks;
        fold->narrow(out, f->sum, bytes / sizeof(uint16_t));
    } else if (ranks == 1) {
        copy_bytes(out, f->first, bytes);
    }
}

/* Each loop is compiled twice: see cpu.h. */
#define FOLD(NAME, TYPE, RESULT)                                                                                     \
    static inline __attribute__((always_inline)) void NAME##_loop(void *out, const void *first, const void *second,  \
                                                                  size_t bytes)                                      \
    {                                                                                                                \
        TYPE *o = out;                                                                                               \
        const TYPE *a = first, *b = second;                                                                          \
        for (size_t i = 0; i < bytes / sizeof(TYPE); i++)                                                            \
            o[i] = RESULT;                                                                                           \
    }                                                                                                                \
    AVX2 static void NAME##_avx2(void *out, const void *a, const void *b, size_t bytes)                              \
    {                                                                                                                \
        NAME##_loop(out, a, b, bytes);                                                                               \
    }                                                                                                                \
    static void NAME##_reduce(void *out, const void *a, const void *b, size_t bytes)                                 \
    {                                                                                                                \
        if (has_avx2)                                                                                                \
            NAME##_avx2(out, a, b, bytes);                                                                           \
        else                                                                                                         \
            NAME##_loop(out, a, b, bytes);                                                                           \
    }                                                                                                                \
    static const Fold NAME[1] = {{NAME##_reduce, NULL, NULL, 0}};
/* NaN stays NaN, as in NumPy. */
#define FOLDS(NAME, TYPE)                                                                                            \
    FOLD(sum_##NAME, TYPE, (TYPE)(a[i] + b[i]))                                                                      \
    FOLD(product_##NAME, TYPE, (TYPE)(1u * a[i] * b[i]))                                                                  \
    FOLD(min_##NAME, TYPE, a[i] < b[i] || a[i] != a[i] ? a[i] : b[i])                                                \
    FOLD(max_##NAME, TYPE, a[i] > b[i] || a[i] != a[i] ? a[i] : b[i])

FOLDS(f4, float)
FOLDS(f8, double)
FOLDS(u1, uint8_t)
FOLDS(u2, uint16_t)
FOLDS(u4, uint32_t)
FOLDS(u8, uint64_t)
/* Sums and products of signed integers use the unsigned functions, which wrap in the same way. */
FOLD(min_i1, int8_t, a[i] < b[i] ? a[i] : b[i])
FOLD(max_i1, int8_t, a[i] > b[i] ? a[i] : b[i])
FOLD(min_i2, int16_t, a[i] < b[i] ? a[i] : b[i])
FOLD(max_i2, int16_t, a[i] > b[i] ? a[i] : b[i])
FOLD(min_i4, int32_t, a[i] < b[i] ? a[i] : b[i])
FOLD(max_i4, int32_t, a[i] > b[i] ? a[i] : b[i])
FOLD(min_i8, int64_t, a[i] < b[i] ? a[i] : b[i])
FOLD(max_i8, int64_t, a[i] > b[i] ? a[i] : b[i])

/* Half precisions, reduced in float32. */
#define NARROW_FOLDS(NAME)                                                                                           \
    static const Fold sum_##NAME[1] = {{sum_f4_reduce, widen_##NAME, narrow_##NAME, 0}},                             \
                      average_##NAME[1] = {{sum_f4_reduce, widen_##NAME, narrow_##NAME, 1}},                         \
                      product_##NAME[1] = {{product_f4_reduce, widen_##NAME, narrow_##NAME, 0}},                     \
                      min_##NAME[1] = {{min_f4_reduce, widen_##NAME, narrow_##NAME, 0}},                             \
                      max_##NAME[1] = {{max_f4_reduce, widen_##NAME, narrow_##NAME, 0}};

NARROW_FOLDS(half)
NARROW_FOLDS(bfloat)

/* Functions for MPI_Op_create: MPI does not define the result of its own MIN and MAX for NaN. */
typedef void Combine(void *values, void *result, int *count, void *datatype);
#define COMBINE(NAME, TYPE)                                                                                          \
    static void combine_##NAME(void *values, void *result, int *count, void *datatype)                               \
    {                                                                                                                \
        (void)datatype;                                                                                              \
        NAME##_reduce(result, values, result, sizeof(TYPE) * (size_t)*count);                                                 \
    }
FOLD(min_g, long double, a[i] < b[i] || a[i] != a[i] ? a[i] : b[i])
FOLD(max_g, long double, a[i] > b[i] || a[i] != a[i] ? a[i] : b[i])
COMBINE(min_f4, float)
COMBINE(max_f4, float)
COMBINE(min_f8, double)
COMBINE(max_f8, double)
COMBINE(min_g, long double)
COMBINE(max_g, long double)

/* op: mi'n', ma'x'; code: NumPy's character of the dtype. */
static inline Combine *combine_of(char op, char code)
{
    return op == 'n' ? code == 'f' ? combine_min_f4 : code == 'd' ? combine_min_f8 : combine_min_g
           : code == 'f' ? combine_max_f4 : code == 'd' ? combine_max_f8 : combine_max_g;
}

/* Return the reduction. op: 's'um, 'p'roduct, mi'n', ma'x', 'a'verage (of half precisions); kind and itemsize as in
 * NumPy, bfloat16's kind is V. NULL: MPI has to reduce. */
static inline const Fold *fold_of(char op, char kind, int itemsize)
{
#define BY_SIZE(NAME, LETTER)                                                                                        \
    (itemsize == 1   ? NAME##_##LETTER##1                                                                           \
     : itemsize == 2 ? NAME##_##LETTER##2                                                                           \
     : itemsize == 4 ? NAME##_##LETTER##4                                                                           \
     : itemsize == 8 ? NAME##_##LETTER##8                                                                           \
                     : NULL)
#define FLOATING(NAME)                                                                                               \
    (kind == 'V' ? NAME##_bfloat : itemsize == 2 ? NAME##_half : itemsize == 4 ? NAME##_f4                       \
                                                               : itemsize == 8   ? NAME##_f8                        \
                                                                                 : NULL)
    switch (kind) {
    case 'c': /* real and imaginary parts are added alike */
        return op == 's' && itemsize == 8 ? sum_f4 : op == 's' && itemsize == 16 ? sum_f8 : NULL;
    case 'V':
    case 'f':
        return op == 's'   ? FLOATING(sum)
               : op == 'p' ? FLOATING(product)
               : op == 'n' ? FLOATING(min)
               : op == 'x' ? FLOATING(max)
               : op == 'a' && itemsize == 2 ? (kind == 'V' ? average_bfloat : average_half)
                                            : NULL;
    case 'i':
        if (op == 'n' || op == 'x')
            return op == 'n' ? BY_SIZE(min, i) : BY_SIZE(max, i);
        /* fall through */
    case 'u':
        return op == 's' ? BY_SIZE(sum, u) : op == 'p' ? BY_SIZE(product, u) : op == 'n' ? BY_SIZE(min, u)
                                                                             : op == 'x' ? BY_SIZE(max, u)
                                                                                         : NULL;
    }
    return NULL;
}

#endif
