/* SPDX-License-Identifier: Apache-2.0
 * Whom a work waits for. A rank that has done its part may leave, so it must not be blamed when another one, or this rank's own
 * device, takes long.
 */
#include "direct.h"

/* On the direct path: peer k has not taken what it was given, or can be given nothing, or has not sent all of what is to come. */
static int awaits_direct(const hx_work *w, const hx_flow *f, const hx_flow_state *st, int k, size_t es)
{
    const hx_window *win = w->comm->peers[f->peer[k]].window;
    if (hx_words_fit(w, f, st, es))
        return 1;
    const hx_ring *r = hx_direct_out(w->comm, f, k);
    int lacks = win->peer->broken && st->out_ended[k] < st->chunks;
    if (hx_gives(f, k) && (lacks || atomic_load_explicit(&r->shared->taken.value, memory_order_acquire) != r->ended))
        return 1;
    r = &win->in[hx_sources(f) ? HETCCL_CHANNEL_CONTRIBUTE : f->channel];
    return hx_takes(f, k) && st->in_begun[k] < st->chunks &&
           atomic_load_explicit(&r->shared->sent.value, memory_order_acquire) == r->begun;
}

/* Whether a flow cannot go on without peer k: its link takes nothing, or its next chunk has not come. */
static int awaits(const hx_work *w, const hx_flow *f, const hx_flow_state *st, int k)
{
    const hx_peer *p = &w->comm->peers[f->peer[k]];
    size_t es = hetccl_dtype_size(w->plan->dtype), left = st->n - st->pos, most = w->comm->chunk_bytes / es;
    size_t m = left < most ? left : most, limit = st->pos;
    if (hx_goes_direct(w->comm))
        return awaits_direct(w, f, st, k, es);
    if (f->kind == HX_FLOW_SEND)
        return left > 0;
    if (f->kind == HX_FLOW_EXCHANGE)
        limit += m;
    if (hx_gives(f, k) && st->sent[k] < limit)
        return 1;
    if (!left || !hx_takes(f, k) || st->sum >= 0)
        return 0;
    if (!hx_sources(f))
        return 1;
    hetccl_message msg = {sizeof msg, w->fingerprint, HETCCL_CHANNEL_CONTRIBUTE, 0, NULL, m * es};
    return p->ops->peek(p->ctx, p->ep, &msg, 0) != HETCCL_OK;
}

static void note(int32_t *ranks, int32_t *n, int32_t max, int32_t rank)
{
    for (int i = 0; i < *n; i++)
        if (ranks[i] == rank)
            return;
    if (*n < max)
        ranks[(*n)++] = rank;
}

void hx_work_waiting(hx_work *w, int32_t *ranks, int32_t *n, int32_t max, const char **phase)
{
    int64_t segment;
    int index;
    *n = 0;
    *phase = "copy";
    if (!w->bound)
        return;
    const hx_step *s = hx_lane_next(w, HX_LANE_BORDER, &segment, &index);
    if (s && s->kind == HX_FLOWS && w->lane[HX_LANE_BORDER].running) {
        *phase = "border";
        for (int i = s->first_flow; i < s->first_flow + s->n_flows; i++) {
            const hx_flow *f = &w->plan->flows[i];
            int stands = w->flow[i].done || hx_flow_blocked(w, f);
            for (int k = 0; !stands && k < f->n_peers; k++)
                if (awaits(w, f, &w->flow[i], k))
                    note(ranks, n, max, f->peer[k]);
        }
        if (*n)
            return;                         /* else for its device, where the island's next call may lie ahead */
    }
    s = hx_lane_next(w, HX_LANE_ISLAND, &segment, &index);
    int calls = s && s->kind < HX_COPY;
    for (int i = 0; !s && w->comm->streaming && i < w->plan->n_steps; i++)
        calls |= w->plan->steps[i].kind < HX_COPY;     /* all is enqueued: on a stream, only calls wait for others */
    if (calls) {
        *phase = "island";
        for (int i = 0; i < w->comm->n_island_local && *n < max; i++)
            if (w->comm->island_ranks[i] != w->comm->rank)
                ranks[(*n)++] = w->comm->island_ranks[i];
    }
}
