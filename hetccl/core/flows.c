/* SPDX-License-Identifier: Apache-2.0
 * Border messages. The flows of a step run side by side, each chunk by chunk; an owner combines straight from the memory where
 * the transport shows the peers' chunks, and, where it can, straight into the memory from which the peers take the result.
 * Contributions and results travel on channels of their own: results can always be taken, so nothing can lock.
 */
#include "direct.h"
#include <stdio.h>

static int flow_error(hx_work *w, hx_peer *p, int rank, int rc)
{
    hx_comm *c = w->comm;
    if (rc == HETCCL_PEER_LOST) {           /* hx_comm_check finds out who is to blame, and fails the work */
        p->broken = 1;
        return HETCCL_IN_PROGRESS;
    }
    c->fail_ranks[0] = rank;
    c->n_fail_ranks = 1;
    snprintf(w->text, sizeof w->text, "%s", p->ops->last_error(p->ctx));
    return rc;
}

void hx_flows_begin(hx_work *w, const hx_step *s, int64_t segment)
{
    w->lane[HX_LANE_BORDER].turn = 0;
    for (int i = s->first_flow; i < s->first_flow + s->n_flows; i++) {
        const hx_flow *f = &w->plan->flows[i];
        hx_flow_state *st = &w->flow[i];
        size_t n_src = 0, n_dst = 0;
        st->src = f->src.buffer >= 0 ? hx_address(w, &f->src, segment, &n_src) : NULL;
        st->dst = f->dst.buffer >= 0 ? hx_address(w, &f->dst, segment, &n_dst) : NULL;
        st->n = f->src.buffer >= 0 ? n_src : n_dst;
        st->pos = 0;
        for (int k = 0; k < f->n_peers; k++)
            st->sent[k] = 0;
        st->done = st->n == 0 && !f->n_after;  /* one that others come after takes its turn, for theirs to be in order */
        st->sum = -1;
        hx_trace_place(w, HX_DID_FLOW, i, segment, &f->src, st->src, &f->dst, st->dst, st->n);
    }
    if (hx_goes_direct(w->comm))
        hx_direct_begin(w, s);
}

static void got(hx_work *w, const hx_flow *f, const hx_flow_state *st, size_t m)
{
    HX_TRACE(w, HX_DID_GET, (int)(f - w->plan->flows), -1, 0, (int64_t)st->pos, 0, (int64_t)m, 0);
}

static void sent(hx_work *w, const hx_flow *f, int k, size_t at, size_t m)
{
    HX_TRACE(w, HX_DID_SEND, (int)(f - w->plan->flows), k, 0, (int64_t)at, 0, (int64_t)m, 0);
}

static size_t chunk_at(size_t pos, size_t n, size_t chunk) { return n - pos < chunk ? n - pos : chunk; }

/* Sends the next chunk of [sent, limit). HETCCL_OK when sent has reached limit. One chunk a call: sums and results take turns
 * with what is sent, so that both ranks of a pair work at once. */
static int send_up_to(hx_work *w, const hx_flow *f, int k, const char *base, size_t *done, size_t limit, size_t n, int channel,
                      size_t chunk, size_t es, int *moved)
{
    hx_comm *c = w->comm;
    hx_peer *p = &c->peers[f->peer[k]];
    if (*done < limit) {
        size_t m = chunk_at(*done, n, chunk);
        hetccl_message msg = {sizeof msg, w->fingerprint, channel, 0, (char *)base + *done * es, m * es};
        int rc = p->ops->send(p->ctx, p->ep, &msg);
        if (rc == HETCCL_IN_PROGRESS)
            return rc;
        if (rc != HETCCL_OK)
            return flow_error(w, p, f->peer[k], rc);
        sent(w, f, k, *done, m);
        *done += m;
        *moved = 1;
        atomic_fetch_add_explicit(&c->border_sent, m * es, memory_order_relaxed);
    }
    return *done < limit ? HETCCL_IN_PROGRESS : HETCCL_OK;
}

static int run_send(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t chunk, size_t es, int *moved)
{
    int rc = send_up_to(w, f, 0, st->src, &st->pos, st->n, st->n, f->channel, chunk, es, moved);
    st->done = rc == HETCCL_OK;
    return rc;
}

/* Whether what a flow receives is the end of its way and more than the caches keep. */
static int goes_past(const hx_work *w, const hx_flow *f, size_t es)
{
    const hx_plan *plan = w->plan;
    int all_to_all = plan->in_blocks > 1 && plan->out_blocks > 1;
    int last = all_to_all || plan->n_calls == 0;            /* no call of the library reads it afterwards */
    return last && f->kind == HX_FLOW_RECV && f->dst.buffer == HX_OUT && w->comm->host_memory &&
           hetccl_outgrows_caches((size_t)plan->out_blocks * w->count * es, w->comm->local_ranks);
}

/* Receives a message past the caches, from where the transport shows it. */
static int recv_past(hx_peer *p, hetccl_message *msg, _Atomic uint64_t *past_bytes)
{
    hetccl_message shown = *msg;
    int rc = p->ops->peek(p->ctx, p->ep, &shown, 0);
    if (rc != HETCCL_OK)
        return rc;
    hetccl_copy_past(msg->ptr, shown.ptr, msg->nbytes);
    atomic_fetch_add_explicit(past_bytes, msg->nbytes, memory_order_relaxed);
    return p->ops->release(p->ctx, p->ep, msg->channel);
}

static int run_recv(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t chunk, size_t es, int *moved)
{
    hx_peer *p = &w->comm->peers[f->peer[0]];
    int rc = HETCCL_OK;
    if (st->pos < st->n) {
        size_t m = chunk_at(st->pos, st->n, chunk);
        hetccl_message msg = {sizeof msg, w->fingerprint, f->channel, 0, st->dst + st->pos * es, m * es};
        rc = p->slots && goes_past(w, f, es) ? recv_past(p, &msg, &w->comm->past_bytes) : p->ops->recv(p->ctx, p->ep, &msg);
        if (rc == HETCCL_OK) {
            got(w, f, st, m);
            st->pos += m;
            *moved = 1;
        }
    }
    if (rc > HETCCL_IN_PROGRESS)
        return flow_error(w, p, f->peer[0], rc);
    int all = st->pos == st->n;
    for (int k = 1; f->kind == HX_FLOW_FORWARD && k < f->n_peers; k++) {    /* what has arrived goes on from the user's memory */
        int on = send_up_to(w, f, k, st->dst, &st->sent[k], st->pos, st->n, f->channel, chunk, es, moved);
        if (on > HETCCL_IN_PROGRESS)
            return on;
        all &= st->sent[k] == st->n;
    }
    st->done = all;
    return st->done ? HETCCL_OK : HETCCL_IN_PROGRESS;
}

/* The peers of PASS end with the one that the result goes to. */
static int contributors(const hx_flow *f) { return f->kind == HX_FLOW_PASS ? f->n_peers - 1 : f->n_peers; }

/* The next chunk's contributions, if all have arrived: `src` in island order, `arrived` as the peers stand in the flow. */
static int contributions(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t m, size_t es, const void **src, void **arrived)
{
    hx_comm *c = w->comm;
    for (int k = 0; k < contributors(f); k++) {
        hx_peer *p = &c->peers[f->peer[k]];
        hetccl_message msg = {sizeof msg, w->fingerprint, HETCCL_CHANNEL_CONTRIBUTE, 0, NULL, m * es};
        int rc = p->ops->peek(p->ctx, p->ep, &msg, 0);
        if (rc == HETCCL_OK && (msg.nbytes != m * es || msg.fingerprint != w->fingerprint)) {
            snprintf(w->text, sizeof w->text, "a message of %zu bytes of another operation came where %zu bytes were expected",
                     msg.nbytes, m * es);
            c->fail_ranks[0] = f->peer[k];
            c->n_fail_ranks = 1;
            return HETCCL_MISMATCH;
        }
        if (rc == HETCCL_IN_PROGRESS)
            return rc;
        if (rc != HETCCL_OK)
            return flow_error(w, p, f->peer[k], rc);
        src[k < f->position ? k : k + 1] = arrived[k] = msg.ptr;
    }
    src[f->position] = st->src + st->pos * es;
    return HETCCL_OK;
}

/* One chunk combined by the device. HETCCL_OK when the result lies at dst; the peers get it from there. */
static int combine_on_device(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t m, size_t es)
{
    hx_comm *c = w->comm;
    const void *src[HX_FAN + 1];
    void *arrived[HX_FAN];
    int rc;
    if (st->sum < 0) {
        rc = contributions(w, f, st, m, es, src, arrived);
        if (rc == HETCCL_OK)
            rc = hx_sum_begin(c, w, src, contributors(f) + 1, st->dst + st->pos * es, m, f->finish ? w->plan->divisor : 1.0,
                              &st->sum);
        if (rc != HETCCL_OK)
            return rc;
    }
    rc = hx_sum_test(c, st->sum);
    if (rc > HETCCL_IN_PROGRESS)
        snprintf(w->text, sizeof w->text, "combining failed on the device: %s", c->dev->last_error(c->dev_ctx));
    if (rc != HETCCL_OK)
        return rc;
    st->sum = -1;
    got(w, f, st, m);
    for (int k = 0; k < contributors(f); k++)
        c->peers[f->peer[k]].ops->release(c->peers[f->peer[k]].ctx, c->peers[f->peer[k]].ep, HETCCL_CHANNEL_CONTRIBUTE);
    return HETCCL_OK;
}

/* One combined chunk, if every contribution has arrived. The own one stands at its place in island order. */
static int combine_chunk(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t m, size_t es)
{
    hx_comm *c = w->comm;
    const hx_plan *plan = w->plan;
    const void *src[HX_FAN + 1];
    void *dst[HX_FAN + 1];
    int reserved[HX_FAN] = {0}, answered[HX_FAN] = {0}, n_dst = 0, n = contributors(f);
    void *arrived[HX_FAN];
    int rc = contributions(w, f, st, m, es, src, arrived);
    if (rc != HETCCL_OK)
        return rc;
    dst[n_dst++] = st->dst + st->pos * es;
    for (int k = 0; f->give_back && k < n; k++) {
        hx_peer *p = &c->peers[f->peer[k]];
        if (!p->slots || st->sent[k] != st->pos)
            continue;                       /* that peer's stream lags: the chunk is sent from dst later */
        if (p->answers) {                   /* the result goes back where the contribution lies */
            dst[n_dst++] = arrived[k];
            answered[k] = 1;
            continue;
        }
        hetccl_message msg = {sizeof msg, w->fingerprint, HETCCL_CHANNEL_RESULT, 0, NULL, m * es};
        if (p->ops->reserve(p->ctx, p->ep, &msg) == HETCCL_OK) {
            dst[n_dst++] = msg.ptr;
            reserved[k] = 1;
        }
    }
    rc = hetccl_combine(dst, n_dst, src, n + 1, m, plan->dtype, hx_combining(plan), f->finish ? plan->divisor : 1.0);
    if (rc != HETCCL_OK) {
        snprintf(w->text, sizeof w->text, "the host cannot combine this dtype with this operator");
        return rc;
    }
    got(w, f, st, m);
    for (int k = 0; k < n; k++) {
        hx_peer *p = &c->peers[f->peer[k]];
        hetccl_message msg = {sizeof msg, w->fingerprint, HETCCL_CHANNEL_RESULT, 0, NULL, m * es};
        rc = answered[k] ? p->ops->answer(p->ctx, p->ep, &msg) : HETCCL_IN_PROGRESS;
        if (rc == HETCCL_IN_PROGRESS)       /* also an answer that found no room: the result is sent from dst later */
            p->ops->release(p->ctx, p->ep, HETCCL_CHANNEL_CONTRIBUTE);
        if (reserved[k])
            rc = p->ops->commit(p->ctx, p->ep, &msg);
        if (rc > HETCCL_IN_PROGRESS && flow_error(w, p, f->peer[k], rc) > HETCCL_IN_PROGRESS)
            return rc;
        if (rc == HETCCL_OK) {
            sent(w, f, k, st->sent[k], m);
            st->sent[k] += m;
            atomic_fetch_add_explicit(&c->border_sent, m * es, memory_order_relaxed);
        }
    }
    return HETCCL_OK;
}

static int run_own(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t chunk, size_t es, int *moved)
{
    int rc = HETCCL_OK;
    if (st->pos < st->n) {
        size_t m = chunk_at(st->pos, st->n, chunk);
        rc = w->plan->device_sums ? combine_on_device(w, f, st, m, es) : combine_chunk(w, f, st, m, es);
        if (rc == HETCCL_OK) {
            st->pos += m;
            *moved = 1;
        }
    }
    if (rc > HETCCL_IN_PROGRESS)
        return rc;
    int all = st->pos == st->n;
    if (f->kind == HX_FLOW_PASS) {
        int k = f->n_peers - 1, on = send_up_to(w, f, k, st->dst, &st->sent[k], st->pos, st->n, f->channel, chunk, es, moved);
        if (on > HETCCL_IN_PROGRESS)
            return on;
        all &= st->sent[k] == st->n;
    }
    for (int k = 0; f->give_back && k < f->n_peers; k++) {
        int back = send_up_to(w, f, k, st->dst, &st->sent[k], st->pos, st->n, HETCCL_CHANNEL_RESULT, chunk, es, moved);
        if (back > HETCCL_IN_PROGRESS)
            return back;
        all &= st->sent[k] == st->n;
    }
    st->done = all;
    return all ? HETCCL_OK : HETCCL_IN_PROGRESS;
}

/* Everybody sends everything; a chunk is combined once it has left for every peer (dst may be the memory it left from). */
static int run_exchange(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t chunk, size_t es, int *moved)
{
    while (st->pos < st->n) {
        size_t m = chunk_at(st->pos, st->n, chunk), left = st->pos + m;
        int all = 1;
        for (int k = 0; k < f->n_peers; k++) {
            int rc = send_up_to(w, f, k, st->src, &st->sent[k], left, st->n, HETCCL_CHANNEL_CONTRIBUTE, chunk, es, moved);
            if (rc > HETCCL_IN_PROGRESS)
                return rc;
            all &= rc == HETCCL_OK;
        }
        if (!all)
            return HETCCL_IN_PROGRESS;
        int rc = combine_chunk(w, f, st, m, es);
        if (rc != HETCCL_OK)
            return rc;
        st->pos += m;
        *moved = 1;
    }
    st->done = 1;
    return HETCCL_OK;
}

/* Two flows that both send to, or receive from, one peer on one channel take turns: so messages come in the order of the
 * flows, which plans make the same at both ends. */
int hx_flow_blocked(const hx_work *w, const hx_flow *f)
{
    for (int i = 0; i < f->n_after; i++)
        if (!w->flow[f->after[i]].done)
            return 1;
    return 0;
}

/* One chunk of every flow that can go. The flow after the last one that sent begins the next pass: on a link that takes one
 * chunk at a time all get their turn, else the first would fill its peer's memory while the others' peers have nothing to do. */
int hx_flows_progress(hx_work *w, const hx_step *s, int *moved)
{
    int32_t *turn = &w->lane[HX_LANE_BORDER].turn;
    uint64_t left = atomic_load_explicit(&w->comm->border_sent, memory_order_relaxed);
    size_t es = hetccl_dtype_size(w->plan->dtype), chunk = w->comm->chunk_bytes / es;
    int all = 1, first = *turn;
    for (int k = 0; k < s->n_flows; k++) {
        int i = s->first_flow + (first + k) % s->n_flows, rc;
        const hx_flow *f = &w->plan->flows[i];
        hx_flow_state *st = &w->flow[i];
        if (st->done)
            continue;
        if (hx_flow_blocked(w, f)) {
            all = 0;
            continue;
        }
        if (hx_goes_direct(w->comm)) {
            rc = hx_direct_flow(w, f, st, es, moved);
        } else switch (f->kind) {
        case HX_FLOW_SEND: rc = run_send(w, f, st, chunk, es, moved); break;
        case HX_FLOW_RECV:
        case HX_FLOW_FORWARD: rc = run_recv(w, f, st, chunk, es, moved); break;
        case HX_FLOW_OWN:
        case HX_FLOW_PASS: rc = run_own(w, f, st, chunk, es, moved); break;
        default: rc = run_exchange(w, f, st, chunk, es, moved); break;
        }
        uint64_t now = atomic_load_explicit(&w->comm->border_sent, memory_order_relaxed);
        if (now != left)
            *turn = (first + k + 1) % s->n_flows;
        left = now;
        if (rc > HETCCL_IN_PROGRESS)
            return rc;
        all &= st->done;
    }
    return all ? HETCCL_OK : HETCCL_IN_PROGRESS;
}
