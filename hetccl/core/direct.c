/* SPDX-License-Identifier: Apache-2.0
 * Flows on the direct path. The thread that drives starts copies and looks at events and at the counters of both ends; the data
 * passes it by. A rank whose memory is the host's does the same with memcpy, and combines straight from the slots.
 */
#include "direct.h"
#include <stdio.h>
#include <string.h>

/* Measured: a chunk costs a fixed time, and the first one and the last run alone. Beside a rank of the host's memory, which is
 * slower than a device's copies, they are small: there is always a part to take for each of its threads. */
size_t hx_direct_chunk(const hx_comm *c, size_t nbytes)
{
    size_t chunk = HX_LEAST_CHUNK;
    if (c->direct->hosts)
        return nbytes <= 4u << 20 ? chunk / 2 : chunk;
    for (size_t reach = 2u << 20; chunk < c->direct->slot_bytes && nbytes > reach; reach *= 4)
        chunk *= 2;                         /* up to 2 MiB: 512 KiB; 8 MiB: 1 MiB; 32 MiB: 2 MiB; then 4 MiB */
    return chunk;
}

/* Two full rings a direction would fall out of the cache: where an all_reduce between devices sends contributions and results
 * the chunks are half as large. Also on a rank that only gets results: both ends of a ring must find the same. */
static size_t most_bytes(const hx_comm *c, const hx_plan *p)
{
    for (int i = 0; i < p->n_flows && p->op == 0 && !c->direct->hosts; i++)
        if (p->flows[i].give_back || p->flows[i].kind == HX_FLOW_PASS || p->flows[i].channel == HETCCL_CHANNEL_RESULT)
            return c->direct->slot_bytes / 2;
    return c->direct->slot_bytes;
}

void hx_direct_begin(hx_work *w, const hx_step *s)
{
    size_t es = hetccl_dtype_size(w->plan->dtype);
    for (int i = s->first_flow; i < s->first_flow + s->n_flows; i++) {
        const hx_flow *f = &w->plan->flows[i];
        hx_flow_state *st = &w->flow[i];
        size_t chunk = hx_direct_chunk(w->comm, st->n * es), most = most_bytes(w->comm, w->plan);
        st->chunk = (chunk < most ? chunk : most) / es;
        st->chunks = (uint32_t)((st->n + st->chunk - 1) / st->chunk);
        st->started = 0;
        st->combiner = -1;
        st->combine_begun = st->combined = st->fetch_begun = st->fetched = 0;
        for (int k = 0; k < f->n_peers; k++) {
            hx_window *win = w->comm->peers[f->peer[k]].window;
            st->out_begun[k] = st->out_ended[k] = st->in_begun[k] = st->in_ended[k] = 0;
            uint64_t what = (uint64_t)w->sequence << 32 | w->fingerprint;
            atomic_store_explicit(&win->mine->announced, what, memory_order_release);
            if (win->copies) {
                hx_wire_word(win, &win->mine->announced, what);
                win->looked_ns = hetccl_now_ns();
            }
        }
    }
}

static int failed(hx_work *w, int rank, int rc)
{
    w->comm->fail_ranks[0] = rank;
    w->comm->n_fail_ranks = 1;
    return rc;
}

static int damaged(hx_work *w, int rank, const char *what)
{
    snprintf(w->text, sizeof w->text, "the memory shared with rank %d is damaged: its count of chunks %s cannot be", rank, what);
    return failed(w, rank, HETCCL_SYSTEM);
}

static int mismatch(hx_work *w, int rank)
{
    snprintf(w->text, sizeof w->text, "rank %d is in another operation, or in this one with another size or type", rank);
    return failed(w, rank, HETCCL_MISMATCH);
}

hx_ring *hx_direct_out(hx_comm *c, const hx_flow *f, int k)
{
    int channel = f->kind == HX_FLOW_OWN ? HETCCL_CHANNEL_RESULT :
                  f->kind == HX_FLOW_EXCHANGE ? HETCCL_CHANNEL_CONTRIBUTE : f->channel;
    return &c->peers[f->peer[k]].window->out[channel];
}

int hx_direct_publish(hx_work *w, const hx_flow *f, hx_flow_state *st, int k, size_t es, int *moved)
{
    hx_comm *c = w->comm;
    hx_ring *r = hx_direct_out(c, f, k);
    for (; st->out_ended[k] < st->out_begun[k]; *moved = 1) {
        int rc = hx_slot_test(c, r, r->ended % c->direct->slots);
        if (rc == HETCCL_IN_PROGRESS)
            break;
        if (rc != HETCCL_OK)
            return hx_direct_error(c, w, rc, "a copy to the host");
        size_t n = hx_chunk_at(st, st->out_ended[k]) * es;
        if (hx_give(r, r->ended % c->direct->slots, n) != HETCCL_OK)
            break;
        st->out_ended[k]++;
        hx_sent(c, c->peers[f->peer[k]].window, n);
    }
    return HETCCL_OK;
}

int hx_direct_slot(hx_work *w, const hx_flow *f, hx_flow_state *st, int k, size_t es, uint32_t *slot)
{
    hx_ring *r = hx_direct_out(w->comm, f, k);
    uint32_t slots = w->comm->direct->slots, full = r->begun - atomic_load_explicit(&r->shared->taken.value, memory_order_acquire);
    if (full > slots)
        return damaged(w, f->peer[k], "taken");
    if (full == slots)
        return HETCCL_IN_PROGRESS;
    *slot = r->begun % slots;
    r->shared->note[*slot] = (hx_note){w->fingerprint, (uint32_t)(hx_chunk_at(st, st->out_begun[k]) * es)};
    return HETCCL_OK;
}

/* Of `most` slots from `slot` on, the first of which is free, how many the receiver has given back; they get their notes. */
static uint32_t free_run(hx_work *w, hx_ring *r, const hx_flow_state *st, int k, size_t es, uint32_t slot, uint32_t most)
{
    uint32_t room = w->comm->direct->slots - (r->begun - atomic_load_explicit(&r->shared->taken.value, memory_order_acquire));
    uint32_t run = room > most ? most : room ? room : 1;    /* 0: that count is damaged, as will be found next */
    for (uint32_t i = 1; i < run; i++)
        r->shared->note[slot + i] = (hx_note){w->fingerprint, (uint32_t)(hx_chunk_at(st, st->out_begun[k] + i) * es)};
    return run;
}

/* One event behind the copy of several slots. */
static int record_run(hx_comm *c, hx_ring *r, uint32_t slot, uint32_t run, void *stream)
{
    for (uint32_t i = 0; i < run; i++)
        r->last[slot + i] = slot + run - 1;
    return c->dev->event_record(c->dev_ctx, r->event[slot + run - 1], stream);
}

/* Puts chunks below `limit` of `base` into the ring towards peer k, and tells it of those that are there. */
static int give(hx_work *w, const hx_flow *f, hx_flow_state *st, int k, const char *base, uint32_t limit, size_t es, int *moved)
{
    hx_comm *c = w->comm;
    hx_direct *d = c->direct;
    hx_ring *r = hx_direct_out(c, f, k);
    uint32_t slot;
    int rc = hx_direct_publish(w, f, st, k, es, moved);
    for (uint32_t run = 1; rc == HETCCL_OK && st->out_begun[k] < limit; *moved = 1) {
        if ((rc = hx_direct_slot(w, f, st, k, es, &slot)) != HETCCL_OK)
            break;
        if (!c->host_memory)
            run = hx_run(d, st, es, slot, limit - st->out_begun[k]);
        if (run > 1)
            run = free_run(w, r, st, k, es, slot, run);
        size_t n = hx_chunks_at(st, st->out_begun[k], run) * es;
        const char *from = base + (size_t)st->out_begun[k] * st->chunk * es;
        char *to = r->data + slot * d->slot_bytes;
        if (c->host_memory) {
            hx_slot_copy(c, r, slot, to, from, n, 0);
        } else {
            rc = hx_direct_fence(c, w, HX_STREAM_OUT);
            if (rc == HETCCL_OK)
                rc = c->dev->copy_async(c->dev_ctx, to, from, n, d->stream[HX_STREAM_OUT]);
            if (rc == HETCCL_OK)
                rc = record_run(c, r, slot, run, d->stream[HX_STREAM_OUT]);
            if (rc != HETCCL_OK)
                return hx_direct_error(c, w, rc, "a copy to the host");
        }
        r->begun += run;
        st->out_begun[k] += run;
        if (c->host_memory)                 /* at once: the peer takes it while we copy the next */
            rc = hx_direct_publish(w, f, st, k, es, moved);
    }
    return rc == HETCCL_IN_PROGRESS ? HETCCL_OK : rc;
}

/* Gives slots back whose copies to where they belong have ended. */
static int settle(hx_work *w, hx_ring *r, hx_flow_state *st, int k, int stays, int *moved)
{
    hx_comm *c = w->comm;
    for (; !stays && st->in_ended[k] < st->in_begun[k]; *moved = 1) {
        int rc = hx_slot_test(c, r, r->ended % c->direct->slots);
        if (rc == HETCCL_IN_PROGRESS)
            break;
        if (rc != HETCCL_OK)
            return hx_direct_error(c, w, rc, "a copy to the device");
        hx_taken(r);
        st->in_ended[k]++;
    }
    return HETCCL_OK;
}

/* Takes chunks of peer k out of the ring: to where they belong, or to where they wait to be combined. What the host
 * combines stays in its slot until then. */
static int take(hx_work *w, const hx_flow *f, hx_flow_state *st, int k, size_t es, int *moved)
{
    hx_comm *c = w->comm;
    hx_direct *d = c->direct;
    hx_window *win = c->peers[f->peer[k]].window;
    int combines = hx_sources(f) > 0, stays = combines && st->how == HX_HOW_HOST, rc;
    hx_ring *r = &win->in[combines ? HETCCL_CHANNEL_CONTRIBUTE : f->channel];
    if ((rc = settle(w, r, st, k, stays, moved)) != HETCCL_OK)
        return rc;
    for (; st->in_begun[k] < st->chunks; *moved = 1) {
        uint32_t there = atomic_load_explicit(&r->shared->sent.value, memory_order_acquire) - r->begun, slot = r->begun % d->slots;
        if (there > d->slots)
            return damaged(w, f->peer[k], "sent");
        if (there == 0) {
            uint64_t theirs = atomic_load_explicit(&win->theirs->announced, memory_order_relaxed);
            if (theirs >> 32 == w->sequence && (uint32_t)theirs != w->fingerprint)
                return mismatch(w, f->peer[k]);
            break;
        }
        if (combines && !stays && r->begun - win->arrived_free >= d->slots)
            break;
        uint32_t mine = st->chunks - st->in_begun[k];   /* what follows is of the peer's next operation */
        uint32_t run = c->host_memory || stays ? 1 : hx_run(d, st, es, slot, there < mine ? there : mine);
        if (combines && !stays && run > d->slots - (r->begun - win->arrived_free))
            run = d->slots - (r->begun - win->arrived_free);
        for (uint32_t i = 0; i < run; i++)
            if (r->shared->note[slot + i].fingerprint != w->fingerprint ||
                r->shared->note[slot + i].nbytes != hx_chunk_at(st, st->in_begun[k] + i) * es)
                return mismatch(w, f->peer[k]);
        size_t n = hx_chunks_at(st, st->in_begun[k], run) * es;
        char *to = combines ? win->arrived + slot * d->slot_bytes : st->dst + (size_t)st->in_begun[k] * st->chunk * es;
        if (!combines && r == &win->in[HETCCL_CHANNEL_CONTRIBUTE])
            win->arrived_free += run;       /* it counts every contribution */
        if (stays) {
            st->in_ended[k]++;
        } else if (c->host_memory) {
            hx_slot_copy(c, r, slot, to, r->data + slot * d->slot_bytes, n, f->kind == HX_FLOW_RECV && hx_direct_past(w, st, es));
        } else {
            rc = hx_direct_fence(c, w, HX_STREAM_IN);
            if (rc == HETCCL_OK)
                rc = c->dev->copy_async(c->dev_ctx, to, r->data + slot * d->slot_bytes, n, d->stream[HX_STREAM_IN]);
            if (rc == HETCCL_OK)
                rc = record_run(c, r, slot, run, d->stream[HX_STREAM_IN]);
            if (rc != HETCCL_OK)
                return hx_direct_error(c, w, rc, "a copy to the device");
        }
        r->begun += run;
        st->in_begun[k] += run;
        if (c->host_memory && (rc = settle(w, r, st, k, stays, moved)) != HETCCL_OK)
            return rc;
    }
    return HETCCL_OK;
}

int hx_direct_flow(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t es, int *moved)
{
    hx_comm *c = w->comm;
    int sources = hx_sources(f), rc = HETCCL_OK, all = 1;
    if (st->n == 0) {                       /* it was its turn: those after it may go */
        st->done = *moved = 1;
        return rc;
    }
    if (hx_words_fit(w, f, st, es)) {
        uint64_t theirs = atomic_load_explicit(&w->comm->peers[f->peer[0]].window->theirs->announced, memory_order_relaxed);
        if (theirs >> 32 == w->sequence && (uint32_t)theirs != w->fingerprint)
            return mismatch(w, f->peer[0]);
        return hx_words_run(w, f, st, moved);
    }
    if (!st->started && sources && (rc = hx_combiner_start(w, f, st, es)) != HETCCL_OK)
        return rc;
    st->started = 1;
    for (int k = 0; k < f->n_peers && rc == HETCCL_OK; k++) {
        hx_window *win = c->peers[f->peer[k]].window;
        if (win->copies && (rc = hx_wire_move(c, w, win, f->peer[k], &all)) != HETCCL_OK)
            return rc;
        if (hx_gives(f, k)) {
            uint32_t limit = st->chunks;
            const char *base = st->src;
            if (f->kind == HX_FLOW_OWN || f->kind == HX_FLOW_PASS)
                limit = c->host_memory ? 0 : st->combined, base = st->dst;     /* the host combines into the slots */
            else if (f->kind == HX_FLOW_FORWARD)
                limit = st->in_ended[0], base = st->dst;
            else if (f->kind == HX_FLOW_EXCHANGE && st->how == HX_HOW_HOST && limit > st->combined + c->direct->slots)
                limit = st->combined + c->direct->slots;    /* the own part is read from its slot */
            rc = give(w, f, st, k, base, limit, es, moved);
            all &= st->out_ended[k] == st->chunks;
            /* Two ranks that exchange also end together: one that came late would else end early, come early to the next
             * exchange, and the time between them would never go away. And whoever has a copy of its own ends when nothing is
             * on its way any more: it may close the link next. */
            if (f->kind == HX_FLOW_EXCHANGE || win->copies)
                all &= hx_all_taken(hx_direct_out(c, f, k));
        }
        if (rc == HETCCL_OK && hx_takes(f, k)) {
            rc = take(w, f, st, k, es, moved);
            all &= st->in_ended[k] == st->chunks;
        }
    }
    if (rc == HETCCL_OK && sources) {
        rc = hx_combiner_run(w, f, st, es, moved);
        all &= st->combined == st->chunks;
    }
    for (int k = 0; k < f->n_peers && rc == HETCCL_OK && all; k++) {    /* also what was put just now has left */
        hx_window *win = c->peers[f->peer[k]].window;
        rc = win->copies ? hx_wire_move(c, w, win, f->peer[k], &all) : HETCCL_OK;
    }
    if (rc != HETCCL_OK)
        return rc;
    for (int k = 0; k < f->n_peers; k++) {
        hx_window *win = c->peers[f->peer[k]].window;
        if (win->copies)
            hx_wire_account(f, st, win, k, hx_gives(f, k) ? hx_direct_out(c, f, k) : NULL, hx_takes(f, k));
    }
    st->done = all;
    if (all)
        hx_combiner_end(w, st);
    else
        *moved |= hx_team_help(c->direct->team);
    return all ? HETCCL_OK : HETCCL_IN_PROGRESS;
}
