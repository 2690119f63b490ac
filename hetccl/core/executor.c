/* SPDX-License-Identifier: Apache-2.0
 * Runs a plan: binds count and addresses, then moves the two lanes of a work forward. The island lane makes vendor calls and
 * copies in one order; the border lane moves messages. A step waits for at most one step of the other lane.
 */
#include "executor.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct measure {
    uint64_t length, unit, tail;
} measure;

static measure segment_measure(const hx_work *w, int64_t segment)
{
    measure m;
    uint64_t start = (uint64_t)segment * w->segment;
    m.length = w->count - start < w->segment ? w->count - start : w->segment;
    m.unit = m.length / (uint64_t)w->plan->units;
    if (m.unit >= HX_UNIT_ALIGN)
        m.unit &= ~(uint64_t)(HX_UNIT_ALIGN - 1);
    m.tail = m.length - m.unit * (uint64_t)w->plan->units;
    return m;
}

/* Address and number of elements of a slice. */
char *hx_address(hx_work *w, const hx_slice *s, int64_t segment, size_t *n)
{
    const hx_plan *p = w->plan;
    measure m = segment_measure(w, segment);
    uint64_t lo = (uint64_t)s->a * m.unit + (uint64_t)s->at * m.tail, hi = (uint64_t)s->b * m.unit + (uint64_t)s->bt * m.tail;
    size_t es = hetccl_dtype_size(p->dtype);
    *n = hi > lo ? hi - lo : 0;
    switch (s->buffer) {
    case HX_IN:
        return w->in + ((uint64_t)s->block * w->count + (uint64_t)segment * w->segment + lo) * es;
    case HX_OUT:
        return w->out + ((uint64_t)s->block * w->count + (uint64_t)segment * w->segment + lo) * es;
    default: {
        int device = s->buffer == HX_DEVICE_SCRATCH;
        uint64_t blocks = (uint64_t)(device ? p->device_blocks : p->host_blocks), depth = (uint64_t)p->max_shift + 1;
        uint64_t slot = ((uint64_t)segment % depth) * blocks + (uint64_t)s->block;
        return (device ? w->comm->device_scratch : w->comm->host_scratch) + (slot * w->segment + lo) * es;
    }
    }
}

static int stream_error(hx_comm *c, hx_work *w, int rc, const char *what)
{
    snprintf(w->text, sizeof w->text, "%s failed on the device: %s", what, c->dev->last_error(c->dev_ctx));
    hx_fail(c, rc, w->text);
    return rc;
}

/* Called when the work reaches the head of the queue, so the scratch buffers are nobody else's. */
void hx_work_bind(hx_work *w)
{
    hx_comm *c = w->comm;
    const hx_plan *p = w->plan;
    size_t es = hetccl_dtype_size(p->dtype);
    w->bound = 1;
    w->segment = p->segment && p->segment < w->count ? p->segment : (w->count ? w->count : 1);
    w->segments = w->count ? (int64_t)((w->count + w->segment - 1) / w->segment) : 1;
    size_t depth = (size_t)p->max_shift + 1;
    int rc = HETCCL_OK;
    if (p->device_blocks)
        rc = hx_grow(c, &c->device_scratch, &c->device_cap, depth * (size_t)p->device_blocks * w->segment * es, 0);
    if (rc == HETCCL_OK && p->host_blocks)
        rc = hx_grow(c, &c->host_scratch, &c->host_cap, depth * (size_t)p->host_blocks * w->segment * es, 1);
    size_t in = (size_t)p->in_blocks * w->count * es, out = (size_t)p->out_blocks * w->count * es;
    int in_place = w->user_in == w->user_out;
    if (rc == HETCCL_OK && w->user_out) {
        rc = hx_grow(c, &c->staged_out, &c->staged_out_cap, in_place && in > out ? in : out ? out : 1, 0);
        w->out = c->staged_out;
    }
    if (rc == HETCCL_OK && w->user_in && !in_place)
        rc = hx_grow(c, &c->staged_in, &c->staged_in_cap, in ? in : 1, 0);
    if (w->user_in)
        w->in = in_place ? c->staged_out : c->staged_in;
    if (rc != HETCCL_OK) {
        snprintf(w->text, sizeof w->text, "no memory for scratch buffers: %s", c->dev->last_error(c->dev_ctx));
        hx_fail(c, rc, w->text);
        return;
    }
    for (int l = 0; l < HX_LANES; l++) {
        w->lane[l].iteration = -(int64_t)p->max_shift;
        w->lane[l].index = 0;
        w->lane[l].running = 0;
    }
    memset(w->done, 0, sizeof *w->done * (size_t)p->n_steps);
    w->event_head = w->event_tail = 0;
    w->staged_in = w->touched = 0;
    w->last_recorded = 0;
    HX_TRACE(w, HX_DID_BEGIN, p->number, -1, w->segments, (int64_t)(w->in - w->out) / (int64_t)es, 0, (int64_t)w->count,
             (int64_t)(c->chunk_bytes / es));
    if (!c->host_memory && (rc = hx_order_streams(c, w)) != HETCCL_OK)
        stream_error(c, w, rc, "ordering streams");
}

/* Records an event behind what the work has enqueued so far; `step` is counted done when it is reached (-1: the work's end). */
static int record(hx_comm *c, hx_work *w, int step)
{
    int slot = w->event_tail % HX_EVENTS;
    if (slot >= w->n_events) {
        int rc = c->dev->event_create(c->dev_ctx, &w->events[slot]);
        if (rc != HETCCL_OK)
            return stream_error(c, w, rc, "creating an event");
        w->n_events = slot + 1;
    }
    int rc = c->dev->event_record(c->dev_ctx, w->events[slot], w->stream);
    if (rc != HETCCL_OK)
        return stream_error(c, w, rc, "recording an event");
    w->event_step[slot] = step;
    w->event_tail++;
    return HETCCL_OK;
}

static int poll_events(hx_comm *c, hx_work *w)
{
    int moved = 0, reached = w->event_head;
    for (; reached < w->event_tail; reached++) {
        int rc = c->dev->event_query(c->dev_ctx, w->events[reached % HX_EVENTS]);
        if (rc == HETCCL_IN_PROGRESS)
            break;
        if (rc != HETCCL_OK) {
            stream_error(c, w, rc, "a step");
            break;
        }
    }
    if (c->streaming) {                     /* asked after the events: a stream also runs past a call that failed */
        int rc = hx_async_error(c);
        if (rc == HETCCL_ABORTED)
            c->island_aborted = 1;
        else if (rc > HETCCL_IN_PROGRESS && rc != HETCCL_UNSUPPORTED) {
            snprintf(w->text, sizeof w->text, "the vendor's library reports: %s", c->ccl->last_error(c->ccl_ctx));
            hx_fail(c, rc, w->text);
        }
    }
    if (c->island_aborted || atomic_load_explicit(&c->failed, memory_order_relaxed))
        return 0;
    for (; w->event_head < reached; w->event_head++, moved = 1) {
        int step = w->event_step[w->event_head % HX_EVENTS];
        if (step >= 0) {
            w->done[step]++;
            HX_TRACE(w, HX_DID_DONE, step);
        }
    }
    return moved;
}

static int copy(hx_comm *c, hx_work *w, void *dst, const void *src, size_t nbytes)
{
    if (dst == src || nbytes == 0)
        return HETCCL_OK;
    if (c->host_memory) {
        memmove(dst, src, nbytes);
        return HETCCL_OK;
    }
    atomic_fetch_add_explicit(&c->staged_bytes, nbytes, memory_order_relaxed);
    w->touched = 1;
    int rc = c->dev->copy_async(c->dev_ctx, dst, src, nbytes, w->stream);
    return rc == HETCCL_OK ? rc : stream_error(c, w, rc, "a copy");
}

/* Copies, scalings and host combinations. */
static int local_step(hx_comm *c, hx_work *w, const hx_step *s, int64_t segment)
{
    size_t n, ns, es = hetccl_dtype_size(w->plan->dtype);
    char *dst = hx_address(w, &s->dst, segment, &n), *src = hx_address(w, &s->src, segment, &ns);
    hx_trace_place(w, HX_DID_STEP, (int)(s - w->plan->steps), segment, &s->src, src, &s->dst, dst, n);
    if (n == 0)
        return HETCCL_OK;
    if (s->kind == HX_COPY)
        return copy(c, w, dst, src, n * es);
    int redop = hx_combining(w->plan);
    if (s->kind == HX_FILL)
        return hx_identity(dst, n, w->plan->dtype, redop);
    if (s->kind == HX_SCALE && w->plan->scale_divisor == 0.0)   /* on the host: plans see to that */
        return hetccl_scale(dst, src, n, w->plan->dtype, w->factor);
    if (s->kind == HX_SCALE) {
        const void *one = src;
        if (!c->host_memory && s->dst.buffer != HX_HOST_SCRATCH) {
            w->touched = 1;
            hetccl_reduce_args a = {sizeof a, w->plan->dtype, HETCCL_SUM, 1, dst, &one, n, w->plan->scale_divisor, w->stream};
            int rc = c->dev->scale_async(c->dev_ctx, &a);
            return rc == HETCCL_OK ? rc : stream_error(c, w, rc, "scaling");
        }
        void *to = dst;
        return hetccl_combine(&to, 1, &one, 1, n, w->plan->dtype, HETCCL_SUM, w->plan->scale_divisor);
    }
    const void *many[256];                  /* HX_COMBINE: island sizes are checked when the plan is compiled */
    uint64_t stride = (uint64_t)s->stride * (s->src.buffer == HX_IN || s->src.buffer == HX_OUT ? w->count : w->segment);
    for (int i = 0; i < s->n_src; i++)
        many[i] = src + (uint64_t)i * stride * es;
    void *to = dst;
    return hetccl_combine(&to, 1, many, s->n_src, n, w->plan->dtype, redop, 1.0);
}

/* The operator that partial results are combined with. */
int hx_combining(const hx_plan *p)
{
    return p->redop == HETCCL_AVG || p->redop == HETCCL_PREMUL_SUM ? HETCCL_SUM : p->redop;
}

/* Next step of a lane, or NULL at its end. Skips iterations that lie outside the segments. */
const hx_step *hx_lane_next(const hx_work *w, int lane, int64_t *segment, int *index)
{
    const hx_plan *p = w->plan;
    hx_lane_state *s = (hx_lane_state *)&w->lane[lane];
    for (; s->iteration < w->segments; s->iteration++, s->index = 0)
        for (; s->index < p->lane_len[lane]; s->index++) {
            *index = p->lane_steps[lane][s->index];
            *segment = s->iteration + p->steps[*index].shift;
            if (*segment >= 0 && *segment < w->segments)
                return &p->steps[*index];
        }
    return NULL;
}

/* Scratch holds max_shift + 1 segments: neither lane may run so far ahead that it overwrites what the other still needs. */
static int scratch_busy(const hx_work *w, int lane, int64_t segment)
{
    const hx_plan *p = w->plan;
    int64_t before = segment - p->max_shift - 1;
    int islands = p->lane_len[HX_LANE_ISLAND];
    if (before < 0 || !islands || !p->lane_len[HX_LANE_BORDER])
        return 0;
    if (lane == HX_LANE_ISLAND)
        return w->lane[HX_LANE_BORDER].iteration <= before;
    return w->done[p->lane_steps[HX_LANE_ISLAND][islands - 1]] <= before;
}

static int is_vendor(const hx_step *s) { return s->kind <= HX_TRANSFER; }

/* Whether the border lane has not done yet what stands before a step in the plan. A call that blocks the driver then might
 * wait for a rank that waits for what this one has to send. */
static int border_lags(const hx_work *w, const hx_step *s, int64_t segment, int index)
{
    int64_t of;
    int at;
    const hx_step *next = hx_lane_next(w, HX_LANE_BORDER, &of, &at);
    return next && (of - next->shift < segment - s->shift || (of - next->shift == segment - s->shift && at < index));
}

/* One step of a lane: 1 moved, 0 blocked, -1 lane at its end (or the communicator failed). */
static int lane_step(hx_work *w, int lane, int inline_calls)
{
    hx_comm *c = w->comm;
    hx_lane_state *state = &w->lane[lane];
    int64_t segment;
    int index, rc = HETCCL_OK, moved = 0;
    const hx_step *s = hx_lane_next(w, lane, &segment, &index);
    if (!s)
        return -1;
    if (c->island_aborted)
        return 0;
    if (state->running && is_vendor(s)) {
        rc = hx_lane_test(c);
        if (rc == HETCCL_IN_PROGRESS)
            return 0;
        state->running = 0;
    } else {
        if (!state->running && ((s->wait_step >= 0 && w->done[s->wait_step] <= segment) || scratch_busy(w, lane, segment)))
            return 0;
        if (!c->host_memory && lane == HX_LANE_ISLAND && !state->running && w->event_tail - w->event_head >= HX_EVENTS - 1)
            return 0;                       /* no event is free to tell when this step is done */
        if (s->kind == HX_FLOWS) {
            if (!state->running) {
                hx_flows_begin(w, s, segment);
                state->running = 1;
            }
            rc = hx_flows_progress(w, s, &moved);
            if (rc == HETCCL_IN_PROGRESS)
                return moved;
            state->running = 0;
        } else if (is_vendor(s)) {
            size_t n;
            hx_address(w, &s->len, segment, &n);
            int in_turn = hx_in_turn(c);    /* then the call may wait for other ranks */
            int small = n * hetccl_dtype_size(w->plan->dtype) <= HX_INLINE_BYTES || (c->ccl->caps & HETCCL_CCL_ABORT);
            int here = n == 0 || (c->streaming ? !in_turn || inline_calls
                                                      : inline_calls && small && !border_lags(w, s, segment, index));
            if (!here) {
                rc = hx_lane_post(c, w, s, segment);
                if (rc == HETCCL_OK) {
                    state->running = 1;
                    return 1;
                }
            } else {
                atomic_store_explicit(&c->call_deadline_ns, w->deadline_ns, memory_order_relaxed);
                atomic_store_explicit(&c->in_call, !c->streaming, memory_order_relaxed);
                rc = hx_vendor_call(c, w, s, segment);
                atomic_store_explicit(&c->in_call, 0, memory_order_relaxed);
            }
        } else {
            rc = local_step(c, w, s, segment);
        }
    }
    if (rc == HETCCL_ABORTED && !atomic_load_explicit(&c->aborted, memory_order_relaxed)) {
        c->island_aborted = 1;
        return 0;
    }
    if (rc != HETCCL_OK) {
        if (!atomic_load_explicit(&c->failed, memory_order_relaxed))
            hx_fail(c, rc, w->text);
        return -1;
    }
    if (lane == HX_LANE_ISLAND && !c->host_memory && s->signal) {
        if (record(c, w, index) != HETCCL_OK)
            return -1;
    } else {
        w->done[index]++;
        HX_TRACE(w, HX_DID_DONE, index);
    }
    state->index++;
    return 1;
}

int hx_work_progress(hx_work *w, int inline_calls)
{
    hx_comm *c = w->comm;
    int moved = 0, ended[HX_LANES], any;
    if (!w->bound)
        hx_work_bind(w);
    if (atomic_load_explicit(&c->failed, memory_order_relaxed))
        return 1;
    size_t es = hetccl_dtype_size(w->plan->dtype);
    if (!w->staged_in) {                    /* host memory of the caller, device memory for the vendor */
        if (w->user_out && w->plan->reads_out && copy(c, w, w->out, w->user_out, (size_t)w->plan->out_blocks * w->count * es) != HETCCL_OK)
            return 1;
        if (w->user_in && w->plan->in_blocks && copy(c, w, w->in, w->user_in, (size_t)w->plan->in_blocks * w->count * es) != HETCCL_OK)
            return 1;
        w->staged_in = 1;
    }
    if (!c->host_memory)
        moved |= poll_events(c, w);
    if (c->island_aborted)                  /* events behind an aborted call are reached, but what they promise is not there */
        return moved;
    do {
        any = 0;
        for (int l = 0; l < HX_LANES; l++) {
            int rc;
            while ((rc = lane_step(w, l, inline_calls)) == 1)
                any = 1;
            ended[l] = rc < 0;
        }
        moved |= any;
    } while (any && !(ended[0] && ended[1]));
    if (atomic_load_explicit(&c->failed, memory_order_relaxed) || !(ended[0] && ended[1]))
        return moved;
    if (!c->host_memory) {
        if (!w->last_recorded) {            /* everything is enqueued: copy out, then wait for the end of the stream */
            if (w->user_out && copy(c, w, w->user_out, w->out, (size_t)w->plan->out_blocks * w->count * es) != HETCCL_OK)
                return 1;
            w->last_recorded = 1;
            if (w->touched) {               /* what went by the direct path has ended already */
                record(c, w, -1);
                return 1;
            }
        }
        if (w->event_head < w->event_tail)
            return moved;
    }
    HX_TRACE(w, HX_DID_END);
    hx_finish(w, HETCCL_OK);
    return 1;
}

int hx_work_enqueue(hx_work *w)
{
    int rc;
    hx_work_bind(w);
    while ((rc = lane_step(w, HX_LANE_ISLAND, 1)) == 1)
        ;
    HX_TRACE(w, HX_DID_END, .n = 1);
    return (int)atomic_load_explicit(&w->comm->failed, memory_order_acquire);
}
