/* SPDX-License-Identifier: Apache-2.0
 * The direct path's memory: windows, streams, events, and the words that kernels poll. All of it exists before the first
 * operation, so that none allocates, registers or loads anything.
 */
#include "direct.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int make_ring(hx_comm *c, hx_window *win, hx_ring *r, hx_side *side, char *base, int who, int channel)
{
    r->shared = &side->ring[channel];
    r->data = base + HX_RING_AT(who, channel);
    r->begun = r->ended = 0;
    r->wire = win->copies ? win : NULL;
    for (uint32_t i = 0; i < c->direct->slots && !c->host_memory; i++) {
        int rc = c->dev->event_create(c->dev_ctx, &r->event[i]);
        if (rc != HETCCL_OK)
            return rc;
    }
    return HETCCL_OK;
}

static int open_window(hx_comm *c, hx_peer *p, char *text, size_t room)
{
    hetccl_window_args a = {.size = sizeof a, .nbytes = HX_WINDOW_BYTES};
    int rc = p->ops->window(p->ctx, p->ep, &a);
    if (rc != HETCCL_OK) {
        snprintf(text, room, "the transport shares no memory: %s", p->ops->last_error(p->ctx));
        return rc;
    }
    hx_window *win = p->window = calloc(1, sizeof *win);
    if (!win)
        return HETCCL_NO_MEMORY;
    char *base = a.ptr;
    win->start = base;
    win->peer = p;
    win->copies = a.copies != 0;
    win->slots = c->direct->slots;
    win->slot_bytes = c->direct->slot_bytes;
    win->mine = (hx_side *)(base + HX_SIDE_AT(a.side));
    win->theirs = (hx_side *)(base + HX_SIDE_AT(!a.side));
    win->words_out = base + HX_WORDS_AT(a.side);
    win->words_in = base + HX_WORDS_AT(!a.side);
    for (int ch = 0; ch < HX_RINGS && rc == HETCCL_OK; ch++) {
        rc = make_ring(c, win, &win->out[ch], win->mine, base, a.side, ch);
        if (rc == HETCCL_OK)
            rc = make_ring(c, win, &win->in[ch], win->theirs, base, !a.side, ch);
    }
    if (rc == HETCCL_OK && !c->host_memory) {
        if (c->dev->caps & HETCCL_DEVICE_REGISTER) {
            rc = c->dev->host_register(c->dev_ctx, base, HX_WINDOW_BYTES);
            win->base = rc == HETCCL_OK ? base : NULL;
        }
        if (rc == HETCCL_OK && c->direct->kernels)
            rc = c->dev->alloc(c->dev_ctx, HX_RING_BYTES, (void **)&win->arrived);
    }
    if (rc != HETCCL_OK)
        snprintf(text, room, "the device does not take the shared memory: %s", c->dev->last_error(c->dev_ctx));
    return rc;
}

static int open_device(hx_comm *c)
{
    hx_direct *d = c->direct;
    int rc = c->dev->host_alloc(c->dev_ctx, sizeof *d->words, (void **)&d->words);
    if (rc == HETCCL_OK)
        memset(d->words, 0, sizeof *d->words);
    if (rc == HETCCL_OK && d->may_spin) {
        size_t nbytes = (HX_COMBINERS + 1) * HETCCL_SPIN_SCRATCH;
        rc = c->dev->alloc(c->dev_ctx, nbytes, (void **)&d->scratch);
        if (rc == HETCCL_OK)
            rc = c->dev->memset_async(c->dev_ctx, d->scratch, 0, nbytes, c->stream);
        if (rc == HETCCL_OK)
            rc = c->dev->stream_sync(c->dev_ctx, c->stream);
    }
    for (int i = 0; i < HX_STREAMS && rc == HETCCL_OK; i++) {
        rc = c->dev->stream_create(c->dev_ctx, &d->stream[i]);
        if (rc == HETCCL_OK)
            rc = c->dev->event_create(c->dev_ctx, &d->drain[i]);
    }
    if (rc == HETCCL_OK)
        rc = c->dev->event_create(c->dev_ctx, &d->begin);
    for (int i = 0; i < HX_COMBINERS; i++)
        for (uint32_t s = 0; s < d->slots && rc == HETCCL_OK; s++) {
            rc = c->dev->event_create(c->dev_ctx, &d->combiner[i].event[s]);
            if (rc == HETCCL_OK)
                rc = c->dev->event_create(c->dev_ctx, &d->combiner[i].fetched[s]);
        }
    for (int i = 0; i < HX_COMBINERS && rc == HETCCL_OK; i++) {
        size_t slot = d->kernels && d->how != HX_HOW_HOST ? HX_BY_HOST_BYTES : d->slot_bytes;
        rc = c->dev->host_alloc(c->dev_ctx, d->slots * slot, (void **)&d->combiner[i].staging);
    }
    return rc;
}

int hx_direct_open(hx_comm *c, const hx_direct_options *options, char *text, size_t room)
{
    hx_direct *d = c->direct = calloc(1, sizeof *d);
    int rc = d ? HETCCL_OK : HETCCL_NO_MEMORY;
    text[0] = 0;
    if (!d)
        return rc;
    int how = d->how = options->how;
    d->team = c->host_memory ? hx_team_new(options->threads) : NULL;
    d->hosts = options->hosts;
    d->slots = !d->hosts ? HX_SLOTS : d->hosts == 1 ? HX_MOST_SLOTS : HX_MOST_SLOTS / 2;
    d->slot_bytes = HX_RING_BYTES / (d->hosts ? HX_MOST_SLOTS : HX_SLOTS);
    d->kernels = !c->host_memory && (c->dev->caps & HETCCL_DEVICE_KERNELS) && how != HX_HOW_HOST;
    d->may_spin = d->kernels && options->may_spin && (c->dev->caps & HETCCL_DEVICE_SPINS) && how <= HX_HOW_RESIDENT;
    if (!c->host_memory && (rc = open_device(c)) != HETCCL_OK)
        snprintf(text, room, "the device gives no streams or pinned memory: %s", c->dev->last_error(c->dev_ctx));
    for (int r = 0; r < c->size && rc == HETCCL_OK; r++)
        if (c->peers[r].ops)
            rc = open_window(c, &c->peers[r], text, room);
    if (rc != HETCCL_OK)
        hx_direct_free(c);
    return rc;
}

int hx_direct_spins(const hx_comm *c) { return c->direct && c->direct->may_spin; }

void hx_direct_agree(hx_comm *c, const uint8_t *spinning)
{
    for (int r = 0; r < c->size; r++)
        if (c->peers[r].window)
            c->peers[r].window->spins = c->direct->may_spin && spinning[r] && !c->peers[r].window->copies;
    c->direct->agreed = 1;
}

void hx_direct_stop(hx_comm *c)
{
    if (c->direct && c->direct->words)
        atomic_store_explicit(&c->direct->words->stop.value, 1, memory_order_seq_cst);
}

int hx_direct_drained(hx_comm *c)
{
    hx_direct *d = c->direct;
    if (!d || d->closed || c->host_memory)
        return !d || d->closed || hx_team_drained(d->team);
    for (int i = 0; i < HX_STREAMS; i++) {
        if (!d->draining && c->dev->event_record(c->dev_ctx, d->drain[i], d->stream[i]) != HETCCL_OK)
            return 1;                       /* the device itself has failed */
        if (d->draining && c->dev->event_query(c->dev_ctx, d->drain[i]) == HETCCL_IN_PROGRESS)
            return 0;
    }
    int asked = d->draining;
    d->draining = 1;
    return asked;
}

static void close_device(hx_comm *c)
{
    hx_direct *d = c->direct;
    for (int i = 0; i < HX_STREAMS; i++) {
        if (d->stream[i]) {
            c->dev->stream_sync(c->dev_ctx, d->stream[i]);
            c->dev->stream_destroy(c->dev_ctx, d->stream[i]);
        }
        if (d->drain[i])
            c->dev->event_destroy(c->dev_ctx, d->drain[i]);
    }
    if (d->begin)
        c->dev->event_destroy(c->dev_ctx, d->begin);
    for (int i = 0; i < HX_COMBINERS; i++) {
        for (uint32_t s = 0; s < d->slots; s++) {
            if (d->combiner[i].event[s])
                c->dev->event_destroy(c->dev_ctx, d->combiner[i].event[s]);
            if (d->combiner[i].fetched[s])
                c->dev->event_destroy(c->dev_ctx, d->combiner[i].fetched[s]);
        }
        if (d->combiner[i].staging)
            c->dev->host_free(c->dev_ctx, d->combiner[i].staging);
    }
    if (d->scratch)
        c->dev->free(c->dev_ctx, d->scratch);
}

void hx_direct_close(hx_comm *c)
{
    if (!c->direct || c->direct->closed)
        return;
    hx_direct_stop(c);
    hx_spinning(c, -c->spinning);           /* those of works that failed */
    if (!c->host_memory) {
        c->dev->bind_thread(c->dev_ctx);
        if (c->stream)
            c->dev->stream_sync(c->dev_ctx, c->stream);
        close_device(c);
    }
    for (int r = 0; r < c->size; r++) {
        hx_window *win = c->peers[r].window;
        if (!win)
            continue;
        for (int i = 0; i < 2 * HX_RINGS; i++)
            for (uint32_t s = 0; s < c->direct->slots; s++) {
                hx_ring *ring = i < HX_RINGS ? &win->out[i] : &win->in[i - HX_RINGS];
                if (ring->event[s])
                    c->dev->event_destroy(c->dev_ctx, ring->event[s]);
            }
        if (win->arrived)
            c->dev->free(c->dev_ctx, win->arrived);
        if (win->base)
            c->dev->host_unregister(c->dev_ctx, win->base);
        free(win);
        c->peers[r].window = NULL;
    }
    hx_team_free(c->direct->team);
    c->direct->agreed = 0;
    c->direct->closed = 1;
}

void hx_direct_free(hx_comm *c)
{
    if (!c->direct)
        return;
    hx_direct_close(c);
    if (c->direct->words)
        c->dev->host_free(c->dev_ctx, c->direct->words);
    free(c->direct);
    c->direct = NULL;
}

static void copy_chunk(void *arg)
{
    hx_copy *j = arg;
    if (j->past)
        hetccl_copy_past(j->to, j->from, j->n);
    else
        hetccl_copy_fetch(j->to, j->from, j->n);
}

void hx_slot_copy(hx_comm *c, hx_ring *r, uint32_t slot, char *to, const char *from, size_t n, int past)
{
    hx_copy *j = &r->copy[slot];
    if (past)
        atomic_fetch_add_explicit(&c->past_bytes, n, memory_order_relaxed);
    j->to = to;
    j->from = from;
    j->n = n;
    j->past = past;
    hx_team_push(c->direct->team, slot, copy_chunk, j, &j->left);
}

int hx_direct_error(hx_comm *c, hx_work *w, int rc, const char *what)
{
    snprintf(w->text, sizeof w->text, "%s failed on the device: %s", what, c->dev->last_error(c->dev_ctx));
    return rc;
}

int hx_direct_fence(hx_comm *c, hx_work *w, int which)
{
    hx_direct *d = c->direct;
    int rc = HETCCL_OK;
    if (d->fenced[which] == w->sequence || (!w->has_caller && !w->touched &&
                                               !atomic_load_explicit(&c->n_streamed, memory_order_relaxed)))
        return HETCCL_OK;
    if (d->begun != w->sequence)
        rc = c->dev->event_record(c->dev_ctx, d->begin, w->stream);
    d->begun = w->sequence;
    if (rc == HETCCL_OK)
        rc = c->dev->stream_wait_event(c->dev_ctx, d->stream[which], d->begin);
    d->fenced[which] = w->sequence;
    return rc == HETCCL_OK ? rc : hx_direct_error(c, w, rc, "ordering streams");
}
