/* SPDX-License-Identifier: Apache-2.0
 * What waits: events, flags, and the host's synchronisation.
 */
#include "device.h"

#include <stdlib.h>
#include <time.h>

#include "wait.h"

typedef struct sim_event {
    hetccl_sim_device *device;
    pthread_mutex_t lock;
    hetccl_sim_mark *mark;                     /* the latest record; NULL: never recorded */
} sim_event;

typedef struct sim_flag {                      /* what users hold is the address of `value` */
    _Atomic uint32_t value;
    _Atomic uint32_t refs;
    hetccl_sim_device *device;
} sim_flag;

typedef struct wait_op {                       /* one of mark and flag */
    hetccl_sim_op op;
    hetccl_sim_mark *mark;
    sim_flag *flag;
    uint32_t value;
} wait_op;

/* Where work was abandoned because the device broke, that is the better answer. */
static int why(hetccl_sim_device *d, int status)
{
    int broken = hetccl_sim_check(d);
    return broken != HETCCL_OK ? broken : status;
}

int hetccl_sim_stream_sync(void *ctx, void *stream)
{
    hetccl_sim_device *d = ctx;
    int status = hetccl_sim_check(d);
    if (status != HETCCL_OK)
        return status;
    hetccl_sim_mark *m = hetccl_sim_mark_new();
    if (m == NULL)
        return hetccl_sim_no_memory(d);
    status = hetccl_sim_mark_record(d, m, stream);
    if (status == HETCCL_OK)
        status = hetccl_sim_mark_wait(d, m);
    hetccl_sim_mark_unref(m);
    return why(d, status);
}

static int wait_run(hetccl_sim_op *op, hetccl_sim_device *d)
{
    wait_op *o = (wait_op *)op;
    if (o->mark != NULL)
        return hetccl_sim_mark_wait(d, o->mark);
    uint64_t limit = atomic_load_explicit(&d->deadline_ns, memory_order_relaxed);
    uint64_t begin = hetccl_now_ns();
    const struct timespec nap = {0, 50000};    /* the host only stores: nobody wakes us */
    for (uint32_t turn = 0;;) {
        /* As a device compares: at_least may lie ahead of a counter that wraps. */
        uint32_t value = atomic_load_explicit(&o->flag->value, memory_order_acquire);
        if ((int32_t)(value - o->value) >= 0)
            return HETCCL_OK;
        if (atomic_load_explicit(&d->stop, memory_order_acquire))
            return hetccl_sim_fail(HETCCL_ABORTED, "%s: the device has been stopped", d->name);
        if (hetccl_now_ns() - begin >= limit)
            return hetccl_sim_fail(HETCCL_TIMED_OUT, "%s: a stream waited %.1f s for flag %p to reach %u; it is %u",
                                   d->name, (double)limit * 1e-9, (void *)o->flag, o->value, value);
        if (hetccl_wait_turn(&turn, 0))
            nanosleep(&nap, NULL);
    }
}

static void flag_unref(sim_flag *f)
{
    if (f != NULL && atomic_fetch_sub_explicit(&f->refs, 1, memory_order_acq_rel) == 1)
        free(f);
}

static void wait_end(hetccl_sim_op *op, int status)
{
    wait_op *o = (wait_op *)op;
    hetccl_sim_mark_unref(o->mark);
    flag_unref(o->flag);
    free(o);
}

static int foreign_event(const hetccl_sim_device *d, const sim_event *e)
{
    if (e == NULL)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: event is NULL", d->name);
    if (e->device != d)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: event %p belongs to %s", d->name, (const void *)e, e->device->name);
    return HETCCL_OK;
}

/* The latest record of an event, referenced; NULL if there is none. */
static hetccl_sim_mark *latest(sim_event *e)
{
    pthread_mutex_lock(&e->lock);
    hetccl_sim_mark *m = e->mark != NULL ? hetccl_sim_mark_ref(e->mark) : NULL;
    pthread_mutex_unlock(&e->lock);
    return m;
}

int hetccl_sim_stream_wait_event(void *ctx, void *stream, void *event)
{
    hetccl_sim_device *d = ctx;
    int status = hetccl_sim_check(d);
    if (status == HETCCL_OK)
        status = foreign_event(d, event);
    if (status != HETCCL_OK)
        return status;
    hetccl_sim_mark *m = latest(event);
    if (m == NULL)
        return HETCCL_OK;
    wait_op *o = calloc(1, sizeof *o);
    if (o == NULL) {
        hetccl_sim_mark_unref(m);
        return hetccl_sim_no_memory(d);
    }
    o->op.run = wait_run;
    o->op.end = wait_end;
    o->mark = m;
    return hetccl_sim_enqueue(d, stream, &o->op);
}

int hetccl_sim_event_create(void *ctx, void **event)
{
    int status = hetccl_sim_check(ctx);
    if (status != HETCCL_OK)
        return status;
    sim_event *e = calloc(1, sizeof *e);
    if (e == NULL)
        return hetccl_sim_no_memory(ctx);
    e->device = ctx;
    pthread_mutex_init(&e->lock, NULL);
    *event = e;
    return HETCCL_OK;
}

int hetccl_sim_event_destroy(void *ctx, void *event)
{
    sim_event *e = event;
    int status = hetccl_sim_check_process(ctx);
    if (status != HETCCL_OK || e == NULL)
        return status;
    hetccl_sim_mark_unref(e->mark);
    pthread_mutex_destroy(&e->lock);
    free(e);
    return HETCCL_OK;
}

int hetccl_sim_event_record(void *ctx, void *event, void *stream)
{
    hetccl_sim_device *d = ctx;
    sim_event *e = event;
    int status = hetccl_sim_check(d);
    if (status == HETCCL_OK)
        status = foreign_event(d, e);
    if (status != HETCCL_OK)
        return status;
    hetccl_sim_mark *m = hetccl_sim_mark_new();
    if (m == NULL)
        return hetccl_sim_no_memory(d);
    status = hetccl_sim_mark_record(d, m, stream);
    if (status != HETCCL_OK) {
        hetccl_sim_mark_unref(m);
        return status;
    }
    pthread_mutex_lock(&e->lock);
    hetccl_sim_mark *before = e->mark;
    e->mark = m;
    pthread_mutex_unlock(&e->lock);
    hetccl_sim_mark_unref(before);
    return HETCCL_OK;
}

int hetccl_sim_event_query(void *ctx, void *event)
{
    hetccl_sim_device *d = ctx;
    int status = hetccl_sim_check(d);
    if (status == HETCCL_OK)
        status = foreign_event(d, event);
    if (status != HETCCL_OK)
        return status;
    hetccl_sim_mark *m = latest(event);
    if (m != NULL)
        status = (int)atomic_load_explicit(&m->state, memory_order_acquire);
    hetccl_sim_mark_unref(m);
    return status;
}

int hetccl_sim_event_sync(void *ctx, void *event)
{
    hetccl_sim_device *d = ctx;
    int status = hetccl_sim_check(d);
    if (status == HETCCL_OK)
        status = foreign_event(d, event);
    if (status != HETCCL_OK)
        return status;
    hetccl_sim_mark *m = latest(event);
    if (m == NULL)
        return HETCCL_OK;
    status = hetccl_sim_mark_wait(d, m);
    hetccl_sim_mark_unref(m);
    return why(d, status);
}

/* ---- flags */

int hetccl_sim_flag_alloc(void *ctx, void **flag)
{
    int status = hetccl_sim_check(ctx);
    if (status != HETCCL_OK)
        return status;
    sim_flag *f = aligned_alloc(64, 64);       /* a cache line of its own */
    if (f == NULL)
        return hetccl_sim_no_memory(ctx);
    atomic_init(&f->value, 0);
    atomic_init(&f->refs, 1);
    f->device = ctx;
    *flag = f;
    return HETCCL_OK;
}

int hetccl_sim_flag_free(void *ctx, void *flag)
{
    int status = hetccl_sim_check_process(ctx);
    if (status == HETCCL_OK)
        flag_unref(flag);
    return status;
}

static int set_run(hetccl_sim_op *op, hetccl_sim_device *d)
{
    wait_op *o = (wait_op *)op;
    atomic_store_explicit(&o->flag->value, o->value, memory_order_release);
    return HETCCL_OK;
}

static int flag_op(hetccl_sim_device *d, sim_flag *f, uint32_t value, void *stream,
                   int (*run)(hetccl_sim_op *, hetccl_sim_device *))
{
    int status = hetccl_sim_check(d);
    if (status != HETCCL_OK)
        return status;
    if (f == NULL || f->device != d)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %p is not one of its flags", d->name, (void *)f);
    wait_op *o = calloc(1, sizeof *o);
    if (o == NULL)
        return hetccl_sim_no_memory(d);
    o->op.run = run;
    o->op.end = wait_end;
    atomic_fetch_add_explicit(&f->refs, 1, memory_order_relaxed);
    o->flag = f;
    o->value = value;
    return hetccl_sim_enqueue(d, stream, &o->op);
}

int hetccl_sim_flag_set(void *ctx, void *flag, uint32_t value, void *stream)
{
    return flag_op(ctx, flag, value, stream, set_run);
}

int hetccl_sim_stream_wait_flag(void *ctx, void *flag, uint32_t at_least, void *stream)
{
    return flag_op(ctx, flag, at_least, stream, wait_run);
}
