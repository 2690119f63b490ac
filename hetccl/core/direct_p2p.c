/* SPDX-License-Identifier: Apache-2.0
 * Data of point-to-point messages on the direct path. Records (announcements, go-aheads) go over the link as ever; the data of
 * a message that was announced goes through the window that the two ranks have for collectives, in a ring of its own.
 */
#include "direct.h"
#include "p2p.h"
#include <string.h>

int hx_p2p_direct(const hx_comm *c, int peer, size_t nbytes)
{
    return hx_goes_direct(c) && peer >= 0 && c->peers[peer].window && nbytes > EAGER;
}

/* A device's memory is only read behind what the caller's stream held when the work was made. */
static int fence(hx_comm *c, hx_work *w, int which)
{
    return w->has_caller ? c->dev->stream_wait_event(c->dev_ctx, c->direct->stream[which], w->edge[0]) : HETCCL_OK;
}

/* Starts one chunk's copy, or makes it. */
static int move(hx_comm *c, hx_work *w, hx_ring *r, int which, char *to, const char *from, size_t n, int first)
{
    hx_direct *d = c->direct;
    int rc = HETCCL_OK;
    if (!w->p2p_device) {
        memcpy(to, from, n);
        return rc;
    }
    if (first)
        rc = fence(c, w, which);
    if (rc == HETCCL_OK)
        rc = c->dev->copy_async(c->dev_ctx, to, from, n, d->stream[which]);
    return rc == HETCCL_OK ? c->dev->event_record(c->dev_ctx, r->event[r->begun % c->direct->slots], d->stream[which]) : rc;
}

/* Whether the copy of the oldest unfinished chunk has ended. */
static int ended(hx_comm *c, const hx_work *w, hx_ring *r)
{
    return w->p2p_device ? c->dev->event_query(c->dev_ctx, r->event[r->ended % c->direct->slots]) : HETCCL_OK;
}

static size_t part(size_t at, size_t nbytes, size_t chunk) { return nbytes - at < chunk ? nbytes - at : chunk; }

int hx_p2p_push(hx_comm *c, plink *l, int *moved)
{
    hx_work *w = l->active;
    hx_ring *r = &c->peers[l->peer].window->out[HETCCL_CHANNEL_P2P];
    size_t chunk = hx_direct_chunk(c, w->nbytes), n;
    int rc, all = 1;
    if (r->wire && (rc = hx_wire_move(c, w, r->wire, l->peer, &all)) != HETCCL_OK)
        return rc;
    for (; l->active_begun < w->nbytes; l->active_begun += n, r->begun++, *moved = 1) {
        uint32_t full = r->begun - atomic_load_explicit(&r->shared->taken.value, memory_order_acquire), slot = r->begun % c->direct->slots;
        n = part(l->active_begun, w->nbytes, chunk);
        if (full > c->direct->slots)
            return HETCCL_SYSTEM;
        if (full == c->direct->slots)
            break;
        r->shared->note[slot] = (hx_note){DATA, (uint32_t)n};
        rc = move(c, w, r, HX_STREAM_OUT, r->data + slot * c->direct->slot_bytes, w->p2p_ptr + l->active_begun, n, l->active_begun == 0);
        if (rc != HETCCL_OK)
            return rc;
    }
    for (; l->active_sent < l->active_begun; l->active_sent += n, *moved = 1) {
        n = part(l->active_sent, w->nbytes, chunk);
        if ((rc = ended(c, w, r)) != HETCCL_OK)
            return rc;
        if ((rc = hx_give(r, r->ended % c->direct->slots, n)) != HETCCL_OK)
            return rc;
    }
    all &= !r->wire || hx_all_taken(r);
    return all && l->active_sent == w->nbytes ? HETCCL_OK : HETCCL_IN_PROGRESS;
}

int hx_p2p_pull(hx_comm *c, plink *l, int *moved)
{
    hx_work *w = l->into;
    hx_ring *r = &c->peers[l->peer].window->in[HETCCL_CHANNEL_P2P];
    size_t chunk = hx_direct_chunk(c, w->nbytes), n;
    int rc, all = 1;
    if (r->wire && (rc = hx_wire_move(c, w, r->wire, l->peer, &all)) != HETCCL_OK)
        return rc;
    for (; l->into_begun < w->nbytes; l->into_begun += n, r->begun++, *moved = 1) {
        uint32_t there = atomic_load_explicit(&r->shared->sent.value, memory_order_acquire) - r->begun, slot = r->begun % c->direct->slots;
        n = part(l->into_begun, w->nbytes, chunk);
        if (there > c->direct->slots || (there && (r->shared->note[slot].fingerprint != DATA || r->shared->note[slot].nbytes != n)))
            return HETCCL_SYSTEM;
        if (there == 0)
            break;
        rc = move(c, w, r, HX_STREAM_IN, w->p2p_ptr + l->into_begun, r->data + slot * c->direct->slot_bytes, n, l->into_begun == 0);
        if (rc != HETCCL_OK)
            return rc;
    }
    for (; l->into_at < l->into_begun; l->into_at += n, l->left -= n, *moved = 1) {
        n = part(l->into_at, w->nbytes, chunk);
        if ((rc = ended(c, w, r)) != HETCCL_OK)
            return rc;
        hx_taken(r);
    }
    return l->into_at == w->nbytes ? HETCCL_OK : HETCCL_IN_PROGRESS;
}
