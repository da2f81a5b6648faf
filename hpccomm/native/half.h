/* float16 and bfloat16 to float32 and back, rounded to nearest, ties to even: the same results as NumPy's conversions
 * and those of ml_dtypes. */
#ifndef HPCCOMM_HALF_H
#define HPCCOMM_HALF_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__ARM_FP16_FORMAT_IEEE) /* AArch64 has an instruction */
static inline float half_to_float(uint16_t half)
{
    __fp16 value;
    memcpy(&value, &half, 2);
    return (float)value;
}

static inline uint16_t float_to_half(float value)
{
    __fp16 narrow = (__fp16)value;
    uint16_t half;
    memcpy(&half, &narrow, 2);
    return half;
}
#else
static inline float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float value;
    if (rest >= 0x7c00) { /* infinity or NaN */
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
        bits = sign | ((rest << 13) + (112u << 23));
    } else { /* subnormal: units of 2^-24 */
        value = (float)rest * 0x1p-24f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t float_to_half(float value)
{
    uint32_t bits, rest, sign;
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000;
    rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) /* NaN: it stays NaN, even if its high bits are 0 */
        return (uint16_t)(sign | 0x7c00 | ((rest >> 13 & 0x3ff) ? (rest >> 13 & 0x3ff) : 1));
    if (rest >= 0x477ff000) /* rounds to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) { /* subnormal: the sum rounds to units of 2^-24 */
        memcpy(&value, &rest, 4);
        value += 0.5f;
        memcpy(&rest, &value, 4);
        return (uint16_t)(sign | (rest - 0x3f000000));
    }
    rest += (rest >> 13 & 1) + 0xfff;
    return (uint16_t)(sign | ((rest - (112u << 23)) >> 13));
}

#endif

static inline float bfloat_to_float(uint16_t bfloat)
{
    uint32_t bits = (uint32_t)bfloat << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t float_to_bfloat(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = (bits >> 16 & 0x8000) | 0x7fc0;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

/* The same for arrays of n values. */
#define CONVERSIONS(NAME)                                                                                            \
    static inline __attribute__((always_inline)) void widen_##NAME##_loop(float *wide, const uint16_t *x, size_t n)  \
    {                                                                                                                \
        for (size_t i = 0; i < n; i++)                                                                               \
            wide[i] = NAME##_to_float(x[i]);                                                                         \
    }                                                                                                                \
    static inline __attribute__((always_inline)) void narrow_##NAME##_loop(uint16_t *x, const float *wide, size_t n) \
    {                                                                                                                \
        for (size_t i = 0; i < n; i++)                                                                               \
            x[i] = float_to_##NAME(wide[i]);                                                                         \
    }                                                                                                                \
    AVX2 static void widen_##NAME##_avx2(float *wide, const uint16_t *x, size_t n);                                  \
    AVX2 static void narrow_##NAME##_avx2(uint16_t *x, const float *wide, size_t n);                                 \
    static void widen_##NAME(float *wide, const void *x, size_t n)                                                   \
    {                                                                                                                \
        if (has_avx2)                                                                                                \
            widen_##NAME##_avx2(wide, x, n);                                                                         \
        else                                                                                                         \
            widen_##NAME##_loop(wide, x, n);                                                                         \
    }                                                                                                                \
    static void narrow_##NAME(void *x, const float *wide, size_t n)                                                  \
    {                                                                                                                \
        if (has_avx2)                                                                                                \
            narrow_##NAME##_avx2(x, wide, n);                                                                        \
        else                                                                                                         \
            narrow_##NAME##_loop(x, wide, n);                                                                        \
    }

CONVERSIONS(half)
CONVERSIONS(bfloat)

AVX2 static void widen_bfloat_avx2(float *wide, const uint16_t *x, size_t n) { widen_bfloat_loop(wide, x, n); }
AVX2 static void narrow_bfloat_avx2(uint16_t *x, const float *wide, size_t n) { narrow_bfloat_loop(x, wide, n); }

#if defined(__x86_64__)
AVX2 static void widen_half_avx2(float *wide, const uint16_t *x, size_t n)
{
    for (; n >= 8; n -= 8, wide += 8, x += 8)
        _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)));
    for (size_t i = 0; i < n; i++)
        wide[i] = _cvtsh_ss(x[i]);
}

AVX2 static void narrow_half_avx2(uint16_t *x, const float *wide, size_t n)
{
    for (; n >= 8; n -= 8, wide += 8, x += 8)
        _mm_storeu_si128((__m128i *)x, _mm256_cvtps_ph(_mm256_loadu_ps(wide), _MM_FROUND_TO_NEAREST_INT));
    for (size_t i = 0; i < n; i++)
        x[i] = _cvtss_sh(wide[i], _MM_FROUND_TO_NEAREST_INT);
}
#else
AVX2 static void widen_half_avx2(float *wide, const uint16_t *x, size_t n) { widen_half_loop(wide, x, n); }
AVX2 static void narrow_half_avx2(uint16_t *x, const float *wide, size_t n) { narrow_half_loop(x, wide, n); }
#endif

#endif
