/* SPDX-License-Identifier: Apache-2.0
 * A call checks its arguments, translates its buffers and enqueues; the stream's thread then makes the blocking call.
 *
 * Calls of one communicator run in the order in which they were issued, whatever streams they are on: each takes a
 * ticket, and its stream waits for its turn. A failed collective is the communicator's error, not the device's: the
 * stream goes on, and survivors can build a new communicator on it.
 */
#include "ccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "combine.h"
#include "wait.h"

struct hetccl_sim_comm {
    hetccl_sim_device *device;
    hetccl_sim_comm *next;                     /* in device->comms, under the device's lock */
    int destroyed;                             /* under the device's lock; calls in flight may keep it alive */
    hetccl_island *island;
    int32_t rank, size;
    uint32_t issued;                           /* tickets given out; by the one thread that may call */
    _Atomic uint32_t turn;                     /* ticket that may run now */
    _Atomic uint32_t refs;                     /* one of the handle, one a call in flight */
    _Atomic int error;                         /* first failure; stays. error_text was written before it */
    _Atomic uint32_t failing;                  /* 1: somebody writes error_text */
    char error_text[HETCCL_SIM_TEXT_MAX];
};

typedef enum collective {
    ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, ALL_TO_ALL, SEND, RECV
} collective;

static const char *const names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all",
                                    "send", "recv"};

typedef struct ccl_op {
    hetccl_sim_op op;
    hetccl_sim_comm *comm;
    collective what;
    uint32_t ticket;
    int32_t dtype, redop, peer;
    size_t count;
    hetccl_sim_span send, recv;
} ccl_op;

static int run_conditioned(ccl_op *o, hetccl_sim_device *d);
static int run_island(ccl_op *o);
static void traffic(const ccl_op *o, uint64_t *out, uint64_t *in);
static int wait_turn(ccl_op *o, hetccl_sim_device *d);
static void comm_fail(hetccl_sim_comm *c, int status, const char *text);
static void comm_unref(hetccl_sim_comm *c);

static int ccl_run(hetccl_sim_op *op, hetccl_sim_device *d)
{
    ccl_op *o = (ccl_op *)op;
    hetccl_sim_comm *c = o->comm;
    int status = wait_turn(o, d);
    if (status == HETCCL_OK && atomic_load_explicit(&c->error, memory_order_acquire) != HETCCL_OK)
        return HETCCL_OK;                      /* nothing more runs on a failed communicator; async_error says so */
    if (status == HETCCL_OK)
        status = run_conditioned(o, d);
    if (status != HETCCL_OK)
        comm_fail(c, status, hetccl_sim_last_error(d));
    return HETCCL_OK;
}

static void ccl_end(hetccl_sim_op *op, int status)
{
    ccl_op *o = (ccl_op *)op;
    hetccl_sim_comm *c = o->comm;
    if (status != HETCCL_OK)
        comm_fail(c, status, "the device was stopped or failed before the call ran");
    /* Tickets end in order, but an abandoned one may end early: its successors fail on the communicator's error. */
    uint32_t turn = atomic_load_explicit(&c->turn, memory_order_relaxed);
    while ((int32_t)(o->ticket + 1 - turn) > 0 &&
           !atomic_compare_exchange_weak_explicit(&c->turn, &turn, o->ticket + 1, memory_order_release,
                                                  memory_order_relaxed))
        ;
    hetccl_futex_wake(&c->turn);
    hetccl_sim_span_release(&o->send);
    hetccl_sim_span_release(&o->recv);
    comm_unref(c);
    free(o);
}

static int check_pair(const hetccl_sim_ccl *l, collective what, const hetccl_ccl_args *a)
{
    const char *name = l->device->name;
    if (a->dtype < 0 || a->dtype >= HETCCL_DTYPE_COUNT)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %s: there is no dtype %d", name, names[what], a->dtype);
    if (what != ALL_REDUCE && what != REDUCE_SCATTER && what != REDUCE)
        return HETCCL_OK;
    if (a->redop < 0 || a->redop >= HETCCL_REDOP_COUNT)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %s: there is no operator %d", name, names[what], a->redop);
    if (!(l->ops.reduce_mask[a->dtype] >> a->redop & 1u))
        return hetccl_sim_fail(HETCCL_UNSUPPORTED, "%s: %s: this library does not reduce dtype %d with operator %d", name,
                               names[what], a->dtype, a->redop);
    return HETCCL_OK;
}

static int check_comm(hetccl_sim_device *d, collective what, const hetccl_ccl_args *a)
{
    const hetccl_sim_comm *c = a->comm;
    if (c == NULL || c->device != d)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %s: %p is not one of its communicators", d->name, names[what],
                               (const void *)c);
    int status = atomic_load_explicit(&c->error, memory_order_acquire);
    if (status != HETCCL_OK)
        return hetccl_sim_fail(status, "%s: %s: the communicator failed earlier: %s", d->name, names[what],
                               c->error_text);
    int has_peer = what == BROADCAST || what == REDUCE || what == SEND || what == RECV;
    if (has_peer && (a->peer < 0 || a->peer >= c->size))
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %s: there is no rank %d among %d", d->name, names[what], a->peer,
                               c->size);
    if ((what == SEND || what == RECV) && a->peer == c->rank)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %s: rank %d is the caller itself", d->name, names[what], a->peer);
    size_t item = hetccl_dtype_size(a->dtype);
    if (a->count > SIZE_MAX / item / (size_t)c->size)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %s: count %zu is too large", d->name, names[what], a->count);
    return HETCCL_OK;
}

/* Bytes that this rank reads from `send` and writes to `recv`; 0: the buffer is not looked at. */
static void extents(const hetccl_sim_comm *c, collective what, const hetccl_ccl_args *a, size_t *send, size_t *recv)
{
    size_t one = a->count * hetccl_dtype_size(a->dtype), all = one * (size_t)c->size;
    *send = *recv = one;
    if (what == REDUCE_SCATTER || what == ALL_TO_ALL)
        *send = all;
    if (what == ALL_GATHER || what == ALL_TO_ALL)
        *recv = all;
    if (what == RECV || (what == BROADCAST && a->peer != c->rank))
        *send = 0;
    if (what == SEND || (what == REDUCE && a->peer != c->rank))
        *recv = 0;
}

static int issue(void *ctx, collective what, const hetccl_ccl_args *a)
{
    hetccl_sim_ccl *l = ctx;
    hetccl_sim_device *d = l->device;
    int status = hetccl_sim_check(d);
    if (status == HETCCL_OK)
        status = check_pair(l, what, a);
    if (status == HETCCL_OK)
        status = check_comm(d, what, a);
    if (status != HETCCL_OK || a->count == 0)
        return status;
    hetccl_sim_comm *c = a->comm;
    ccl_op *o = calloc(1, sizeof *o);
    if (o == NULL)
        return hetccl_sim_no_memory(d);
    o->op.run = ccl_run;
    o->op.end = ccl_end;
    o->comm = c;
    o->what = what;
    o->dtype = a->dtype;
    o->redop = a->redop;
    o->peer = a->peer;
    o->count = a->count;
    size_t send, recv;
    extents(c, what, a, &send, &recv);
    status = hetccl_sim_resolve(d, a->send, send, 0, "send buffer", &o->send);
    if (status == HETCCL_OK)
        status = hetccl_sim_resolve(d, a->recv, recv, 0, "receive buffer", &o->recv);
    if (status != HETCCL_OK) {
        hetccl_sim_span_release(&o->send);
        free(o);
        return status;
    }
    if (send == 0)
        o->send.at = NULL;
    if (recv == 0)
        o->recv.at = NULL;
    atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
    o->ticket = c->issued++;
    return hetccl_sim_enqueue(d, a->stream, &o->op);
}

#define ENTRY(name, what) \
    static int ccl_##name(void *ctx, const hetccl_ccl_args *args) { return issue(ctx, what, args); }

ENTRY(all_reduce, ALL_REDUCE)
ENTRY(reduce_scatter, REDUCE_SCATTER)
ENTRY(all_gather, ALL_GATHER)
ENTRY(broadcast, BROADCAST)
ENTRY(reduce, REDUCE)
ENTRY(all_to_all, ALL_TO_ALL)
ENTRY(send, SEND)
ENTRY(recv, RECV)

/* Joining goes over sockets and is Python: Vendor.new_id and Vendor.create_comm. */
static int ccl_unique_id(void *ctx, void *id, uint32_t *id_len)
{
    return hetccl_sim_fail(HETCCL_UNSUPPORTED, "%s: take an id from Vendor.new_id()",
                           ((hetccl_sim_ccl *)ctx)->device->name);
}

static int ccl_init_post(void *ctx, const hetccl_ccl_init_args *args, void **comm)
{
    return hetccl_sim_fail(HETCCL_UNSUPPORTED, "%s: join by Vendor.create_comm()",
                           ((hetccl_sim_ccl *)ctx)->device->name);
}

static int ccl_init_test(void *ctx, void *comm)
{
    return ccl_init_post(ctx, NULL, NULL);
}

static int ccl_group(void *ctx)
{
    return hetccl_sim_fail(HETCCL_UNSUPPORTED, "%s has no groups", ((hetccl_sim_ccl *)ctx)->device->name);
}

static int ccl_async_error(void *ctx, void *comm)
{
    hetccl_sim_comm *c = comm;
    int status = hetccl_sim_check_process(((hetccl_sim_ccl *)ctx)->device);
    if (status == HETCCL_OK)
        status = atomic_load_explicit(&c->error, memory_order_acquire);
    else
        return status;
    return status == HETCCL_OK ? status : hetccl_sim_fail(status, "%s: %s", c->device->name, c->error_text);
}

static int ccl_abort(void *ctx, void *comm)
{
    hetccl_sim_comm *c = comm;
    int status = hetccl_sim_check_process(((hetccl_sim_ccl *)ctx)->device);
    if (status != HETCCL_OK)
        return status;
    comm_fail(c, HETCCL_ABORTED, "abort() was called");
    return HETCCL_OK;
}

static int ccl_destroy(void *ctx, void *comm)
{
    hetccl_sim_comm *c = comm;
    hetccl_sim_device *d = ((hetccl_sim_ccl *)ctx)->device;
    int status = hetccl_sim_check_process(d);
    if (status != HETCCL_OK)
        return status;
    pthread_mutex_lock(&d->lock);
    c->destroyed = 1;
    pthread_mutex_unlock(&d->lock);
    comm_unref(c);
    return HETCCL_OK;
}

void hetccl_sim_ccl_init(hetccl_sim_ccl *c, hetccl_sim_device *d, const uint32_t *masks)
{
    c->device = d;
    c->ops = (hetccl_ccl_ops){
        .version = HETCCL_SPI_VERSION,
        .size = sizeof(hetccl_ccl_ops),
        .caps = HETCCL_CCL_STREAM_ORDERED | HETCCL_CCL_ABORT | HETCCL_CCL_NAN_PROPAGATES | HETCCL_CCL_MULTI_COMM |
                HETCCL_CCL_IN_PLACE,
        .move_mask = (UINT64_C(1) << HETCCL_DTYPE_COUNT) - 1,
        .last_error = hetccl_sim_last_error,
        .unique_id = ccl_unique_id,
        .init_post = ccl_init_post,
        .init_test = ccl_init_test,
        .all_reduce = ccl_all_reduce,
        .reduce_scatter = ccl_reduce_scatter,
        .all_gather = ccl_all_gather,
        .broadcast = ccl_broadcast,
        .reduce = ccl_reduce,
        .all_to_all = ccl_all_to_all,
        .send = ccl_send,
        .recv = ccl_recv,
        .group_start = ccl_group,
        .group_end = ccl_group,
        .async_error = ccl_async_error,
        .abort = ccl_abort,
        .destroy = ccl_destroy,
    };
    for (int dtype = 0; dtype < HETCCL_DTYPE_COUNT; dtype++)
        for (int op = 0; op < HETCCL_REDOP_COUNT; op++)
            if (masks[dtype] >> op & 1u && hetccl_can_combine(dtype, op))
                c->ops.reduce_mask[dtype] |= 1u << op;
}

hetccl_sim_comm *hetccl_sim_comm_new(hetccl_sim_device *d, hetccl_island *island, int32_t rank, int32_t size)
{
    hetccl_sim_comm *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->device = d;
    c->island = island;
    c->rank = rank;
    c->size = size;
    atomic_init(&c->refs, 1);
    pthread_mutex_lock(&d->lock);
    c->next = d->comms;
    d->comms = c;
    pthread_mutex_unlock(&d->lock);
    return c;
}

void hetccl_sim_abort_all(hetccl_sim_device *d)
{
    pthread_mutex_lock(&d->lock);
    for (hetccl_sim_comm *c = d->comms; c != NULL; c = c->next) {
        uint32_t handles = c->destroyed ? 0 : 1;
        if (atomic_load_explicit(&c->refs, memory_order_acquire) <= handles)
            continue;                          /* idle: peers may still be at the end of a call that is over here */
        comm_fail(c, HETCCL_ABORTED, "the process ends");
    }
    pthread_mutex_unlock(&d->lock);
}

/* Blocks until the calls issued before have ended; HETCCL_OK also when the communicator has failed meanwhile. */
static int wait_turn(ccl_op *o, hetccl_sim_device *d)
{
    hetccl_sim_comm *c = o->comm;
    uint64_t limit = atomic_load_explicit(&d->deadline_ns, memory_order_relaxed);
    uint64_t begin = hetccl_now_ns();
    for (;;) {
        uint32_t turn = atomic_load_explicit(&c->turn, memory_order_acquire);
        if (turn == o->ticket || atomic_load_explicit(&c->error, memory_order_acquire) != HETCCL_OK)
            return HETCCL_OK;
        if (atomic_load_explicit(&d->stop, memory_order_acquire))
            return hetccl_sim_fail(HETCCL_ABORTED, "%s: the device has been stopped", d->name);
        if (hetccl_now_ns() - begin >= limit)
            return hetccl_sim_fail(HETCCL_TIMED_OUT, "%s waited %.1f s for an earlier call of the same communicator",
                                   names[o->what], (double)limit * 1e-9);
        hetccl_futex_wait(&c->turn, turn, HETCCL_SIM_SLICE_NS);
    }
}

/* The first failure of a communicator is the one it keeps. Never blocks. */
static void comm_fail(hetccl_sim_comm *c, int status, const char *text)
{
    if (atomic_exchange_explicit(&c->failing, 1, memory_order_acq_rel))
        return;
    snprintf(c->error_text, sizeof c->error_text, "%s", text);
    atomic_store_explicit(&c->error, status, memory_order_release);
    hetccl_island_abort(c->island);            /* the other ranks need not wait for their deadline */
    hetccl_futex_wake(&c->turn);
}

static void comm_unref(hetccl_sim_comm *c)
{
    if (atomic_fetch_sub_explicit(&c->refs, 1, memory_order_acq_rel) != 1)
        return;
    hetccl_sim_device *d = c->device;
    pthread_mutex_lock(&d->lock);
    for (hetccl_sim_comm **at = &d->comms; *at != NULL; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    pthread_mutex_unlock(&d->lock);
    hetccl_island_destroy(c->island);
    free(c);
}

/* The call, alone on the device and at its link's speed where that is asked for. */
static int run_conditioned(ccl_op *o, hetccl_sim_device *d)
{
    hetccl_sim_comm *c = o->comm;
    int status = hetccl_sim_enter(d, &c->error);
    if (status != HETCCL_OK)
        return status;
    uint64_t out = 0, in = 0, began = hetccl_now_ns();
    if (d->conditions.rate) {
        traffic(o, &out, &in);
        if (o->what == SEND)                   /* paid before the data is there, so that the receiver sees the speed */
            hetccl_sim_carry(d, began, out, 0, &c->error);
        else if (o->what != RECV && (status = hetccl_island_barrier(c->island)) == HETCCL_OK)
            began = hetccl_now_ns();           /* the link is used from when all ranks are there */
    }
    if (status == HETCCL_OK)
        status = run_island(o);
    else
        hetccl_sim_fail(status, "%s: not all of %d ranks came", names[o->what], c->size);
    if (status == HETCCL_OK && o->what != SEND)
        hetccl_sim_carry(d, began, out, in, &c->error);
    hetccl_sim_leave(d);
    return status;
}

/* Bytes that the busiest way of each direction carries in the best algorithm known: rings and chains. */
static void traffic(const ccl_op *o, uint64_t *out, uint64_t *in)
{
    uint64_t n = (uint64_t)o->comm->size, one = o->count * hetccl_dtype_size(o->dtype);
    uint64_t place = ((uint64_t)o->comm->rank + n - (uint64_t)o->peer) % n;   /* distance from the root */
    *out = *in = 0;
    if (o->what == SEND || (n > 1 && ((o->what == BROADCAST && place != n - 1) || (o->what == REDUCE && place != 0))))
        *out = one;
    if (o->what == RECV || (n > 1 && ((o->what == BROADCAST && place != 0) || (o->what == REDUCE && place != n - 1))))
        *in = one;
    if (o->what == ALL_REDUCE)
        *out = *in = 2 * (n - 1) * one / n;
    if (o->what == REDUCE_SCATTER || o->what == ALL_GATHER || o->what == ALL_TO_ALL)
        *out = *in = (n - 1) * one;
}

/* The blocking call itself. Blocks until this rank's part is done, the device's deadline passes or somebody aborts. */
static int run_island(ccl_op *o)
{
    hetccl_sim_comm *c = o->comm;
    hetccl_island *i = c->island;
    const void *send = o->send.at;
    void *recv = o->recv.at;
    int status = HETCCL_INVALID;
    hetccl_island_set_timeout(i, atomic_load_explicit(&c->device->deadline_ns, memory_order_relaxed));
    switch (o->what) {
    case ALL_REDUCE:
        status = hetccl_island_all_reduce(i, send, recv, o->count, o->dtype, o->redop);
        break;
    case REDUCE_SCATTER:
        status = hetccl_island_reduce_scatter(i, send, recv, o->count, o->dtype, o->redop);
        break;
    case ALL_GATHER:
        status = hetccl_island_all_gather(i, send, recv, o->count, o->dtype);
        break;
    case BROADCAST:
        status = hetccl_island_broadcast(i, send, recv, o->count, o->dtype, o->peer);
        break;
    case REDUCE:
        status = hetccl_island_reduce(i, send, recv, o->count, o->dtype, o->redop, o->peer);
        break;
    case ALL_TO_ALL:
        status = hetccl_island_all_to_all(i, send, recv, o->count, o->dtype);
        break;
    case SEND:
        status = hetccl_island_send(i, send, o->count, o->dtype, o->peer);
        break;
    case RECV:
        status = hetccl_island_recv(i, recv, o->count, o->dtype, o->peer);
        break;
    }
    if (status == HETCCL_ABORTED)
        return hetccl_sim_fail(status, "%s was aborted by rank %d of %d", names[o->what], hetccl_island_aborted_by(i),
                               c->size);
    if (status != HETCCL_OK)
        return hetccl_sim_fail(status, "%s failed with status %d; it waited for rank %d of %d (-1: for none)",
                               names[o->what], status, hetccl_island_waiting_for(i), c->size);
    return HETCCL_OK;
}
