/* SPDX-License-Identifier: Apache-2.0
 * What an operator leaves alone, in each element type. Only needed where ranks without a contribution must take part in a
 * vendor's reduction all the same (docs/design/combining.md).
 */
#include "executor.h"
#include <string.h>

enum { SUM, PROD, MAX, MIN, KINDS };

/* Bits of -0.0 (+0.0 would turn a sum of -0.0 into +0.0), 1, the lowest and the highest value; infinities where the type has
 * them. FNUZ types have no -0.0: their 0x80 is NaN. */
static const uint64_t FLOATS[HETCCL_DTYPE_COUNT][KINDS] = {
    [HETCCL_FLOAT16] = {0x8000, 0x3C00, 0xFC00, 0x7C00},
    [HETCCL_BFLOAT16] = {0x8000, 0x3F80, 0xFF80, 0x7F80},
    [HETCCL_FLOAT32] = {0x80000000u, 0x3F800000u, 0xFF800000u, 0x7F800000u},
    [HETCCL_FLOAT64] = {0x8000000000000000u, 0x3FF0000000000000u, 0xFFF0000000000000u, 0x7FF0000000000000u},
    [HETCCL_FLOAT8_E4M3FN] = {0x80, 0x38, 0xFE, 0x7E},
    [HETCCL_FLOAT8_E5M2] = {0x80, 0x3C, 0xFC, 0x7C},
    [HETCCL_FLOAT8_E4M3FNUZ] = {0x00, 0x40, 0xFF, 0x7F},
    [HETCCL_FLOAT8_E5M2FNUZ] = {0x00, 0x40, 0xFF, 0x7F},
};

static int is_float(int dtype) { return FLOATS[dtype][PROD] != 0; }

static int is_signed(int dtype)
{
    return dtype == HETCCL_INT8 || dtype == HETCCL_INT16 || dtype == HETCCL_INT32 || dtype == HETCCL_INT64;
}

/* The bits of one element of at most 8 bytes. */
static int bits_of(int dtype, int redop, uint64_t *bits)
{
    size_t width = 8 * hetccl_dtype_size(dtype);
    uint64_t ones = width == 64 ? ~(uint64_t)0 : ((uint64_t)1 << width) - 1, top = (uint64_t)1 << (width - 1);
    if (dtype == HETCCL_BOOL) {             /* sum and max are OR, prod and min are AND */
        *bits = redop == HETCCL_PROD || redop == HETCCL_MIN || redop == HETCCL_BAND;
        return HETCCL_OK;
    }
    if (is_float(dtype)) {
        static const int kind[] = {[HETCCL_SUM] = SUM, [HETCCL_PROD] = PROD, [HETCCL_MAX] = MAX, [HETCCL_MIN] = MIN};
        if (redop > HETCCL_MIN)
            return HETCCL_UNSUPPORTED;
        *bits = FLOATS[dtype][kind[redop]];
        return HETCCL_OK;
    }
    switch (redop) {
    case HETCCL_PROD: *bits = 1; break;
    case HETCCL_MAX: *bits = is_signed(dtype) ? top : 0; break;
    case HETCCL_MIN: *bits = is_signed(dtype) ? top - 1 : ones; break;
    case HETCCL_BAND: *bits = ones; break;
    default: *bits = 0; break;              /* sum, bor, bxor */
    }
    return HETCCL_OK;
}

int hx_identity(void *dst, size_t count, int dtype, int redop)
{
    uint64_t bits = 0;
    size_t width = hetccl_dtype_size(dtype);
    if (dtype == HETCCL_COMPLEX64 || dtype == HETCCL_COMPLEX128) {  /* twice as many reals */
        if (redop != HETCCL_SUM)
            return HETCCL_UNSUPPORTED;
        return hx_identity(dst, 2 * count, dtype == HETCCL_COMPLEX64 ? HETCCL_FLOAT32 : HETCCL_FLOAT64, redop);
    }
    int rc = bits_of(dtype, redop, &bits);
    for (size_t i = 0; rc == HETCCL_OK && i < count; i++)
        memcpy((char *)dst + i * width, &bits, width);
    return rc;
}
