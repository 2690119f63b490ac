/* SPDX-License-Identifier: Apache-2.0
 * Windows of which each rank has a copy, because no memory is shared: what is written for the peer is also put, by the
 * transport. All else of the direct path stays as it is. The transport's threads carry the data, so that copies of the device,
 * both directions of the wire and sums run at once.
 */
#include "direct.h"
#include <stdio.h>

/* A lost peer is for hx_comm_check to judge, as in flows.c; all else stays and fails the work with the next hx_wire_move. */
static int settle(hx_window *win, int rc)
{
    if (rc == HETCCL_PEER_LOST) {
        win->peer->broken = 1;
        return HETCCL_IN_PROGRESS;
    }
    if (rc > HETCCL_IN_PROGRESS)
        win->status = rc;
    return rc;
}

static uint64_t at(const hx_window *win, const void *p) { return (uint64_t)((const char *)p - win->start); }

int hx_wire_word(hx_window *win, void *where, uint64_t value)
{
    hetccl_window_put put = {.size = sizeof put, .n_words = 1, .word = {{at(win, where), value}}};
    return settle(win, win->peer->ops->window_put(win->peer->ctx, win->peer->ep, &put));
}

int hx_wire_chunk(hx_window *win, const hx_ring *r, uint32_t slot, size_t nbytes)
{
    hetccl_window_put put = {.size = sizeof put, .n_words = 2, .at = at(win, r->data + slot * win->slot_bytes), .nbytes = nbytes};
    hx_note note = r->shared->note[slot];
    put.word[0].at = at(win, &r->shared->note[slot]);
    put.word[0].value = (uint64_t)note.nbytes << 32 | note.fingerprint;
    put.word[1].at = at(win, &r->shared->sent.value);
    put.word[1].value = r->ended + 1;
    return settle(win, win->peer->ops->window_put(win->peer->ctx, win->peer->ep, &put));
}

/* To a peer that has closed nothing can be on its way. Whether it has done its part the caller sees by what has come: a peer
 * that has may be gone before its last words are read, and then this operation is as good as any. */
int hx_wire_move(hx_comm *c, hx_work *w, hx_window *win, int rank, int *all)
{
    int rc = win->status;
    if (rc == HETCCL_OK)
        rc = settle(win, win->peer->ops->window_test(win->peer->ctx, win->peer->ep));
    *all &= rc == HETCCL_OK || win->peer->broken;
    if (rc <= HETCCL_IN_PROGRESS)
        return HETCCL_OK;
    snprintf(w->text, sizeof w->text, "%s", win->peer->ops->last_error(win->peer->ctx));
    c->fail_ranks[0] = rank;
    c->n_fail_ranks = 1;
    return rc;
}

void hx_wire_account(const hx_flow *f, const hx_flow_state *st, hx_window *win, int k, const hx_ring *out, int takes)
{
    uint64_t now = hetccl_now_ns(), ns = now - win->looked_ns;
    uint32_t arrived = st->in_ended[k];
    win->looked_ns = now;
    win->waits[HX_WAIT_ALL] += ns;
    if (out && st->out_begun[k] > st->out_ended[k])
        win->waits[HX_WAIT_COPY_OUT] += ns;
    if (out && !hx_all_taken(out) &&
        (st->out_begun[k] == st->chunks || out->begun - atomic_load_explicit(&out->shared->taken.value, memory_order_relaxed) == win->slots))
        win->waits[HX_WAIT_ROOM] += ns;
    if (takes && st->in_begun[k] < st->chunks)
        win->waits[HX_WAIT_DATA] += ns;
    if (takes && st->in_begun[k] > arrived)
        win->waits[HX_WAIT_COPY_IN] += ns;
    if (hx_sources(f) && st->combined < arrived)
        win->waits[HX_WAIT_SUM] += ns;
}
