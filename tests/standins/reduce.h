/* SPDX-License-Identifier: Apache-2.0
 * Part of ccl.c: the arithmetic.
 */
static float wide(uint16_t x, int type)
{
    union { uint32_t u; float f; } v = {(uint32_t)x << 16};
    _Float16 h;
    memcpy(&h, &x, 2);
    return type == 6 ? (float)h : v.f;
}
static uint16_t narrow(float f, int type)
{
    union { float f; uint32_t u; } v = {f};
    _Float16 h = (_Float16)f;
    uint16_t r;
    memcpy(&r, &h, 2);
    if (type == 6)
        return r;
    return (uint16_t)((v.u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}

#define COMBINED(a, b) (op == 1 ? (a) * (b) : op == 2 ? ((a) > (b) ? (a) : (b)) : op == 3 ? ((a) < (b) ? (a) : (b)) : (a) + (b))
#define REDUCE(T, C, GET, PUT)                                          \
    for (size_t i = 0; i < count; i++) {                                \
        C a = GET(((const T *)in)[i]);                                  \
        for (int r = 1; r < n; r++) {                                   \
            C b = GET(((const T *)in)[(size_t)r * count + i]);          \
            a = (C)COMBINED(a, b);                                      \
        }                                                               \
        ((T *)out)[i] = (T)PUT(op == 4 ? (C)(a / (C)n) : a);            \
    }                                                                   \
    break
#define AS_IS(x) (x)
#define WIDE(x) wide(x, type)
#define NARROW(x) narrow(x, type)
/* out = operator over n blocks of in, in rank order. */
static void reduce(void *out, const void *in, size_t count, int type, int op, int n)
{
    switch (type) {
    case 0: REDUCE(int8_t, int8_t, AS_IS, AS_IS);
    case 1: REDUCE(uint8_t, uint8_t, AS_IS, AS_IS);
    case 2: REDUCE(int32_t, int32_t, AS_IS, AS_IS);
    case 3: REDUCE(uint32_t, uint32_t, AS_IS, AS_IS);
    case 4: REDUCE(int64_t, int64_t, AS_IS, AS_IS);
    case 5: REDUCE(uint64_t, uint64_t, AS_IS, AS_IS);
    case 7: REDUCE(float, float, AS_IS, AS_IS);
    case 8: REDUCE(double, double, AS_IS, AS_IS);
    default: REDUCE(uint16_t, float, WIDE, NARROW);
    }
}
