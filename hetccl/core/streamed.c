/* SPDX-License-Identifier: Apache-2.0
 * Collectives that are enqueued on a device and then need nobody: all of an island's, where the vendor's library does the work.
 * A synchronous call goes onto the caller's stream, an asynchronous one onto the communicator's; events order them. What is
 * enqueued is watched only for its deadline, for the vendor's errors, and to let go of the memory at the end.
 */
#include "executor.h"
#include <stdio.h>
#include <string.h>

enum { HOST_DRIVEN, ON_OUR_STREAM, ON_ANY_STREAM };
enum { REAP_BATCH = 8 };

/* Whether a plan can be enqueued at once, and where: the scratch buffers belong to the communicator's stream. */
static int class_of(const hx_plan *p)
{
    if (p->lane_len[HX_LANE_BORDER] || p->host_blocks)
        return HOST_DRIVEN;
    for (int i = 0; i < p->n_steps; i++)
        if (p->steps[i].kind > HX_COPY && p->steps[i].kind != HX_SCALE)
            return HOST_DRIVEN;
    return p->device_blocks ? ON_OUR_STREAM : ON_ANY_STREAM;
}

static int capturing(hx_comm *c, void *stream)
{
    return (c->dev->caps & HETCCL_DEVICE_CAPTURE) && c->dev->is_capturing(c->dev_ctx, stream) == HETCCL_IN_PROGRESS;
}

/* Records event `*event`, made with its first use, on `stream`. */
static int record(hx_comm *c, void **event, void *stream)
{
    int rc = *event ? HETCCL_OK : c->dev->event_create(c->dev_ctx, event);
    return rc == HETCCL_OK ? c->dev->event_record(c->dev_ctx, *event, stream) : rc;
}

int hx_mark_caller(hx_comm *c, hx_work *w)
{
    if (capturing(c, w->caller)) {
        snprintf(w->text, sizeof w->text,
                 "the stream is being captured into a graph, but this operation needs the host at every replay: it crosses "
                 "islands, uses host memory or scratch, or comes behind one that does. Capture only operations inside one island");
        return HETCCL_UNSUPPORTED;
    }
    if (c->dev->stream_query(c->dev_ctx, w->caller) == HETCCL_OK) {
        w->has_caller = 0;                  /* nothing is there to come behind: no stream need wait for another */
        return HETCCL_OK;
    }
    int rc = record(c, &w->edge[0], w->caller);
    if (rc != HETCCL_OK)
        snprintf(w->text, sizeof w->text, "%s", c->dev->last_error(c->dev_ctx));
    return rc;
}

int hx_order_streams(hx_comm *c, hx_work *w)
{
    int rc = HETCCL_OK;
    if (w->has_caller && w->stream != w->caller)
        rc = c->dev->stream_wait_event(c->dev_ctx, w->stream, w->edge[0]);
    if (rc != HETCCL_OK || w->captured)
        return rc;
    if (c->last_stream != w->stream && c->last_stream_set) {
        rc = record(c, &c->order_event, c->last_stream);
        if (rc == HETCCL_OK)
            rc = c->dev->stream_wait_event(c->dev_ctx, w->stream, c->order_event);
    }
    c->last_stream = w->stream;
    c->last_stream_set = 1;
    return rc;
}

static int take_driver(hx_comm *c)
{
    uint64_t until = 0;
    while (pthread_mutex_trylock(&c->driver) != 0) {
        uint64_t now = hetccl_now_ns();
        if (!until)
            until = now + 1000000u;
        if (now > until)
            return 0;
        hetccl_pause();
    }
    return 1;
}

/* Numbers the work, too, if nothing stands before it. */
static int nothing_queued(hx_comm *c, hx_work *w)
{
    pthread_mutex_lock(&c->lock);
    int none = !c->head;
    if (none)
        hx_number(c, w);
    pthread_mutex_unlock(&c->lock);
    return none;
}

static void end_first(hx_comm *c, int status);

/* Ends what the device has done, a batch at a time, so that a program which never waits does not pile up works and events.
 * They end in their order, whatever their streams (hx_order_streams), so one question answers for the whole batch. */
static void reap(hx_comm *c)
{
    if (atomic_load_explicit(&c->n_streamed, memory_order_relaxed) < 2 * REAP_BATCH)
        return;
    hx_work *w = c->streamed_head;              /* only who holds the driver lock takes works out */
    for (int i = 1; i < REAP_BATCH; i++)
        w = w->next;
    if (c->dev->event_query(c->dev_ctx, w->edge[1]) == HETCCL_OK)
        for (int i = 0; i < REAP_BATCH; i++)
            end_first(c, HETCCL_OK);
}

int hx_enqueue(hx_comm *c, hx_work *w, int asynchronous)
{
    int class = HOST_DRIVEN, rc = HETCCL_OK;
    if (c->streaming && !hx_in_turn(c) && !c->host_memory && w->has_caller && !w->user_in && !w->user_out)
        class = class_of(w->plan);
    if (class == HOST_DRIVEN)
        return HETCCL_IN_PROGRESS;
    int captured = capturing(c, w->caller), ours = asynchronous || class == ON_OUR_STREAM;
    /* Scratch may be another one by the time of the replay. Of several islands some rank needs the host, so all refuse. */
    if (captured && (class == ON_OUR_STREAM || w->plan->crosses))
        return HETCCL_IN_PROGRESS;
    while (!take_driver(c))
        if (!captured || hetccl_now_ns() > w->deadline_ns)
            return HETCCL_IN_PROGRESS;
    int failed = (int)atomic_load_explicit(&c->failed, memory_order_acquire);
    if (failed || !nothing_queued(c, w)) {     /* behind works that the host still drives */
        pthread_mutex_unlock(&c->driver);
        return failed ? failed : HETCCL_IN_PROGRESS;
    }
    if (!captured)
        reap(c);
    w->captured = captured;
    w->stream = ours ? c->stream : w->caller;
    w->asynchronous = asynchronous;
    if (ours)
        rc = record(c, &w->edge[0], w->caller);
    if (rc == HETCCL_OK)
        rc = hx_work_enqueue(w);
    if (rc == HETCCL_OK && (ours || !captured))
        rc = record(c, &w->edge[1], w->stream);
    if (rc == HETCCL_OK && ours && !asynchronous)
        rc = c->dev->stream_wait_event(c->dev_ctx, w->caller, w->edge[1]);
    if (rc != HETCCL_OK && !atomic_load_explicit(&c->failed, memory_order_acquire)) {
        snprintf(w->text, sizeof w->text, "enqueuing failed on the device: %s", c->dev->last_error(c->dev_ctx));
        hx_fail(c, rc, w->text);
    }
    if (rc == HETCCL_OK) {
        w->streamed = 1;
        w->next = NULL;
        atomic_fetch_add_explicit(&c->pending, 1, memory_order_release);
        if (captured) {                     /* it runs at each replay: there is nothing to wait for now */
            hx_finish(w, HETCCL_OK);
            if (asynchronous)
                hx_publish(w);
            else {
                atomic_fetch_sub_explicit(&c->pending, 1, memory_order_release);
                hx_work_put(c, w);
            }
        } else {
            atomic_fetch_add_explicit(&c->n_streamed, 1, memory_order_relaxed);
            pthread_mutex_lock(&c->lock);
            if (c->streamed_tail)
                c->streamed_tail->next = w;
            else
                c->streamed_head = w;
            c->streamed_tail = w;
            pthread_mutex_unlock(&c->lock);
        }
    }
    pthread_mutex_unlock(&c->driver);
    return rc;
}

int hx_begin(hx_comm *c, hx_work *w, int asynchronous)
{
    int rc = w->has_caller && w->plan ? hx_enqueue(c, w, asynchronous) : HETCCL_IN_PROGRESS;
    if (rc != HETCCL_IN_PROGRESS)
        return rc;
    w->asynchronous = asynchronous;
    if (w->has_caller && w->plan && (rc = hx_mark_caller(c, w)) != HETCCL_OK)
        return rc;
    rc = hx_submit(c, w);
    return rc == HETCCL_OK ? HETCCL_IN_PROGRESS : rc;
}

int hx_wait_on_stream(hx_work *w, void *stream)
{
    return w->comm->dev->stream_wait_event(w->comm->dev_ctx, stream, w->edge[1]);
}

hx_work *hx_streamed_first(hx_comm *c)
{
    pthread_mutex_lock(&c->lock);
    hx_work *w = c->streamed_head;
    pthread_mutex_unlock(&c->lock);
    return w;
}

/* Takes the first one out and lets its owner know; one that nobody holds goes back to the pool. */
static void end_first(hx_comm *c, int status)
{
    pthread_mutex_lock(&c->lock);
    hx_work *w = c->streamed_head;
    if (!(c->streamed_head = w->next))
        c->streamed_tail = NULL;
    pthread_mutex_unlock(&c->lock);
    atomic_fetch_sub_explicit(&c->n_streamed, 1, memory_order_relaxed);
    hx_finish(w, status);
    if (w->asynchronous) {
        hx_publish(w);
    } else {
        atomic_fetch_sub_explicit(&c->pending, 1, memory_order_release);
        hx_work_put(c, w);
    }
}

int hx_streamed_progress(hx_comm *c)
{
    int moved = 0, rc = HETCCL_IN_PROGRESS;
    hx_work *w;
    while ((w = hx_streamed_first(c)) && (rc = c->dev->event_query(c->dev_ctx, w->edge[1])) == HETCCL_OK) {
        end_first(c, HETCCL_OK);
        moved = 1;
    }
    if (!w)
        return moved;
    if (rc != HETCCL_IN_PROGRESS) {
        char text[HX_TEXT];
        snprintf(text, sizeof text, "the device reports: %s", c->dev->last_error(c->dev_ctx));
        hx_fail(c, rc, text);
        return 1;
    }
    rc = hx_async_error(c);
    if (rc > HETCCL_IN_PROGRESS && rc != HETCCL_UNSUPPORTED) {
        char text[HX_TEXT];
        snprintf(text, sizeof text, "the vendor's library reports: %s", c->ccl->last_error(c->ccl_ctx));
        hx_fail(c, rc, text);
        return 1;
    }
    return moved;
}

void hx_streamed_fail(hx_comm *c, int status)
{
    while (hx_streamed_first(c))
        end_first(c, status);
}
