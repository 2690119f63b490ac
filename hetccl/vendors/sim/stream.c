/* SPDX-License-Identifier: Apache-2.0
 * Streams of the pretend accelerator: a thread and a queue each. Nothing runs in the thread that enqueues.
 */
#include "device.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "wait.h"

#define YIELDS 100                             /* before sleeping: short work is usually followed by more */

struct hetccl_sim_stream {
    hetccl_sim_device *device;
    hetccl_sim_stream *next;                   /* in device->streams, under the device's lock */
    int exited;                                /* the thread has left; under the device's lock */
    pthread_mutex_t lock;                      /* guards what follows */
    pthread_cond_t more, room;
    hetccl_sim_op *head, **tail;
    _Atomic uint32_t n_queued;                 /* written under the lock */
    int closing;
};

typedef struct mark_op {
    hetccl_sim_op op;
    hetccl_sim_mark *mark;
} mark_op;

static void *stream_main(void *arg);
static hetccl_sim_op *take(hetccl_sim_stream *s);
static void run_one(hetccl_sim_stream *s, hetccl_sim_op *op);
static void stream_delete(hetccl_sim_stream *s);
static int default_stream(hetccl_sim_device *d, hetccl_sim_stream **out);
static int start_locked(hetccl_sim_device *d, hetccl_sim_stream **out);
static int timed_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t until_ns);
static int is_stopped(hetccl_sim_device *d);
static int nothing(hetccl_sim_op *op, hetccl_sim_device *d);
static void pass_mark(hetccl_sim_op *op, int status);

int hetccl_sim_stream_new(hetccl_sim_device *d, hetccl_sim_stream **out)
{
    pthread_mutex_lock(&d->lock);
    int status = start_locked(d, out);
    pthread_mutex_unlock(&d->lock);
    return status;
}

int hetccl_sim_stream_close(hetccl_sim_device *d, hetccl_sim_stream *s)
{
    if (s->device != d)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: stream %p belongs to %s", d->name, (void *)s, s->device->name);
    pthread_mutex_lock(&d->lock);
    if (s->exited) {
        stream_delete(s);
    } else {
        pthread_mutex_lock(&s->lock);
        s->closing = 1;
        pthread_cond_broadcast(&s->more);
        pthread_mutex_unlock(&s->lock);
    }
    pthread_mutex_unlock(&d->lock);
    return HETCCL_OK;
}

int hetccl_sim_enqueue(hetccl_sim_device *d, void *stream, hetccl_sim_op *op)
{
    hetccl_sim_stream *s = stream;
    int status = HETCCL_OK;
    if (s == NULL)
        status = default_stream(d, &s);
    else if (s->device != d)
        status = hetccl_sim_fail(HETCCL_INVALID, "%s: stream %p belongs to %s", d->name, stream, s->device->name);
    if (status != HETCCL_OK) {
        op->end(op, status);
        return status;
    }
    op->next = NULL;
    uint64_t until = 0;
    pthread_mutex_lock(&s->lock);
    while (s->n_queued >= HETCCL_SIM_QUEUE_MAX && !is_stopped(d) && status == HETCCL_OK) {
        uint64_t limit = atomic_load_explicit(&d->deadline_ns, memory_order_relaxed);
        if (until == 0)
            until = hetccl_now_ns() + limit;
        if (timed_wait(&s->room, &s->lock, until) != 0)
            status = hetccl_sim_fail(HETCCL_TIMED_OUT, "%s: the stream's queue of %u operations stayed full for %.1f s",
                                     d->name, HETCCL_SIM_QUEUE_MAX, (double)limit * 1e-9);
    }
    if (status == HETCCL_OK && is_stopped(d))
        status = hetccl_sim_fail(HETCCL_ABORTED, "%s: the device has been stopped", d->name);
    if (status == HETCCL_OK) {
        *s->tail = op;
        s->tail = &op->next;
        s->n_queued++;
        pthread_cond_signal(&s->more);
    }
    pthread_mutex_unlock(&s->lock);
    if (status != HETCCL_OK)
        op->end(op, status);
    return status;
}

int hetccl_sim_stop(hetccl_sim_device *d, uint64_t wait_ns)
{
    atomic_store_explicit(&d->stop, 1, memory_order_release);
    uint64_t until = hetccl_now_ns() + wait_ns;
    pthread_mutex_lock(&d->lock);
    for (hetccl_sim_stream *s = d->streams; s != NULL; s = s->next) {
        pthread_mutex_lock(&s->lock);
        pthread_cond_broadcast(&s->more);
        pthread_cond_broadcast(&s->room);
        pthread_mutex_unlock(&s->lock);
    }
    int late = 0;
    while (d->n_threads > 0 && !late)
        late = timed_wait(&d->idle, &d->lock, until);
    pthread_mutex_unlock(&d->lock);
    return late ? HETCCL_TIMED_OUT : HETCCL_OK;
}

hetccl_sim_mark *hetccl_sim_mark_new(void)
{
    hetccl_sim_mark *m = malloc(sizeof *m);
    if (m != NULL) {
        atomic_init(&m->state, HETCCL_IN_PROGRESS);
        atomic_init(&m->refs, 1);
    }
    return m;
}

hetccl_sim_mark *hetccl_sim_mark_ref(hetccl_sim_mark *m)
{
    atomic_fetch_add_explicit(&m->refs, 1, memory_order_relaxed);
    return m;
}

void hetccl_sim_mark_unref(hetccl_sim_mark *m)
{
    if (m != NULL && atomic_fetch_sub_explicit(&m->refs, 1, memory_order_acq_rel) == 1)
        free(m);
}

int hetccl_sim_mark_record(hetccl_sim_device *d, hetccl_sim_mark *m, void *stream)
{
    mark_op *o = calloc(1, sizeof *o);
    if (o == NULL)
        return hetccl_sim_fail(HETCCL_NO_MEMORY, "%s: out of memory", d->name);
    o->op.run = nothing;
    o->op.end = pass_mark;
    o->mark = hetccl_sim_mark_ref(m);
    return hetccl_sim_enqueue(d, stream, &o->op);
}

int hetccl_sim_mark_wait(hetccl_sim_device *d, hetccl_sim_mark *m)
{
    uint64_t limit = atomic_load_explicit(&d->deadline_ns, memory_order_relaxed);
    uint64_t begin = hetccl_now_ns();
    for (uint32_t turn = 0;; turn++) {
        uint32_t state = atomic_load_explicit(&m->state, memory_order_acquire);
        if (state == HETCCL_OK)
            return HETCCL_OK;
        if (turn < YIELDS && state == HETCCL_IN_PROGRESS) {
            sched_yield();
            continue;
        }
        if (state != HETCCL_IN_PROGRESS)
            return hetccl_sim_fail((int)state, "%s: the work waited for was abandoned", d->name);
        if (is_stopped(d))
            return hetccl_sim_fail(HETCCL_ABORTED, "%s: the device has been stopped", d->name);
        uint64_t spent = hetccl_now_ns() - begin;
        if (spent >= limit)
            return hetccl_sim_fail(HETCCL_TIMED_OUT, "%s: the stream did not get there within %.1f s", d->name,
                                   (double)limit * 1e-9);
        uint64_t left = limit - spent;
        hetccl_futex_wait(&m->state, HETCCL_IN_PROGRESS, left < HETCCL_SIM_SLICE_NS ? left : HETCCL_SIM_SLICE_NS);
    }
}

static void *stream_main(void *arg)
{
    hetccl_sim_stream *s = arg;
    hetccl_sim_device *d = s->device;
    for (hetccl_sim_op *op; (op = take(s)) != NULL;)
        run_one(s, op);

    pthread_mutex_lock(&d->lock);
    s->exited = 1;
    if (s->closing)
        stream_delete(s);
    if (--d->n_threads == 0)
        pthread_cond_broadcast(&d->idle);
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* The next operation. Blocks until there is one; NULL when the stream is closed or stopped and nothing is left. */
static hetccl_sim_op *take(hetccl_sim_stream *s)
{
    for (int turn = 0; turn < YIELDS && atomic_load_explicit(&s->n_queued, memory_order_relaxed) == 0; turn++)
        sched_yield();
    pthread_mutex_lock(&s->lock);
    if (s->head == NULL)
        hetccl_sim_idle(s->device, s);
    while (s->head == NULL && !s->closing && !is_stopped(s->device))
        pthread_cond_wait(&s->more, &s->lock);
    hetccl_sim_op *op = s->head;
    if (op != NULL) {
        s->head = op->next;
        if (s->head == NULL)
            s->tail = &s->head;
        if (s->n_queued-- == HETCCL_SIM_QUEUE_MAX)
            pthread_cond_broadcast(&s->room);
    }
    pthread_mutex_unlock(&s->lock);
    return op;
}

/* The one place where queued work runs: what disturbs the order or the speed of a device on purpose belongs here. */
static void run_one(hetccl_sim_stream *s, hetccl_sim_op *op)
{
    hetccl_sim_device *d = s->device;
    int status = HETCCL_ABORTED;
    hetccl_sim_disturb(d, s);
    if (!is_stopped(d)) {
        status = atomic_load_explicit(&d->error, memory_order_acquire);
        if (status == HETCCL_OK) {
            status = op->run(op, d);
            if (status != HETCCL_OK)
                hetccl_sim_break(d, status);
        }
    }
    op->end(op, status);
}

/* Under the device's lock, once the thread has left or is leaving. */
static void stream_delete(hetccl_sim_stream *s)
{
    for (hetccl_sim_stream **at = &s->device->streams; *at != NULL; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    pthread_cond_destroy(&s->more);
    pthread_cond_destroy(&s->room);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static int default_stream(hetccl_sim_device *d, hetccl_sim_stream **out)
{
    int status = HETCCL_OK;
    pthread_mutex_lock(&d->lock);
    if (d->default_stream == NULL)
        status = start_locked(d, &d->default_stream);
    *out = d->default_stream;
    pthread_mutex_unlock(&d->lock);
    return status;
}

static int start_locked(hetccl_sim_device *d, hetccl_sim_stream **out)
{
    if (is_stopped(d))
        return hetccl_sim_fail(HETCCL_ABORTED, "%s: the device has been stopped", d->name);
    hetccl_sim_stream *s = calloc(1, sizeof *s);
    if (s == NULL)
        return hetccl_sim_fail(HETCCL_NO_MEMORY, "%s: out of memory", d->name);
    s->device = d;
    s->tail = &s->head;
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&s->more, &clock);
    pthread_cond_init(&s->room, &clock);
    pthread_condattr_destroy(&clock);
    s->next = d->streams;
    d->streams = s;

    /* Signals stay with the threads of the program, Python's handlers among them. */
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    int reason = pthread_create(&thread, &detached, stream_main, s);
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (reason != 0) {
        stream_delete(s);
        return hetccl_sim_fail(HETCCL_SYSTEM, "%s: cannot start a stream's thread: error %d", d->name, reason);
    }
    char label[16];
    snprintf(label, sizeof label, "%.15s", d->name);
    pthread_setname_np(thread, label);
    d->n_threads++;
    *out = s;
    return HETCCL_OK;
}

/* 0, or -1 once `until_ns` of the monotonic clock has passed. */
static int timed_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t until_ns)
{
    struct timespec t = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    return pthread_cond_timedwait(cond, lock, &t) == ETIMEDOUT ? -1 : 0;
}

static int is_stopped(hetccl_sim_device *d)
{
    return atomic_load_explicit(&d->stop, memory_order_acquire) != 0;
}

static int nothing(hetccl_sim_op *op, hetccl_sim_device *d)
{
    return HETCCL_OK;
}

static void pass_mark(hetccl_sim_op *op, int status)
{
    hetccl_sim_mark *m = ((mark_op *)op)->mark;
    atomic_store_explicit(&m->state, (uint32_t)status, memory_order_release);
    hetccl_futex_wake(&m->state);
    hetccl_sim_mark_unref(m);
    free(op);
}
