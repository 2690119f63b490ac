/* SPDX-License-Identifier: Apache-2.0
 * Sums on the direct path, chunk by chunk, in one of three ways: a resident kernel of few blocks that is told when a chunk is
 * there (a busy device lets it in once an operation, not once a chunk); a kernel a chunk; the host, from slot to slot. All
 * round alike.
 */
#include "direct.h"
#include <stdio.h>
#include <string.h>

_Static_assert(HX_MOST_SLOTS <= HETCCL_SPIN_SLOTS, "a resident kernel counts its blocks by slots");

#define BLOCKS 6u                           /* of the resident kernel: alone 46 GB/s, beside a large matrix product 42 */

static int choose(hx_comm *c, size_t nbytes)
{
    hx_direct *d = c->direct;
    if (c->host_memory || !d->kernels)
        return HX_HOW_HOST;
    if (d->how == HX_HOW_RESIDENT || d->how == HX_HOW_KERNEL)
        return d->how == HX_HOW_RESIDENT && !d->may_spin ? HX_HOW_KERNEL : d->how;
    return nbytes <= HX_BY_HOST_BYTES ? HX_HOW_HOST : d->may_spin ? HX_HOW_RESIDENT : HX_HOW_KERNEL;
}

static uint64_t time_left(const hx_work *w)
{
    uint64_t now = hetccl_now_ns(), left = w->deadline_ns > now ? w->deadline_ns - now : 0;
    return left + 5000000000u;              /* the host gives up first, and tells the kernel */
}

static double divisor_of(const hx_work *w, const hx_flow *f) { return f->finish ? w->plan->divisor : 1.0; }

/* Starts the resident kernel. HETCCL_UNSUPPORTED: it cannot do this; nothing is enqueued. */
static int launch(hx_work *w, const hx_flow *f, hx_flow_state *st)
{
    hx_comm *c = w->comm;
    hx_direct *d = c->direct;
    hx_combiner *m = &d->combiner[st->combiner];
    int n = hx_sources(f), stream = HX_STREAM_COMBINE + st->combiner, rc;
    hetccl_resident_args a = {
        .size = sizeof a, .dtype = w->plan->dtype, .redop = hx_combining(w->plan), .n_src = (uint32_t)n + 1, .dst = st->dst,
        .slots = d->slots, .base = m->base, .slot_bytes = d->slot_bytes, .count = st->n, .chunk = st->chunk,
        .scale = divisor_of(w, f), .arrive = (uint32_t *)&d->words->arrive[st->combiner].value,
        .freed = (uint32_t *)&d->words->freed[st->combiner].value, .stop = (uint32_t *)&d->words->stop.value,
        .scratch = d->scratch + st->combiner * HETCCL_SPIN_SCRATCH, .blocks = BLOCKS, .timeout_ns = time_left(w), .stream = d->stream[stream]};
    if (n + 1 > HETCCL_SPIN_SOURCES)
        return HETCCL_UNSUPPORTED;
    a.src[f->position] = st->src;
    for (int k = 0; k < n; k++) {
        int at = k < f->position ? k : k + 1;
        hx_window *win = c->peers[f->peer[k]].window;
        a.src[at] = win->arrived;
        a.ring[at] = 1;
        a.first[at] = win->in[HETCCL_CHANNEL_CONTRIBUTE].begun % d->slots;
    }
    if ((rc = hx_direct_fence(c, w, stream)) != HETCCL_OK)
        return rc;
    rc = c->dev->reduce_resident(c->dev_ctx, &a);
    if (rc == HETCCL_OK)
        hx_spinning(c, 1);
    return rc == HETCCL_OK || rc == HETCCL_UNSUPPORTED ? rc : hx_direct_error(c, w, rc, "a kernel that combines");
}

int hx_combiner_start(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t es)
{
    hx_direct *d = w->comm->direct;
    int i = 0, rc;
    while (i < HX_COMBINERS && d->combiner[i].busy)
        i++;
    if (i == HX_COMBINERS)
        return HETCCL_IN_PROGRESS;          /* those that run end by themselves */
    st->combiner = i;
    d->combiner[i].busy = 1;
    st->how = choose(w->comm, st->n * es);
    if (st->how == HX_HOW_RESIDENT) {
        rc = launch(w, f, st);
        if (rc == HETCCL_UNSUPPORTED)
            st->how = HX_HOW_KERNEL;
        else if (rc != HETCCL_OK)
            return rc;
    }
    return HETCCL_OK;
}

void hx_combiner_end(hx_work *w, hx_flow_state *st)
{
    if (st->combiner < 0)
        return;
    hx_combiner *m = &w->comm->direct->combiner[st->combiner];
    if (st->how == HX_HOW_RESIDENT) {
        m->base += st->chunks;
        hx_spinning(w->comm, -1);
    }
    m->busy = 0;
    st->combiner = -1;
}

/* The slot of peer k's ring in which its part of chunk t lies. */
static uint32_t slot_of(hx_work *w, const hx_flow *f, const hx_flow_state *st, int k, uint32_t t)
{
    const hx_ring *r = &w->comm->peers[f->peer[k]].window->in[HETCCL_CHANNEL_CONTRIBUTE];
    return (r->begun - st->in_begun[k] + t) % w->comm->direct->slots;
}

/* And that of its own ring towards peer k in which chunk t is put. */
static uint32_t out_slot(hx_work *w, const hx_flow *f, const hx_flow_state *st, int k, uint32_t t)
{
    return (hx_direct_out(w->comm, f, k)->begun - st->out_begun[k] + t) % w->comm->direct->slots;
}

/* Chunk t's sources in the order of the islands. On the host, where they lie in the slots. */
static int sources_of(hx_work *w, const hx_flow *f, const hx_flow_state *st, uint32_t t, const void *own, const void **src)
{
    int n = hx_sources(f);
    const hx_direct *d = w->comm->direct;
    for (int k = 0; k < n; k++) {
        hx_window *win = w->comm->peers[f->peer[k]].window;
        char *base = st->how == HX_HOW_HOST ? win->in[HETCCL_CHANNEL_CONTRIBUTE].data : win->arrived;
        src[k < f->position ? k : k + 1] = base + slot_of(w, f, st, k, t) * d->slot_bytes;
    }
    src[f->position] = own;
    return n + 1;
}

/* Chunks up to `combined` are combined: their places come free. */
static void advance(hx_work *w, const hx_flow *f, hx_flow_state *st, uint32_t combined, int *moved)
{
    for (; st->combined < combined; st->combined++, *moved = 1)
        for (int k = 0; k < hx_sources(f); k++) {
            hx_window *win = w->comm->peers[f->peer[k]].window;
            win->arrived_free++;
            if (st->how == HX_HOW_HOST && w->comm->host_memory)
                hx_taken(&win->in[HETCCL_CHANNEL_CONTRIBUTE]);
        }
}

/* Chunks from t on, at most `most`, that one kernel can combine: what each peer sent lies side by side. */
static uint32_t together(hx_work *w, const hx_flow *f, const hx_flow_state *st, uint32_t t, uint32_t most, size_t es)
{
    const hx_direct *d = w->comm->direct;
    for (int k = 0; k < hx_sources(f); k++)
        most = hx_run(d, st, es, slot_of(w, f, st, k, t), most);
    return most;
}

static int by_kernels(hx_work *w, const hx_flow *f, hx_flow_state *st, uint32_t ready, size_t es, int *moved)
{
    hx_comm *c = w->comm;
    hx_combiner *m = &c->direct->combiner[st->combiner];
    uint32_t slots = c->direct->slots;
    int stream = HX_STREAM_COMBINE + st->combiner, rc = HETCCL_OK;
    while (st->combine_begun < ready && st->combine_begun - st->combined < slots) {
        const void *src[HX_FAN + 1];
        uint32_t t = st->combine_begun, room = slots - (t - st->combined), most = ready - t < room ? ready - t : room;
        uint32_t run = together(w, f, st, t, most, es);
        size_t at = (size_t)t * st->chunk * es;
        int n = sources_of(w, f, st, t, st->src + at, src);
        hetccl_reduce_args a = {sizeof a, w->plan->dtype, hx_combining(w->plan), (uint32_t)n, st->dst + at, src,
                                hx_chunks_at(st, t, run), divisor_of(w, f), c->direct->stream[stream]};
        rc = hx_direct_fence(c, w, stream);
        if (rc == HETCCL_OK)
            rc = c->dev->reduce_async(c->dev_ctx, &a);
        if (rc == HETCCL_OK)
            rc = c->dev->event_record(c->dev_ctx, m->event[(t + run - 1) % slots], a.stream);
        if (rc != HETCCL_OK)
            return hx_direct_error(c, w, rc, "a kernel that combines");
        for (uint32_t i = 0; i < run; i++)
            m->last[(t + i) % slots] = (t + run - 1) % slots;
        st->combine_begun += run;
        *moved = 1;
    }
    while (st->combined < st->combine_begun) {
        rc = c->dev->event_query(c->dev_ctx, m->event[m->last[st->combined % slots]]);
        if (rc == HETCCL_IN_PROGRESS)
            break;
        if (rc != HETCCL_OK)
            return hx_direct_error(c, w, rc, "a kernel that combines");
        advance(w, f, st, st->combined + 1, moved);
    }
    return HETCCL_OK;
}

static void sum_chunk(void *arg)
{
    hx_sum_job *j = arg;
    int rc = j->past ? hetccl_combine_past(j->dst[0], j->n_dst > 1 ? j->dst[1] : NULL, j->src, j->n_src, j->count, j->dtype, j->redop, j->divisor)
                     : hetccl_combine(j->dst, j->n_dst, j->src, j->n_src, j->count, j->dtype, j->redop, j->divisor);
    if (rc != HETCCL_OK)
        atomic_store_explicit(&j->rc, rc, memory_order_relaxed);
}

/* Fills a job for chunk t, with one destination, so far. */
static void describe(hx_sum_job *j, hx_work *w, const hx_flow *f, const hx_flow_state *st, uint32_t t, const void *own, void *dst)
{
    j->dst[0] = dst;
    j->n_dst = 1;
    j->dtype = w->plan->dtype;
    j->redop = hx_combining(w->plan);
    j->count = hx_chunk_at(st, t);
    j->es = hetccl_dtype_size(w->plan->dtype);
    j->past = 0;
    j->divisor = divisor_of(w, f);
    atomic_store_explicit(&j->rc, HETCCL_OK, memory_order_relaxed);
    j->n_src = sources_of(w, f, st, t, own, j->src);
}

static int outcome(hx_work *w, const hx_sum_job *j)
{
    int rc = atomic_load_explicit(&j->rc, memory_order_relaxed);
    if (rc != HETCCL_OK)
        snprintf(w->text, sizeof w->text, "the host cannot combine this dtype with this operator");
    return rc;
}

/* Places for chunk t in the rings of those whom its sum is sent to. HETCCL_IN_PROGRESS: one of them has none. */
static int results(hx_work *w, const hx_flow *f, hx_flow_state *st, hx_sum_job *j, size_t es)
{
    uint32_t slot[HX_FAN];
    for (int k = 0; k < f->n_peers; k++) {
        int rc = hx_gives(f, k) ? hx_direct_slot(w, f, st, k, es, &slot[k]) : HETCCL_OK;
        if (rc != HETCCL_OK)
            return rc;
    }
    for (int k = 0; k < f->n_peers; k++) {
        hx_ring *r = hx_direct_out(w->comm, f, k);
        if (!hx_gives(f, k))
            continue;
        j->dst[j->n_dst++] = r->data + slot[k] * w->comm->direct->slot_bytes;
        atomic_store_explicit(&r->copy[slot[k]].left, 1, memory_order_relaxed);     /* it ends with the sum */
        r->begun++;
        st->out_begun[k]++;
    }
    return HETCCL_OK;
}

/* The sums that have ended: their results may go, and their contributions' slots. */
static int sums_ended(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t es, int *moved)
{
    hx_direct *d = w->comm->direct;
    hx_combiner *m = &d->combiner[st->combiner];
    int rc = HETCCL_OK;
    while (st->combined < st->combine_begun && rc == HETCCL_OK) {
        hx_sum_job *j = &m->sum[st->combined % d->slots];
        if (atomic_load_explicit(&j->left, memory_order_acquire))
            break;
        rc = outcome(w, j);
        for (int k = 0; k < f->n_peers && rc == HETCCL_OK && f->kind != HX_FLOW_EXCHANGE; k++)
            if (hx_gives(f, k)) {
                hx_ring *r = hx_direct_out(w->comm, f, k);
                uint32_t slot = out_slot(w, f, st, k, st->combined);    /* earlier ones may not have left yet */
                atomic_store_explicit(&r->copy[slot].left, 0, memory_order_relaxed);
                rc = hx_direct_publish(w, f, st, k, es, moved);
            }
        if (rc == HETCCL_OK)
            advance(w, f, st, st->combined + 1, moved);
    }
    return rc;
}

/* Memory of the host: one pass reads the own part and what came, and writes the sum both into the user's memory and into
 * the slots of those who get it. */
static int in_host_memory(hx_work *w, const hx_flow *f, hx_flow_state *st, uint32_t ready, size_t es, int *moved)
{
    hx_comm *c = w->comm;
    hx_direct *d = c->direct;
    hx_combiner *m = &d->combiner[st->combiner];
    int rc = sums_ended(w, f, st, es, moved);
    while (rc == HETCCL_OK && st->combine_begun < ready && st->combine_begun - st->combined < d->slots) {
        hx_sum_job *j = &m->sum[st->combine_begun % d->slots];
        size_t at = (size_t)st->combine_begun * st->chunk * es;
        describe(j, w, f, st, st->combine_begun, st->src + at, st->dst + at);
        if (f->kind != HX_FLOW_EXCHANGE && (rc = results(w, f, st, j, es)) != HETCCL_OK)
            break;
        j->past = j->n_dst <= 2 && hx_direct_past(w, st, es);
        if (j->past)
            atomic_fetch_add_explicit(&c->past_bytes, j->count * j->es, memory_order_relaxed);
        hx_team_push(d->team, slot_of(w, f, st, 0, st->combine_begun), sum_chunk, j, &j->left);
        st->combine_begun++;
        *moved = 1;
        rc = sums_ended(w, f, st, es, moved);       /* alone, it has ended: the peer takes it while the next is combined */
    }
    return rc == HETCCL_IN_PROGRESS ? HETCCL_OK : rc;
}

/* A device's chunks: the own part comes to pinned memory (an exchange has put it into a slot anyway), the sum goes back. */
static int by_host(hx_work *w, const hx_flow *f, hx_flow_state *st, uint32_t ready, size_t es, int *moved)
{
    hx_comm *c = w->comm;
    hx_direct *d = c->direct;
    hx_combiner *m = &d->combiner[st->combiner];
    int exchange = f->kind == HX_FLOW_EXCHANGE, stream = HX_STREAM_IN, rc = HETCCL_OK;
    size_t room = d->kernels ? HX_BY_HOST_BYTES : d->slot_bytes;
    uint32_t slots = d->slots;
    for (; !exchange && st->fetch_begun < st->chunks && st->fetch_begun - st->combined < slots; st->fetch_begun++, *moved = 1) {
        uint32_t t = st->fetch_begun;
        rc = hx_direct_fence(c, w, HX_STREAM_OUT);
        if (rc == HETCCL_OK)
            rc = c->dev->copy_async(c->dev_ctx, m->staging + t % slots * room, st->src + (size_t)t * st->chunk * es,
                                    hx_chunk_at(st, t) * es, d->stream[HX_STREAM_OUT]);
        if (rc == HETCCL_OK)
            rc = c->dev->event_record(c->dev_ctx, m->fetched[t % slots], d->stream[HX_STREAM_OUT]);
        if (rc != HETCCL_OK)
            return hx_direct_error(c, w, rc, "a copy to the host");
    }
    for (; !exchange && st->fetched < st->fetch_begun; st->fetched++, *moved = 1) {
        rc = c->dev->event_query(c->dev_ctx, m->fetched[st->fetched % slots]);
        if (rc == HETCCL_IN_PROGRESS)
            break;
        if (rc != HETCCL_OK)
            return hx_direct_error(c, w, rc, "a copy to the host");
    }
    if (!exchange && st->fetched < ready)
        ready = st->fetched;
    for (; st->combine_begun < ready && st->combine_begun - st->combined < slots; st->combine_begun++, *moved = 1) {
        uint32_t t = st->combine_begun;
        char *sum = m->staging + t % slots * room, *own = sum;
        if (exchange)
            own = hx_direct_out(c, f, 0)->data + out_slot(w, f, st, 0, t) * d->slot_bytes;
        hx_sum_job *j = &m->sum[t % slots];
        describe(j, w, f, st, t, own, sum);
        sum_chunk(j);
        if ((rc = outcome(w, j)) != HETCCL_OK)
            return rc;
        for (int k = 0; k < hx_sources(f); k++)
            hx_taken(&c->peers[f->peer[k]].window->in[HETCCL_CHANNEL_CONTRIBUTE]);
        rc = hx_direct_fence(c, w, stream);
        if (rc == HETCCL_OK)
            rc = c->dev->copy_async(c->dev_ctx, st->dst + (size_t)t * st->chunk * es, sum, hx_chunk_at(st, t) * es, d->stream[stream]);
        if (rc == HETCCL_OK)
            rc = c->dev->event_record(c->dev_ctx, m->event[t % slots], d->stream[stream]);
        if (rc != HETCCL_OK)
            return hx_direct_error(c, w, rc, "a copy to the device");
    }
    while (st->combined < st->combine_begun) {
        rc = c->dev->event_query(c->dev_ctx, m->event[st->combined % slots]);
        if (rc == HETCCL_IN_PROGRESS)
            break;
        if (rc != HETCCL_OK)
            return hx_direct_error(c, w, rc, "a copy to the device");
        advance(w, f, st, st->combined + 1, moved);
    }
    return HETCCL_OK;
}

int hx_combiner_run(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t es, int *moved)
{
    hx_comm *c = w->comm;
    uint32_t ready = st->chunks;
    for (int k = 0; k < hx_sources(f); k++) {
        ready = st->in_ended[k] < ready ? st->in_ended[k] : ready;
        if (f->kind == HX_FLOW_EXCHANGE)    /* dst may be the memory that a chunk leaves from */
            ready = st->out_ended[k] < ready ? st->out_ended[k] : ready;
    }
    if (st->how == HX_HOW_RESIDENT) {
        hx_combiner *m = &c->direct->combiner[st->combiner];
        _Atomic uint32_t *freed = &c->direct->words->freed[st->combiner].value;
        if (ready != st->combine_begun) {
            atomic_store_explicit(&c->direct->words->arrive[st->combiner].value, m->base + ready, memory_order_release);
            st->combine_begun = ready;
        }
        if (st->combined == st->combine_begun)
            return HETCCL_OK;
        uint32_t done = atomic_load_explicit(freed, memory_order_acquire) - m->base;
        if (done - st->combined > st->combine_begun - st->combined) {
            snprintf(w->text, sizeof w->text, "the kernel that combines counts chunks that it has not got");
            return HETCCL_SYSTEM;
        }
        advance(w, f, st, done, moved);
        return HETCCL_OK;
    }
    if (st->how == HX_HOW_KERNEL)
        return by_kernels(w, f, st, ready, es, moved);
    if (!c->host_memory)
        return by_host(w, f, st, ready, es, moved);
    return in_host_memory(w, f, st, ready, es, moved);
}

int hx_words_fit(const hx_work *w, const hx_flow *f, const hx_flow_state *st, size_t es)
{
    return f->kind == HX_FLOW_EXCHANGE && f->n_peers == 1 && w->comm->peers[f->peer[0]].window->spins &&
           st->n * es <= HX_WORD_BYTES / 2;
}

int hx_words_run(hx_work *w, const hx_flow *f, hx_flow_state *st, int *moved)
{
    hx_comm *c = w->comm;
    hx_spin_words *words = c->direct->words;
    hx_window *win = c->peers[f->peer[0]].window;
    if (!st->started) {
        if (++win->exchanges == 0)
            win->exchanges = 2;             /* 0 is what fresh memory holds; the buffers go on alternating */
        atomic_store_explicit(&words->done.value, 0, memory_order_relaxed);
        size_t half = (win->exchanges & 1) * HX_WORD_BYTES;
        hetccl_exchange_args a = {
            .size = sizeof a, .dtype = w->plan->dtype, .redop = hx_combining(w->plan), .position = (uint32_t)f->position,
            .dst = st->dst, .src = st->src, .count = st->n, .scale = divisor_of(w, f), .out = win->words_out + half,
            .in = win->words_in + half, .flag = win->exchanges, .done = (uint32_t *)&words->done.value,
            .stop = (uint32_t *)&words->stop.value, .scratch = c->direct->scratch + HX_COMBINERS * HETCCL_SPIN_SCRATCH,
            .timeout_ns = time_left(w), .stream = w->stream};
        int rc = c->dev->exchange_words(c->dev_ctx, &a);
        if (rc != HETCCL_OK)
            return hx_direct_error(c, w, rc, "a kernel that exchanges");
        hx_spinning(c, 1);
        st->started = 1;
        *moved = 1;
    }
    if (atomic_load_explicit(&words->done.value, memory_order_acquire) != win->exchanges)
        return HETCCL_IN_PROGRESS;
    hx_spinning(c, -1);
    hx_sent(c, win, st->n * hetccl_dtype_size(w->plan->dtype));
    *moved = 1;
    st->done = 1;
    return HETCCL_OK;
}
