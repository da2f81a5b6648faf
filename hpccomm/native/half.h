/* float16 to float32 and back, rounded to nearest, ties to even: the same results as NumPy's conversions. */
#ifndef HPCCOMM_HALF_H
#define HPCCOMM_HALF_H

#include <stdint.h>
#include <string.h>

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
