/* SPDX-License-Identifier: Apache-2.0
 * The loops of combine.c. Included once for each instruction set, with
 *   HETCCL_ISA(name)   the name of this copy
 *   HETCCL_TARGET      the compiler's attribute that allows the instructions
 *   HETCCL_F16C        defined where f16 converts in hardware
 *   HETCCL_PAST(to, from)   stores 64 bytes past the caches; undefined where there is no such instruction
 * and, at the end, defines the table HETCCL_ISA(kernels).
 *
 * ivdep: a destination may be a source, at the same index only. Elements may lie at any address (aligned(1)).
 */
#define HETCCL_AT_ANY(T) typedef T at __attribute__((aligned(1), may_alias))

/* d[i] = e[i] = a[i] op b[i]; e may be NULL. EXPR sees x and y of type C. */
#define HETCCL_FOLD(name, T, C, IN, OUT, EXPR)                                                             \
    HETCCL_TARGET static void HETCCL_ISA(name)(char *d_, char *e_, const char *a_, const char *b_, size_t n) \
    {                                                                                                      \
        HETCCL_AT_ANY(T);                                                                                  \
        at *d = (at *)d_, *e = (at *)e_;                                                                   \
        const at *a = (const at *)a_, *b = (const at *)b_;                                                 \
        if (e) {                                                                                           \
            _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)                                            \
            {                                                                                              \
                C x = IN(a[i]), y = IN(b[i]);                                                              \
                T r = (T)OUT(EXPR);                                                                        \
                d[i] = r;                                                                                  \
                e[i] = r;                                                                                  \
            }                                                                                              \
        } else {                                                                                           \
            _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)                                            \
            {                                                                                              \
                C x = IN(a[i]), y = IN(b[i]);                                                              \
                d[i] = (T)OUT(EXPR);                                                                       \
            }                                                                                              \
        }                                                                                                  \
    }

#define HETCCL_SAME(x) (x)
/* NaN wins over everything, on either side. */
#define HETCCL_MAXIMUM (((x > y) | (x != x)) ? x : y)
#define HETCCL_MINIMUM (((x < y) | (x != x)) ? x : y)

#define HETCCL_FLOAT_FOLDS(name, T, C, IN, OUT)                   \
    HETCCL_FOLD(sum_##name, T, C, IN, OUT, x + y)                 \
    HETCCL_FOLD(prod_##name, T, C, IN, OUT, x * y)                \
    HETCCL_FOLD(max_##name, T, C, IN, OUT, HETCCL_MAXIMUM)        \
    HETCCL_FOLD(min_##name, T, C, IN, OUT, HETCCL_MINIMUM)

/* Arithmetic of unsigned integers wraps, and is that of signed ones too; the 16-bit product is done in 32 bits because
 * two uint16_t would be multiplied as int. */
#define HETCCL_WRAP_FOLDS(name, T, C)                                         \
    HETCCL_FOLD(sum_##name, T, C, HETCCL_SAME, HETCCL_SAME, x + y)            \
    HETCCL_FOLD(prod_##name, T, C, HETCCL_SAME, HETCCL_SAME, x * y)           \
    HETCCL_FOLD(band_##name, T, C, HETCCL_SAME, HETCCL_SAME, x & y)           \
    HETCCL_FOLD(bor_##name, T, C, HETCCL_SAME, HETCCL_SAME, x | y)            \
    HETCCL_FOLD(bxor_##name, T, C, HETCCL_SAME, HETCCL_SAME, x ^ y)

#define HETCCL_ORDER_FOLDS(name, T)                                           \
    HETCCL_FOLD(max_##name, T, T, HETCCL_SAME, HETCCL_SAME, x > y ? x : y)    \
    HETCCL_FOLD(min_##name, T, T, HETCCL_SAME, HETCCL_SAME, x < y ? x : y)

HETCCL_FLOAT_FOLDS(f32, float, float, HETCCL_SAME, hetccl_canonical_f32)
HETCCL_FLOAT_FOLDS(f64, double, double, HETCCL_SAME, hetccl_canonical_f64)
HETCCL_FLOAT_FOLDS(bf16, uint16_t, float, hetccl_widen_bf16, hetccl_narrow_bf16)
HETCCL_WRAP_FOLDS(i8, uint8_t, uint32_t)
HETCCL_WRAP_FOLDS(i16, uint16_t, uint32_t)
HETCCL_WRAP_FOLDS(i32, uint32_t, uint32_t)
HETCCL_WRAP_FOLDS(i64, uint64_t, uint64_t)
HETCCL_ORDER_FOLDS(s8, int8_t)
HETCCL_ORDER_FOLDS(u8, uint8_t)
HETCCL_ORDER_FOLDS(s16, int16_t)
HETCCL_ORDER_FOLDS(u16, uint16_t)
HETCCL_ORDER_FOLDS(s32, int32_t)
HETCCL_ORDER_FOLDS(u32, uint32_t)
HETCCL_ORDER_FOLDS(s64, int64_t)
HETCCL_ORDER_FOLDS(u64, uint64_t)
HETCCL_FOLD(or_bool, uint8_t, uint8_t, HETCCL_SAME, HETCCL_SAME, (x | y) != 0)
HETCCL_FOLD(and_bool, uint8_t, uint8_t, HETCCL_SAME, HETCCL_SAME, (x != 0) & (y != 0))
HETCCL_FOLD(xor_bool, uint8_t, uint8_t, HETCCL_SAME, HETCCL_SAME, (x != 0) ^ (y != 0))

/* float32 <-> small float, for more than two sources and for division; for floats without folds of their own, always. */
#define HETCCL_CONVERT(name, T)                                                                     \
    HETCCL_TARGET static void HETCCL_ISA(widen_##name)(float *to, const char *from_, size_t n)      \
    {                                                                                               \
        HETCCL_AT_ANY(T);                                                                           \
        const at *from = (const at *)from_;                                                         \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) to[i] = hetccl_widen_##name(from[i]);   \
    }                                                                                               \
    HETCCL_TARGET static void HETCCL_ISA(narrow_##name)(char *to_, const float *from, size_t n)     \
    {                                                                                               \
        HETCCL_AT_ANY(T);                                                                           \
        at *to = (at *)to_;                                                                         \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) to[i] = hetccl_narrow_##name(from[i]);  \
    }

HETCCL_CONVERT(bf16, uint16_t)
HETCCL_CONVERT(e4m3fn, uint8_t)
HETCCL_CONVERT(e5m2, uint8_t)
HETCCL_CONVERT(e4m3fnuz, uint8_t)
HETCCL_CONVERT(e5m2fnuz, uint8_t)

#ifdef HETCCL_F16C
#define HETCCL_F16_LOAD(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define HETCCL_F16_PACK(v) _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

HETCCL_TARGET static inline __m128i HETCCL_ISA(pack_f16)(__m256 r)
{
    __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return HETCCL_F16_PACK(_mm256_blendv_ps(r, nan, _mm256_cmp_ps(r, r, _CMP_UNORD_Q)));
}

/* Eight at a time; what is left over goes through a small buffer, so that every element sees the same instructions. */
#define HETCCL_F16_FOLD(name, EXPR)                                                                          \
    HETCCL_TARGET static void HETCCL_ISA(name##_f16)(char *d, char *e, const char *a, const char *b, size_t n) \
    {                                                                                                        \
        size_t i = 0, nbytes = n * 2;                                                                        \
        for (; i + 16 <= nbytes; i += 16) {                                                                  \
            __m256 x = HETCCL_F16_LOAD(a + i), y = HETCCL_F16_LOAD(b + i);                                   \
            __m128i r = HETCCL_ISA(pack_f16)(EXPR);                                                          \
            _mm_storeu_si128((__m128i *)(d + i), r);                                                         \
            if (e)                                                                                           \
                _mm_storeu_si128((__m128i *)(e + i), r);                                                     \
        }                                                                                                    \
        if (i < nbytes) {                                                                                    \
            char ta[16] = {0}, tb[16] = {0};                                                                 \
            memcpy(ta, a + i, nbytes - i);                                                                   \
            memcpy(tb, b + i, nbytes - i);                                                                   \
            __m256 x = HETCCL_F16_LOAD(ta), y = HETCCL_F16_LOAD(tb);                                         \
            _mm_storeu_si128((__m128i *)ta, HETCCL_ISA(pack_f16)(EXPR));                                     \
            memcpy(d + i, ta, nbytes - i);                                                                   \
            if (e)                                                                                           \
                memcpy(e + i, ta, nbytes - i);                                                               \
        }                                                                                                    \
    }

#define HETCCL_F16_PICK(ORDER) \
    _mm256_blendv_ps(y, x, _mm256_or_ps(_mm256_cmp_ps(x, y, ORDER), _mm256_cmp_ps(x, x, _CMP_UNORD_Q)))

HETCCL_F16_FOLD(sum, _mm256_add_ps(x, y))
HETCCL_F16_FOLD(prod, _mm256_mul_ps(x, y))
HETCCL_F16_FOLD(max, HETCCL_F16_PICK(_CMP_GT_OQ))
HETCCL_F16_FOLD(min, HETCCL_F16_PICK(_CMP_LT_OQ))

HETCCL_TARGET static void HETCCL_ISA(widen_f16)(float *to, const char *from, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, HETCCL_F16_LOAD(from + i * 2));
    if (i < n) {
        uint16_t rest[8] = {0};
        float wide[8];
        memcpy(rest, from + i * 2, (n - i) * 2);
        _mm256_storeu_ps(wide, HETCCL_F16_LOAD(rest));
        memcpy(to + i, wide, (n - i) * 4);
    }
}

HETCCL_TARGET static void HETCCL_ISA(narrow_f16)(char *to, const float *from, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i * 2), HETCCL_ISA(pack_f16)(_mm256_loadu_ps(from + i)));
    if (i < n) {
        float rest[8] = {0};
        uint16_t half[8];
        memcpy(rest, from + i, (n - i) * 4);
        _mm_storeu_si128((__m128i *)half, HETCCL_ISA(pack_f16)(_mm256_loadu_ps(rest)));
        memcpy(to + i * 2, half, (n - i) * 2);
    }
}
#else
HETCCL_CONVERT(f16, uint16_t)
#endif

/* A sum whose first destination goes past the caches: in one loop with the loads, since stores in bursts of their own wait for
 * the memory while nothing is fetched; lines are asked for early (copy_fetch.h): 6.8 instead of 6.0 GB/s. d is aligned to
 * 64, n elements are a multiple of 256 bytes. */
#ifdef HETCCL_PAST
#define HETCCL_STREAM_SUM(name, T, C, IN, OUT)                                                                       \
    HETCCL_TARGET static void HETCCL_ISA(stream_##name)(char *d, char *e, const char *a_, const char *b_, size_t n)  \
    {                                                                                                                \
        HETCCL_AT_ANY(T);                                                                                            \
        const at *a = (const at *)a_, *b = (const at *)b_;                                                           \
        enum { BLOCK = HETCCL_BLOCK / sizeof(T) };                                                                   \
        for (size_t i = 0; i < n; i += BLOCK) {                                                                      \
            for (size_t k = i * sizeof(T) + HETCCL_AHEAD; k < (i + BLOCK) * sizeof(T) + HETCCL_AHEAD; k += 64) {     \
                __builtin_prefetch(a_ + k);                                                                          \
                __builtin_prefetch(b_ + k);                                                                          \
                if (e)                                                                                               \
                    __builtin_prefetch(e + k, 1);                                                                    \
            }                                                                                                        \
            T r[BLOCK] __attribute__((aligned(64)));                                                                 \
            for (size_t k = 0; k < BLOCK; k++) {                                                                     \
                C x = IN(a[i + k]), y = IN(b[i + k]);                                                                \
                r[k] = (T)OUT(x + y);                                                                                \
            }                                                                                                        \
            if (e)                                                                                                   \
                memcpy(e + i * sizeof(T), r, HETCCL_BLOCK);                                                          \
            for (size_t k = 0; k < HETCCL_BLOCK; k += 64)                                                            \
                HETCCL_PAST(d + i * sizeof(T) + k, (const char *)r + k);                                             \
        }                                                                                                            \
    }
HETCCL_STREAM_SUM(f32, float, float, HETCCL_SAME, hetccl_canonical_f32)
HETCCL_STREAM_SUM(f64, double, double, HETCCL_SAME, hetccl_canonical_f64)
HETCCL_STREAM_SUM(bf16, uint16_t, float, hetccl_widen_bf16, hetccl_narrow_bf16)
#define HETCCL_STREAMS(name) .stream_sum = HETCCL_ISA(stream_##name)
#else
#define HETCCL_STREAMS(name) .stream_sum = NULL
#endif

#define HETCCL_FOUR(name)                                                              \
    [HETCCL_SUM] = HETCCL_ISA(sum_##name), [HETCCL_PROD] = HETCCL_ISA(prod_##name),    \
    [HETCCL_MAX] = HETCCL_ISA(max_##name), [HETCCL_MIN] = HETCCL_ISA(min_##name)
#define HETCCL_SEVEN(bits, order)                                                      \
    [HETCCL_SUM] = HETCCL_ISA(sum_##bits), [HETCCL_PROD] = HETCCL_ISA(prod_##bits),    \
    [HETCCL_MAX] = HETCCL_ISA(max_##order), [HETCCL_MIN] = HETCCL_ISA(min_##order),    \
    [HETCCL_BAND] = HETCCL_ISA(band_##bits), [HETCCL_BOR] = HETCCL_ISA(bor_##bits),    \
    [HETCCL_BXOR] = HETCCL_ISA(bxor_##bits)
#define HETCCL_SMALL(name) .widen = HETCCL_ISA(widen_##name), .narrow = HETCCL_ISA(narrow_##name)

/* Indexed by dtype. What has neither a fold nor a widen is not known. */
static const hetccl_kernels HETCCL_ISA(kernels)[HETCCL_DTYPE_COUNT] = {
    [HETCCL_INT8] = {.fold = {HETCCL_SEVEN(i8, s8)}},
    [HETCCL_UINT8] = {.fold = {HETCCL_SEVEN(i8, u8)}},
    [HETCCL_INT16] = {.fold = {HETCCL_SEVEN(i16, s16)}},
    [HETCCL_UINT16] = {.fold = {HETCCL_SEVEN(i16, u16)}},
    [HETCCL_INT32] = {.fold = {HETCCL_SEVEN(i32, s32)}},
    [HETCCL_UINT32] = {.fold = {HETCCL_SEVEN(i32, u32)}},
    [HETCCL_INT64] = {.fold = {HETCCL_SEVEN(i64, s64)}},
    [HETCCL_UINT64] = {.fold = {HETCCL_SEVEN(i64, u64)}},
#ifdef HETCCL_F16C
    [HETCCL_FLOAT16] = {.fold = {HETCCL_FOUR(f16)}, HETCCL_SMALL(f16)},
#else
    [HETCCL_FLOAT16] = {HETCCL_SMALL(f16)},
#endif
    [HETCCL_BFLOAT16] = {.fold = {HETCCL_FOUR(bf16)}, HETCCL_SMALL(bf16), HETCCL_STREAMS(bf16)},
    [HETCCL_FLOAT32] = {.fold = {HETCCL_FOUR(f32)}, HETCCL_STREAMS(f32)},
    [HETCCL_FLOAT64] = {.fold = {HETCCL_FOUR(f64)}, HETCCL_STREAMS(f64)},
    [HETCCL_BOOL] = {.fold = {[HETCCL_SUM] = HETCCL_ISA(or_bool), [HETCCL_MAX] = HETCCL_ISA(or_bool),
                              [HETCCL_BOR] = HETCCL_ISA(or_bool), [HETCCL_PROD] = HETCCL_ISA(and_bool),
                              [HETCCL_MIN] = HETCCL_ISA(and_bool), [HETCCL_BAND] = HETCCL_ISA(and_bool),
                              [HETCCL_BXOR] = HETCCL_ISA(xor_bool)}},
    [HETCCL_COMPLEX64] = {.fold = {[HETCCL_SUM] = HETCCL_ISA(sum_f32)}, .reals = 1, HETCCL_STREAMS(f32)},
    [HETCCL_COMPLEX128] = {.fold = {[HETCCL_SUM] = HETCCL_ISA(sum_f64)}, .reals = 1, HETCCL_STREAMS(f64)},
    [HETCCL_FLOAT8_E4M3FN] = {HETCCL_SMALL(e4m3fn)},
    [HETCCL_FLOAT8_E5M2] = {HETCCL_SMALL(e5m2)},
    [HETCCL_FLOAT8_E4M3FNUZ] = {HETCCL_SMALL(e4m3fnuz)},
    [HETCCL_FLOAT8_E5M2FNUZ] = {HETCCL_SMALL(e5m2fnuz)},
};

#undef HETCCL_AT_ANY
#undef HETCCL_FOLD
#undef HETCCL_SAME
#undef HETCCL_MAXIMUM
#undef HETCCL_MINIMUM
#undef HETCCL_FLOAT_FOLDS
#undef HETCCL_WRAP_FOLDS
#undef HETCCL_ORDER_FOLDS
#undef HETCCL_CONVERT
#undef HETCCL_STREAM_SUM
#undef HETCCL_STREAMS
#undef HETCCL_F16_LOAD
#undef HETCCL_F16_PACK
#undef HETCCL_F16_FOLD
#undef HETCCL_F16_PICK
#undef HETCCL_FOUR
#undef HETCCL_SEVEN
#undef HETCCL_SMALL
