/* SPDX-License-Identifier: Apache-2.0 */
#include "combine.h"

#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")    /* traps are masked; else floats on either side of a ?: stop vector code */
#endif

#include "combine_elements.h"
#include "hetccl/spi.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HETCCL_X86 1
#include <immintrin.h>
#endif

#ifndef HETCCL_COMBINE_BEST
#define HETCCL_COMBINE_BEST 2         /* newest instructions that may be used: 0 the base, 1 AVX2, 2 AVX-512 (for tests) */
#endif
#define TILE 1024                     /* elements that are combined at a time when more than one pass is needed */
#define TILE_BYTES 4096
#define HETCCL_BLOCK 256              /* bytes of a step of stream_sum */
#define HETCCL_AHEAD 4096             /* bytes by which loops ask early for lines of memory */
#define HETCCL_NEAR 1024              /* and of a ring in the last-level cache */

/* d[i] = e[i] = a[i] op b[i] for n elements; e may be NULL. */
typedef void (*hetccl_fold)(char *d, char *e, const char *a, const char *b, size_t n);

/* What is known about one dtype. widen and narrow exist for the floats that compute in float32; some of these have no
 * fold of their own: the tiles of float32 are fast enough and a tenth of the code. */
typedef struct hetccl_kernels {
    hetccl_fold fold[HETCCL_REDOP_COUNT];
    void (*widen)(float *to, const char *from, size_t n);
    void (*narrow)(char *to, const float *from, size_t n);
    int reals;                        /* 1: complex, an element is two numbers */
    hetccl_fold stream_sum;           /* d goes past the caches; NULL: there is none */
} hetccl_kernels;

#define HETCCL_ISA(name) name##_base
#define HETCCL_TARGET
#include "combine_kernels.h"
#undef HETCCL_ISA
#undef HETCCL_TARGET

#ifdef HETCCL_X86
#define HETCCL_F16C
#define HETCCL_ISA(name) name##_avx2
#define HETCCL_TARGET __attribute__((target("avx2,f16c")))
#define HETCCL_PAST(to, from)                                                                          \
    (_mm256_stream_si256((__m256i *)(to), _mm256_load_si256((const __m256i *)(from))),                 \
     _mm256_stream_si256((__m256i *)((to) + 32), _mm256_load_si256((const __m256i *)((from) + 32))))
#include "combine_kernels.h"
#undef HETCCL_PAST
#undef HETCCL_ISA
#undef HETCCL_TARGET
#define HETCCL_ISA(name) name##_avx512
#ifdef __clang__
#define HETCCL_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#else
#define HETCCL_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#endif
#define HETCCL_PAST(to, from) _mm512_stream_si512((__m512i *)(to), _mm512_load_si512((const void *)(from)))
#include "combine_kernels.h"
#undef HETCCL_PAST
#undef HETCCL_ISA
#undef HETCCL_TARGET
#endif

static const hetccl_kernels *kernels_of(int dtype);
static int wide_only(const hetccl_kernels *k, int redop);
static void fold_tiles(const hetccl_kernels *k, hetccl_fold fold, void *const *dst, int n_dst, const void *const *src,
                       int n_src, size_t count, size_t size, int dtype, double divisor);
static void fold_wide_tiles(const hetccl_kernels *k, int redop, void *const *dst, int n_dst, const void *const *src,
                            int n_src, size_t count, size_t size, double divisor);
static void copy_all(const hetccl_kernels *k, void *const *dst, int n_dst, const void *src, size_t count, size_t size,
                     int dtype);
static int good_divisor(int dtype, double divisor);
static inline uint64_t arithmetic_enter(void);
static inline void arithmetic_leave(uint64_t saved);

static const uint8_t sizes[HETCCL_DTYPE_COUNT] = {
    [HETCCL_INT8] = 1, [HETCCL_UINT8] = 1, [HETCCL_INT32] = 4, [HETCCL_UINT32] = 4, [HETCCL_INT64] = 8,
    [HETCCL_UINT64] = 8, [HETCCL_FLOAT16] = 2, [HETCCL_FLOAT32] = 4, [HETCCL_FLOAT64] = 8, [HETCCL_BFLOAT16] = 2,
    [HETCCL_INT16] = 2, [HETCCL_UINT16] = 2, [HETCCL_BOOL] = 1, [HETCCL_COMPLEX64] = 8, [HETCCL_COMPLEX128] = 16,
    [HETCCL_FLOAT8_E4M3FN] = 1, [HETCCL_FLOAT8_E5M2] = 1, [HETCCL_FLOAT8_E4M3FNUZ] = 1, [HETCCL_FLOAT8_E5M2FNUZ] = 1,
};

int hetccl_combine(void *const *dst, int n_dst, const void *const *src, int n_src, size_t count, int dtype, int redop,
                   double divisor)
{
    if ((unsigned)dtype >= HETCCL_DTYPE_COUNT || (unsigned)redop >= HETCCL_REDOP_COUNT || n_src < 1 || n_dst < 1 ||
        n_dst > 8)
        return HETCCL_INVALID;
    if (redop == HETCCL_AVG)
        redop = dtype == HETCCL_BOOL ? HETCCL_AVG : HETCCL_SUM;
    const hetccl_kernels *k = kernels_of(dtype);
    hetccl_fold fold = k->fold[redop];
    if (!fold && !wide_only(k, redop))
        return HETCCL_UNSUPPORTED;
    if (divisor != 1.0 && !good_divisor(dtype, divisor))
        return HETCCL_INVALID;
    if (count == 0)
        return HETCCL_OK;
    size_t size = sizes[dtype];
    if (k->reals) {
        count *= 2;
        size /= 2;
    }
    uint64_t saved = arithmetic_enter();
    if (fold && n_src == 2 && n_dst <= 2 && divisor == 1.0)
        fold(dst[0], n_dst == 2 ? dst[1] : NULL, src[0], src[1], count);
    else if (n_src == 1 && divisor == 1.0)
        copy_all(k, dst, n_dst, src[0], count, size, dtype);
    else if (k->widen && (!fold || n_src > 2 || divisor != 1.0))
        fold_wide_tiles(k, redop, dst, n_dst, src, n_src, count, size, divisor);
    else
        fold_tiles(k, fold, dst, n_dst, src, n_src, count, size, dtype, divisor);
    arithmetic_leave(saved);
    return HETCCL_OK;
}

static int is_integer(int dtype)
{
    return dtype <= HETCCL_UINT64 || dtype == HETCCL_INT16 || dtype == HETCCL_UINT16;
}

int hetccl_can_scale(int dtype, double factor)
{
    if ((unsigned)dtype >= HETCCL_DTYPE_COUNT || dtype == HETCCL_BOOL)
        return 0;
    return !is_integer(dtype) || (factor > -9.2e18 && factor < 9.2e18 && factor == (double)(int64_t)factor);
}

/* Unsigned, so that a product wraps; the low bits do not depend on the sign. */
#define MULTIPLY(T, C, FIX)                               \
    do {                                                  \
        T x;                                              \
        for (size_t i = 0; i < count; i++) {              \
            memcpy(&x, (const char *)src + i * sizeof x, sizeof x); \
            x = (T)FIX((C)x * (C)by);                     \
            memcpy((char *)dst + i * sizeof x, &x, sizeof x); \
        }                                                 \
    } while (0)
#define AS_IS(x) (x)

int hetccl_scale(void *dst, const void *src, size_t count, int dtype, double factor)
{
    if (!hetccl_can_scale(dtype, factor))
        return HETCCL_INVALID;
    const hetccl_kernels *k = kernels_of(dtype);
    uint64_t saved = arithmetic_enter();
    if (is_integer(dtype)) {
        uint64_t by = (uint64_t)(int64_t)factor;
        switch (sizes[dtype]) {
        case 1: MULTIPLY(uint8_t, uint64_t, AS_IS); break;
        case 2: MULTIPLY(uint16_t, uint64_t, AS_IS); break;
        case 4: MULTIPLY(uint32_t, uint64_t, AS_IS); break;
        default: MULTIPLY(uint64_t, uint64_t, AS_IS); break;
        }
    } else if (k->widen) {
        float tile[TILE] __attribute__((aligned(64))), by = (float)factor;
        size_t size = sizes[dtype];
        for (size_t o = 0; o < count; o += TILE) {
            size_t n = count - o < TILE ? count - o : TILE;
            k->widen(tile, (const char *)src + o * size, n);
            for (size_t i = 0; i < n; i++)
                tile[i] = tile[i] * by;
            k->narrow((char *)dst + o * size, tile, n);
        }
    } else {
        double by = factor;
        count <<= k->reals;
        if (dtype == HETCCL_FLOAT32 || dtype == HETCCL_COMPLEX64)
            MULTIPLY(float, float, hetccl_canonical_f32);
        else
            MULTIPLY(double, double, hetccl_canonical_f64);
    }
    arithmetic_leave(saved);
    return HETCCL_OK;
}
#undef MULTIPLY
#undef AS_IS

int hetccl_can_combine(int dtype, int redop)
{
    if ((unsigned)dtype >= HETCCL_DTYPE_COUNT || (unsigned)redop >= HETCCL_REDOP_COUNT)
        return 0;
    if (redop == HETCCL_AVG)
        return dtype != HETCCL_BOOL;
    return kernels_base[dtype].fold[redop] || wide_only(&kernels_base[dtype], redop);
}

size_t hetccl_dtype_size(int dtype)
{
    return (unsigned)dtype < HETCCL_DTYPE_COUNT ? sizes[dtype] : 0;
}

static const hetccl_kernels *kernels_of(int dtype)
{
#ifdef HETCCL_X86
    if (HETCCL_COMBINE_BEST > 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        if (HETCCL_COMBINE_BEST > 1 && __builtin_cpu_supports("avx512f") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512dq"))
            return &kernels_avx512[dtype];
        return &kernels_avx2[dtype];
    }
#endif
    return &kernels_base[dtype];
}

/* The operator is known only by way of float32. */
static int wide_only(const hetccl_kernels *k, int redop)
{
    return k->widen && kernels_base[HETCCL_FLOAT32].fold[redop];
}

/* In place; at most TILE_BYTES, aligned. Integers truncate toward zero. Where the divisor is no float32, float32 divides
 * in float64 and rounds once more: the quotient of a float32 by a float32 would be the same either way. */
#define DIVIDE(T, C, FIX)                            \
    for (size_t i = 0; i < n; i++)                   \
        ((T *)tile)[i] = (T)FIX((C)((T *)tile)[i] / (C)divisor)
#define AS_IS(x) (x)
static void divide_tile(void *tile, size_t n, int dtype, double divisor)
{
    switch (dtype) {
    case HETCCL_INT8: DIVIDE(int8_t, int64_t, AS_IS); break;
    case HETCCL_UINT8: DIVIDE(uint8_t, int64_t, AS_IS); break;
    case HETCCL_INT16: DIVIDE(int16_t, int64_t, AS_IS); break;
    case HETCCL_UINT16: DIVIDE(uint16_t, int64_t, AS_IS); break;
    case HETCCL_INT32: DIVIDE(int32_t, int64_t, AS_IS); break;
    case HETCCL_UINT32: DIVIDE(uint32_t, int64_t, AS_IS); break;
    case HETCCL_INT64: DIVIDE(int64_t, int64_t, AS_IS); break;
    case HETCCL_UINT64: DIVIDE(uint64_t, uint64_t, AS_IS); break;
    case HETCCL_FLOAT64:
    case HETCCL_COMPLEX128: DIVIDE(double, double, hetccl_canonical_f64); break;
    default:
        if ((double)(float)divisor == divisor)
            DIVIDE(float, float, hetccl_canonical_f32);
        else
            DIVIDE(float, double, hetccl_canonical_f32);
    }
}
#undef DIVIDE
#undef AS_IS

static int good_divisor(int dtype, double divisor)
{
    if (dtype == HETCCL_BOOL)
        return 0;
    return !is_integer(dtype) || (divisor >= 1.0 && divisor <= 4294967296.0 && divisor == (double)(uint64_t)divisor);
}

/* More than two sources, more than two destinations, or a division: a tile at a time, so that it stays in the L1 cache. */
static void fold_tiles(const hetccl_kernels *k, hetccl_fold fold, void *const *dst, int n_dst, const void *const *src,
                       int n_src, size_t count, size_t size, int dtype, double divisor)
{
    char tile[TILE_BYTES] __attribute__((aligned(64)));
    size_t step = TILE_BYTES / size;
    for (size_t o = 0; o < count; o += step) {
        size_t n = count - o < step ? count - o : step, b = o * size;
        const char *sofar = (const char *)src[0] + b;
        int last = divisor == 1.0 ? n_src - 1 : n_src;         /* the last fold goes straight to the destinations */
        for (int s = 1; s < last; s++) {
            fold(tile, NULL, sofar, (const char *)src[s] + b, n);
            sofar = tile;
        }
        int done = 0;
        if (last < n_src) {
            fold((char *)dst[0] + b, n_dst > 1 ? (char *)dst[1] + b : NULL, sofar, (const char *)src[last] + b, n);
            sofar = (const char *)dst[0] + b;
            done = n_dst > 1 ? 2 : 1;
        } else {
            if (sofar != tile)
                memcpy(tile, sofar, n * size);
            divide_tile(tile, n, dtype, divisor);
            sofar = tile;
        }
        for (int d = done; d < n_dst; d++)
            memcpy((char *)dst[d] + b, sofar, n * size);
    }
}

/* The same for floats that compute in float32: widened once, rounded once. */
static void fold_wide_tiles(const hetccl_kernels *k, int redop, void *const *dst, int n_dst, const void *const *src,
                            int n_src, size_t count, size_t size, double divisor)
{
    float sum[TILE] __attribute__((aligned(64))), next[TILE] __attribute__((aligned(64)));
    hetccl_fold fold = kernels_of(HETCCL_FLOAT32)->fold[redop];
    for (size_t o = 0; o < count; o += TILE) {
        size_t n = count - o < TILE ? count - o : TILE, b = o * size;
        k->widen(sum, (const char *)src[0] + b, n);
        for (int s = 1; s < n_src; s++) {
            k->widen(next, (const char *)src[s] + b, n);
            fold((char *)sum, NULL, (const char *)sum, (const char *)next, n);
        }
        if (divisor != 1.0)
            divide_tile(sum, n, HETCCL_FLOAT32, divisor);
        k->narrow((char *)dst[0] + b, sum, n);
        for (int d = 1; d < n_dst; d++)
            memcpy((char *)dst[d] + b, (const char *)dst[0] + b, n * size);
    }
}

/* One source: its bytes, except that bool comes out as 0 or 1. */
static void copy_all(const hetccl_kernels *k, void *const *dst, int n_dst, const void *src, size_t count, size_t size,
                     int dtype)
{
    for (int d = 0; d < n_dst; d++) {
        if (dtype == HETCCL_BOOL)
            k->fold[HETCCL_BOR](dst[d], NULL, src, src, count);
        else if (dst[d] != src)
            memcpy(dst[d], src, count * size);
    }
}

/* Round to nearest, denormals kept, no traps. Writing the control register is slow, so only where it differs; the low
 * bits of MXCSR are sticky flags that do not matter. */
static inline uint64_t arithmetic_enter(void)
{
#ifdef HETCCL_X86
    uint32_t now = _mm_getcsr();
    if (__builtin_expect((now & ~0x3fu) != 0x1f80u, 0))
        _mm_setcsr(0x1f80u);
    return now;
#elif defined(__aarch64__)
    uint64_t now, want;
    __asm__ volatile("mrs %0, fpcr" : "=r"(now));
    want = now & ~((3ull << 22) | (1ull << 24) | (1ull << 25) | (1ull << 19) | 3ull);
    if (now != want)
        __asm__ volatile("msr fpcr, %0" ::"r"(want) : "memory");
    return now;
#else
    return 0;
#endif
}

static inline void arithmetic_leave(uint64_t saved)
{
#ifdef HETCCL_X86
    if (__builtin_expect((saved & ~(uint64_t)0x3f) != 0x1f80u, 0))
        _mm_setcsr((uint32_t)saved);
#elif defined(__aarch64__)
    uint64_t now;
    __asm__ volatile("mrs %0, fpcr" : "=r"(now));
    if (now != saved)
        __asm__ volatile("msr fpcr, %0" ::"r"(saved) : "memory");
#endif
}

#include "combine_past.h"
#include "copy_fetch.h"
