/* SPDX-License-Identifier: Apache-2.0
 * Element-wise arithmetic on host memory: the reference for every other way to combine.
 *
 * Compiled with -O3 -ffp-contract=off, with AVX2 and AVX-512 clones picked at load time where the compiler can. f16, bf16
 * and fp8 compute in float32 and round to nearest even once per combination. Integers wrap. NaN propagates through min and
 * max and comes out as the canonical quiet NaN. bool: sum and max are OR, prod and min are AND, bytes come out as 0 or 1.
 * Rounding mode and denormal handling are set on entry and restored (torch may have changed the caller's).
 */
#ifndef HETCCL_COMBINE_H
#define HETCCL_COMBINE_H
#include <stddef.h>
#include <stdint.h>

/* Bytes of an element; 0 for an unknown dtype. */
size_t hetccl_dtype_size(int dtype);

/* 1 if hetccl_combine knows dtype with redop (sum, prod, max, min, band, bor, bxor; avg is a sum and a divisor). */
int hetccl_can_combine(int dtype, int redop);

/* For each of `count` elements: x = src[0] op src[1] op ... in that order; if divisor != 1, x = x / divisor (integers
 * truncate toward zero); x goes to every dst. n_src >= 1, 1 <= n_dst <= 8; a dst may be the same address as a src, but not
 * overlap it otherwise. Pointers need only the element's own alignment, and work unaligned too. The case of two sources
 * and one or two destinations is the hot one. Returns an hetccl_status. */
int hetccl_combine(void *const *dst, int n_dst, const void *const *src, int n_src, size_t count, int dtype, int redop,
                   double divisor);

/* The same into memory that nobody reads soon: `dst` is written past the caches, which saves fetching what is overwritten,
 * and into `also`, if not NULL, as ever. The same bits as hetccl_combine. dst may be a src, `also` may not. */
int hetccl_combine_past(void *dst, void *also, const void *const *src, int n_src, size_t count, int dtype, int redop,
                        double divisor);

/* A copy past the caches, where the machine can. */
void hetccl_copy_past(void *dst, const void *src, size_t nbytes);

/* A copy of much that lies in no cache into memory that does. */
void hetccl_copy_fetch(void *dst, const void *src, size_t nbytes);

/* Whether results of `nbytes` on each of `ranks` ranks of a host are more than its last-level cache keeps. One core copies from
 * a ring into 64 MiB and more at 4 to 8 GB/s by way of the caches and at 18 past them; below 32 MiB that is the slower way. */
static inline int hetccl_outgrows_caches(size_t nbytes, int ranks)
{
    return nbytes >= ((size_t)64 << 20) / (size_t)(ranks > 1 ? ranks : 1);
}

/* dst = src * factor for elements of `dtype`; dst may be src. The factor is rounded to the type that computes (float32 for
 * all floats but float64 and complex128), the product to the element. Integers take whole factors, and wrap.
 * HETCCL_INVALID for bool and for a factor that an integer cannot take. */
int hetccl_scale(void *dst, const void *src, size_t count, int dtype, double factor);

/* 1 if hetccl_scale takes this factor for this dtype. */
int hetccl_can_scale(int dtype, double factor);
#endif
