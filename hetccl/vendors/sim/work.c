/* SPDX-License-Identifier: Apache-2.0
 * Work that moves or combines bytes: copies, memsets and the kernels.
 */
#include "device.h"

#include <stdlib.h>
#include <string.h>

#include "combine.h"

typedef struct move_op {                       /* copy: both; memset: to and byte */
    hetccl_sim_op op;
    hetccl_sim_span to, from;
    size_t nbytes;
    int byte;
} move_op;

typedef struct reduce_op {
    hetccl_sim_op op;
    hetccl_sim_span to;
    size_t count;
    int dtype, redop;
    double divisor;
    uint32_t n_src;
    const void **src;                          /* aliases, n_src; lies behind `from` */
    hetccl_sim_span from[];
} reduce_op;

static int move_run(hetccl_sim_op *op, hetccl_sim_device *d)
{
    move_op *o = (move_op *)op;
    if (o->from.at != NULL)
        memmove(o->to.at, o->from.at, o->nbytes);
    else
        memset(o->to.at, o->byte, o->nbytes);
    return HETCCL_OK;
}

static void move_end(hetccl_sim_op *op, int status)
{
    move_op *o = (move_op *)op;
    hetccl_sim_span_release(&o->to);
    hetccl_sim_span_release(&o->from);
    free(o);
}

/* A copy if `src` is not NULL, else a memset. */
static int move(hetccl_sim_device *d, void *dst, const void *src, int byte, size_t nbytes, void *stream)
{
    int status = hetccl_sim_check(d);
    if (status != HETCCL_OK || nbytes == 0)
        return status;
    move_op *o = calloc(1, sizeof *o);
    if (o == NULL)
        return hetccl_sim_no_memory(d);
    o->op.run = move_run;
    o->op.end = move_end;
    o->nbytes = nbytes;
    o->byte = byte;
    status = hetccl_sim_resolve(d, dst, nbytes, 1, "destination", &o->to);
    if (status == HETCCL_OK && src != NULL)
        status = hetccl_sim_resolve(d, src, nbytes, 1, "source", &o->from);
    if (status != HETCCL_OK) {
        move_end(&o->op, status);
        return status;
    }
    return hetccl_sim_enqueue(d, stream, &o->op);
}

int hetccl_sim_copy_async(void *ctx, void *dst, const void *src, size_t nbytes, void *stream)
{
    if (src == NULL && nbytes > 0)
        return hetccl_sim_fail(HETCCL_INVALID, "copy of %zu bytes from NULL", nbytes);
    return move(ctx, dst, src, 0, nbytes, stream);
}

int hetccl_sim_memset_async(void *ctx, void *dst, int byte, size_t nbytes, void *stream)
{
    return move(ctx, dst, NULL, byte, nbytes, stream);
}

static int reduce_run(hetccl_sim_op *op, hetccl_sim_device *d)
{
    reduce_op *o = (reduce_op *)op;
    void *dst[1] = {o->to.at};
    int status = hetccl_combine(dst, 1, o->src, (int)o->n_src, o->count, o->dtype, o->redop, o->divisor);
    if (status != HETCCL_OK)
        hetccl_sim_fail(status, "%s: combining dtype %d with operator %d failed", d->name, o->dtype, o->redop);
    return status;
}

static void reduce_end(hetccl_sim_op *op, int status)
{
    reduce_op *o = (reduce_op *)op;
    hetccl_sim_span_release(&o->to);
    for (uint32_t i = 0; i < o->n_src; i++)
        hetccl_sim_span_release(&o->from[i]);
    free(o->src);
    free(o);
}

static int combine_async(hetccl_sim_device *d, const hetccl_reduce_args *a, uint32_t n_src, int redop)
{
    int status = hetccl_sim_check(d);
    if (status != HETCCL_OK)
        return status;
    if (n_src == 0)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: nothing to combine: n_src is 0", d->name);
    if (!hetccl_can_combine(a->dtype, redop))
        return hetccl_sim_fail(HETCCL_UNSUPPORTED, "%s has no kernel for dtype %d with operator %d", d->name, a->dtype,
                               redop);
    if (a->count == 0)
        return HETCCL_OK;
    size_t item = hetccl_dtype_size(a->dtype);
    if (a->count > SIZE_MAX / item)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: count %zu is too large", d->name, a->count);
    reduce_op *o = calloc(1, sizeof *o + n_src * sizeof o->from[0]);
    if (o != NULL && (o->src = calloc(n_src, sizeof o->src[0])) == NULL) {
        free(o);
        o = NULL;
    }
    if (o == NULL)
        return hetccl_sim_no_memory(d);
    o->op.run = reduce_run;
    o->op.end = reduce_end;
    o->count = a->count;
    o->dtype = a->dtype;
    o->redop = redop;
    o->divisor = a->scale;
    o->n_src = n_src;
    status = hetccl_sim_resolve(d, a->dst, a->count * item, 1, "dst", &o->to);
    for (uint32_t i = 0; i < n_src && status == HETCCL_OK; i++) {
        status = hetccl_sim_resolve(d, a->src[i], a->count * item, 1, "src", &o->from[i]);
        o->src[i] = o->from[i].at;
    }
    if (status != HETCCL_OK) {
        reduce_end(&o->op, status);
        return status;
    }
    return hetccl_sim_enqueue(d, a->stream, &o->op);
}

int hetccl_sim_reduce_async(void *ctx, const hetccl_reduce_args *args)
{
    return combine_async(ctx, args, args->n_src, args->redop);
}

int hetccl_sim_scale_async(void *ctx, const hetccl_reduce_args *args)
{
    return combine_async(ctx, args, 1, HETCCL_SUM);
}
