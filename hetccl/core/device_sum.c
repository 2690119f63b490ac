/* SPDX-License-Identifier: Apache-2.0
 * Combining on the device what comes over the border: a chunk's contributions are copied up, combined by the device's own
 * kernel in the order of the islands, and the result is copied down, from where it is sent. A few chunks may be under way at
 * once, on a stream of their own: behind nobody's vendor call.
 */
#include "executor.h"
#include <stdio.h>

#define ALIGN 256u

static int failed(hx_comm *c, hx_work *w, int rc)
{
    snprintf(w->text, sizeof w->text, "combining failed on the device: %s", c->dev->last_error(c->dev_ctx));
    return rc == HETCCL_IN_PROGRESS ? HETCCL_SYSTEM : rc;
}

static int prepare(hx_comm *c, hx_sum *s, size_t nbytes)
{
    int rc = c->sum_stream ? HETCCL_OK : c->dev->stream_create(c->dev_ctx, &c->sum_stream);
    if (rc == HETCCL_OK && !s->event)
        rc = c->dev->event_create(c->dev_ctx, &s->event);
    return rc == HETCCL_OK ? hx_grow(c, &s->memory, &s->cap, nbytes, 0) : rc;
}

int hx_sum_begin(hx_comm *c, hx_work *w, const void *const *src, int n, void *dst, size_t count, double divisor, int *place)
{
    int at = 0;
    while (at < HX_SUMS && c->sums[at].busy)
        at++;
    if (at == HX_SUMS)
        return HETCCL_IN_PROGRESS;
    hx_sum *s = &c->sums[at];
    size_t nbytes = count * hetccl_dtype_size(w->plan->dtype), step = (nbytes + ALIGN - 1) / ALIGN * ALIGN;
    int rc = prepare(c, s, step * (size_t)n);
    if (rc != HETCCL_OK)
        return failed(c, w, rc);
    const void *up[HX_FAN + 1];
    s->busy = 1;                            /* also if a later call fails: what is enqueued must end first */
    for (int i = 0; i < n && rc == HETCCL_OK; i++) {
        up[i] = s->memory + (size_t)i * step;
        rc = c->dev->copy_async(c->dev_ctx, (void *)up[i], src[i], nbytes, c->sum_stream);
    }
    hetccl_reduce_args a = {sizeof a, w->plan->dtype, hx_combining(w->plan), (uint32_t)n, s->memory, up, count, divisor,
                            c->sum_stream};
    if (rc == HETCCL_OK)
        rc = c->dev->reduce_async(c->dev_ctx, &a);
    if (rc == HETCCL_OK)
        rc = c->dev->copy_async(c->dev_ctx, dst, s->memory, nbytes, c->sum_stream);
    int recorded = c->dev->event_record(c->dev_ctx, s->event, c->sum_stream);
    if (rc == HETCCL_OK)
        rc = recorded;
    if (rc != HETCCL_OK)
        return failed(c, w, rc);
    atomic_fetch_add_explicit(&c->staged_bytes, nbytes * ((size_t)n + 1), memory_order_relaxed);
    atomic_fetch_add_explicit(&c->device_sums, 1, memory_order_relaxed);
    *place = at;
    return HETCCL_OK;
}

int hx_sum_test(hx_comm *c, int place)
{
    int rc = c->dev->event_query(c->dev_ctx, c->sums[place].event);
    if (rc == HETCCL_OK)
        c->sums[place].busy = 0;
    return rc;
}

int hx_sums_busy(hx_comm *c)
{
    for (int i = 0; i < HX_SUMS; i++)
        if (c->sums[i].busy && c->dev->event_query(c->dev_ctx, c->sums[i].event) == HETCCL_IN_PROGRESS)
            return 1;
    return 0;
}

void hx_sums_free(hx_comm *c)
{
    for (int i = 0; i < HX_SUMS; i++) {
        if (c->sums[i].event)
            c->dev->event_destroy(c->dev_ctx, c->sums[i].event);
        if (c->sums[i].memory)
            c->dev->free(c->dev_ctx, c->sums[i].memory);
    }
    if (c->sum_stream)
        c->dev->stream_destroy(c->dev_ctx, c->sum_stream);
}
