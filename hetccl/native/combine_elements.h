/* SPDX-License-Identifier: Apache-2.0
 * One element at a time: small floats to float32 and back, and the canonical NaN. Plain integer code without branches, so
 * that compilers turn the loops around it into vector code. Needs denormals on and rounding to nearest (combine.c sets both).
 * Plain enough for C, for C++ and for kernel compilers, so that host and devices round alike by construction.
 */
#ifndef HETCCL_COMBINE_ELEMENTS_H
#define HETCCL_COMBINE_ELEMENTS_H
#ifndef HETCCL_INLINE                       /* a device's kernels are compiled from this text too: vendors/cuda_kernels.py */
#include <stdint.h>
#define HETCCL_INLINE static inline __attribute__((always_inline))
#endif

typedef union hetccl_bits {
    float f;
    uint32_t u;
} hetccl_bits;

HETCCL_INLINE float hetccl_float_of(uint32_t u)
{
    hetccl_bits b;
    b.u = u;
    return b.f;
}

HETCCL_INLINE uint32_t hetccl_bits_of(float f)
{
    hetccl_bits b;
    b.f = f;
    return b.u;
}

/* cond ? yes : no, without a jump: with jumps the loops would not become vector code. cond is 0 or 1. */
HETCCL_INLINE uint32_t hetccl_pick(uint32_t cond, uint32_t yes, uint32_t no) { return no ^ ((yes ^ no) & (0u - cond)); }

/* What a NaN looks like when it comes out of a combination: the same bits whatever came in. */
HETCCL_INLINE float hetccl_canonical_f32(float x) { return x != x ? hetccl_float_of(0x7fc00000u) : x; }
HETCCL_INLINE double hetccl_canonical_f64(double x)
{
    union {
        double f;
        uint64_t u;
    } nan;
    nan.u = 0x7ff8000000000000u;
    return x != x ? nan.f : x;
}

/* A small float is sign, exponent, `man` mantissa bits. `fnuz`: no infinity, no negative zero, one NaN (sign bit alone).
 * `infinite`: the top exponent holds infinity and NaN, as in IEEE; otherwise only all ones is NaN (E4M3FN). */
HETCCL_INLINE float hetccl_widen(uint32_t x, int bits, int man, int bias, int infinite, int fnuz)
{
    uint32_t sign = x >> (bits - 1), body = x & ((1u << (bits - 1)) - 1), top = (1u << (bits - 1)) - 1;
    /* Below the smallest normal number the body counts smallest steps. Both forms are exact. */
    float steps = (float)(int32_t)body * hetccl_float_of((uint32_t)(127 + 1 - bias - man) << 23);
    uint32_t normal = (body << (23 - man)) + ((uint32_t)(127 - bias) << 23);
    uint32_t r = hetccl_pick(body >> man == 0, hetccl_bits_of(steps), normal);
    if (infinite) {
        uint32_t inf = top & ~((1u << man) - 1);
        r = hetccl_pick(body >= inf, 0x7f800000u | (body - inf) << (23 - man), r);
    } else if (fnuz) {
        r = hetccl_pick(x == 1u << (bits - 1), 0x7fc00000u, r);
    } else {
        r = hetccl_pick(body == top, 0x7fc00000u, r);
    }
    return hetccl_float_of(r | sign << 31);
}

/* To nearest, ties to even; too large becomes infinity, or NaN where the format has none. */
HETCCL_INLINE uint32_t hetccl_narrow(float f, int bits, int man, int bias, int infinite, int fnuz)
{
    uint32_t x = hetccl_bits_of(f), sign = x >> 31 << (bits - 1), a = x & 0x7fffffffu;
    uint32_t top = (1u << (bits - 1)) - 1, inf = top & ~((1u << man) - 1);
    int shift = 23 - man;
    uint32_t normal = ((a + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1u)) >> shift) - ((uint32_t)(127 - bias) << man);
    /* Below the smallest normal number: adding a power of two whose last bit is the format's smallest step rounds. */
    uint32_t magic = (uint32_t)(127 + 1 - bias - man + 23) << 23;
    uint32_t tiny = hetccl_bits_of(hetccl_float_of(a) + hetccl_float_of(magic)) - magic;
    uint32_t r = hetccl_pick(a < (uint32_t)(127 + 1 - bias) << 23, tiny, normal);
    if (infinite) {
        uint32_t nan = bits == 16 ? inf | 1u << (man - 1) : top;
        r = hetccl_pick(r > inf, inf, r);
        return hetccl_pick(a > 0x7f800000u, nan, r | sign);
    }
    if (fnuz) {
        uint32_t over = (a >= 0x7f800000u) | (r > top);
        r = hetccl_pick(r == 0, 0, r | sign);
        return hetccl_pick(over, 1u << (bits - 1), r);
    }
    return hetccl_pick((a >= 0x7f800000u) | (r >= top), top, r | sign);
}

HETCCL_INLINE float hetccl_widen_f16(uint16_t x) { return hetccl_widen(x, 16, 10, 15, 1, 0); }
HETCCL_INLINE uint16_t hetccl_narrow_f16(float f) { return (uint16_t)hetccl_narrow(f, 16, 10, 15, 1, 0); }
HETCCL_INLINE float hetccl_widen_e4m3fn(uint8_t x) { return hetccl_widen(x, 8, 3, 7, 0, 0); }
HETCCL_INLINE uint8_t hetccl_narrow_e4m3fn(float f) { return (uint8_t)hetccl_narrow(f, 8, 3, 7, 0, 0); }
HETCCL_INLINE float hetccl_widen_e5m2(uint8_t x) { return hetccl_widen(x, 8, 2, 15, 1, 0); }
HETCCL_INLINE uint8_t hetccl_narrow_e5m2(float f) { return (uint8_t)hetccl_narrow(f, 8, 2, 15, 1, 0); }
HETCCL_INLINE float hetccl_widen_e4m3fnuz(uint8_t x) { return hetccl_widen(x, 8, 3, 8, 0, 1); }
HETCCL_INLINE uint8_t hetccl_narrow_e4m3fnuz(float f) { return (uint8_t)hetccl_narrow(f, 8, 3, 8, 0, 1); }
HETCCL_INLINE float hetccl_widen_e5m2fnuz(uint8_t x) { return hetccl_widen(x, 8, 2, 16, 0, 1); }
HETCCL_INLINE uint8_t hetccl_narrow_e5m2fnuz(float f) { return (uint8_t)hetccl_narrow(f, 8, 2, 16, 0, 1); }

HETCCL_INLINE float hetccl_widen_bf16(uint16_t x) { return hetccl_float_of((uint32_t)x << 16); }
HETCCL_INLINE uint16_t hetccl_narrow_bf16(float f)
{
    uint32_t x = hetccl_bits_of(f);
    uint32_t r = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    return (uint16_t)((x & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : r);
}
#endif
