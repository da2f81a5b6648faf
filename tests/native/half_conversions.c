/* Compare the conversions of half precisions for every machine with those for AVX2 and F16C; print the differences. */
#include <stdio.h>

#include "half.h"

enum { N = 1 << 16, STEP = 251 /* between the bits of two float32: odd, and coprime to every power of two */ };

static uint16_t narrow[N], other_narrow[N];
static float wide[N], other_wide[N];

static int is_nan(float value) { return value != value; }

static int compare(const char *name, void (*widen)(float *, const uint16_t *, size_t),
                   void (*other_widen)(float *, const uint16_t *, size_t),
                   void (*shorten)(uint16_t *, const float *, size_t),
                   void (*other_shorten)(uint16_t *, const float *, size_t))
{
    int differences = 0;
    for (int i = 0; i < N; i++)
        narrow[i] = (uint16_t)i;
    widen(wide, narrow, N);
    other_widen(other_wide, narrow, N - 3); /* a rest that is not a whole vector */
    for (int i = 0; i < N - 3; i++)
        differences += memcmp(&wide[i], &other_wide[i], 4) && !(is_nan(wide[i]) && is_nan(other_wide[i]));
    uint32_t bits = 0;
    for (int round = 0; round < 256; round++) {
        for (int i = 0; i < N; i++, bits += STEP)
            memcpy(&wide[i], &bits, 4);
        shorten(narrow, wide, N);
        other_shorten(other_narrow, wide, N - 3);
        for (int i = 0; i < N - 3; i++)
            differences += narrow[i] != other_narrow[i] && !is_nan(wide[i]);
    }
    printf("%s: %d differences\n", name, differences);
    return differences;
}

int main(void)
{
    has_avx2 = look_for_avx2();
    if (!has_avx2) {
        puts("without AVX2");
        return 0;
    }
    return !!(compare("half", widen_half_loop, widen_half_avx2, narrow_half_loop, narrow_half_avx2) +
              compare("bfloat", widen_bfloat_loop, widen_bfloat_avx2, narrow_bfloat_loop, narrow_bfloat_avx2));
}
