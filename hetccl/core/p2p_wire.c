/* SPDX-License-Identifier: Apache-2.0
 * Point to point: records and data going out of and coming in over one link.
 */
#include "p2p.h"
#include <stdlib.h>

/* A peer that has gone only matters to those who still wait for it: see missed(). */
static int link_error(hx_comm *c, plink *l, int rc)
{
    if (rc == HETCCL_PEER_LOST) {
        l->dead = 1;
        return rc;
    }
    c->fail_ranks[0] = l->peer;
    c->n_fail_ranks = 1;
    const char *said = l->ops->last_error(l->ctx);
    hx_fail(c, rc, said[0] ? said : c->dev->last_error(c->dev_ctx));
    return rc;
}

void hx_p2p_put(hx_comm *c, plink *l, uint32_t kind, uint32_t message, int32_t tag, uint64_t nbytes)
{
    if (l->out_tail - l->out_head == l->out_room) {
        uint32_t room = l->out_room ? 2 * l->out_room : 2 * HEADERS;
        record *out = malloc(room * sizeof *out);
        if (!out) {
            hx_fail(c, HETCCL_NO_MEMORY, "no memory for control records of messages");
            return;
        }
        for (uint32_t i = l->out_head; i != l->out_tail; i++)
            out[i & (room - 1)] = l->out[i & (l->out_room - 1)];
        free(l->out);
        l->out = out;
        l->out_room = room;
    }
    l->out[l->out_tail++ & (l->out_room - 1)] = (record){kind, message, tag, 0, nbytes};
}

/* Writes records and the active send's data. The lock is held. */
int hx_p2p_write(hx_comm *c, plink *l)
{
    int moved = 0;
    for (;;) {
        int rc;
        if (l->active) {                    /* its header is out; nothing may come between it and its data */
            hx_work *w = l->active;
            size_t n = w->nbytes - l->active_sent < c->chunk_bytes ? w->nbytes - l->active_sent : c->chunk_bytes;
            hetccl_message m = {sizeof m, DATA, HETCCL_CHANNEL_P2P, 0, w->p2p_ptr + l->active_sent, n};
            if (hx_p2p_direct(c, l->peer, w->nbytes)) {
                rc = hx_p2p_push(c, l, &moved);
                n = 0;
            } else {
                rc = n ? l->ops->send(l->ctx, l->ep, &m) : HETCCL_OK;
            }
            if (rc == HETCCL_OK && (l->active_sent += n) == w->nbytes) {
                l->active = NULL;
                hx_p2p_done(c, w, &l->sends, &l->sends_tail);
            }
        } else if (l->out_head != l->out_tail) {
            record *r = &l->writing;        /* a transport may hold on to the address; the queue may move */
            *r = l->out[l->out_head & (l->out_room - 1)];
            hetccl_message m = {sizeof m, CONTROL, HETCCL_CHANNEL_P2P, 0, r, sizeof *r};
            rc = l->ops->send(l->ctx, l->ep, &m);
            if (rc == HETCCL_OK) {
                l->out_head++;
                if (r->kind == R_EAGER || r->kind == R_DATA)
                    for (hx_work *w = l->sends; w; w = w->p2p_next)
                        if (w->message == r->message) {
                            l->active = w;
                            l->active_sent = l->active_begun = 0;
                        }
            }
        } else {
            return moved;
        }
        if (rc == HETCCL_IN_PROGRESS)
            return moved;
        if (rc != HETCCL_OK) {
            link_error(c, l, rc);
            return moved;
        }
        moved = 1;
    }
}

/* Announces or sends what is ready, in order: a message never overtakes an earlier one's header. */
int hx_p2p_start_sends(hx_comm *c, plink *l)
{
    int moved = 0;
    for (hx_work *w = l->sends; w; w = w->p2p_next) {
        if (w->p2p_state == S_COPY) {
            if (c->dev->event_query(c->dev_ctx, w->events[0]) != HETCCL_OK)
                break;
            w->p2p_state = S_READY;
        }
        if (w->p2p_state != S_READY)
            continue;
        int eager = w->nbytes <= EAGER && l->unacked + w->nbytes <= CREDIT;
        if (l->out_tail - l->out_head >= HEADERS)
            break;
        hx_p2p_put(c, l, eager ? R_EAGER : R_ANNOUNCE, w->message, w->tag, w->nbytes);
        if (eager)
            l->unacked += w->nbytes;
        w->p2p_state = eager ? S_QUEUED : S_ANNOUNCED;
        moved = 1;
    }
    return moved;
}

int hx_p2p_read(hx_comm *c, plink *l)
{
    int moved = 0;
    for (int turn = 0; turn < READS; turn++) {
        record r;
        int data = l->into || l->filling, rc;
        size_t n = l->left < c->chunk_bytes ? l->left : c->chunk_bytes;
        hetccl_message m = {sizeof m, data ? DATA : CONTROL, HETCCL_CHANNEL_P2P, 0, &r, sizeof r};
        if (data) {
            m.ptr = l->into ? l->into->p2p_ptr + l->into_at : l->filling->data + l->filling->got;
            m.nbytes = n;
        }
        int direct = l->into && hx_p2p_direct(c, l->peer, l->into->nbytes);
        rc = direct ? hx_p2p_pull(c, l, &moved) : l->ops->recv(l->ctx, l->ep, &m);
        if (rc == HETCCL_IN_PROGRESS)
            return moved;
        if (rc != HETCCL_OK) {
            link_error(c, l, rc);
            return moved;
        }
        moved = 1;
        if (!data) {
            hx_p2p_handle(c, l, &r);
            if (atomic_load_explicit(&c->failed, memory_order_relaxed))
                return 1;
            continue;
        }
        if (!direct)
            l->left -= n;
        if (l->into)
            l->into_at += direct ? 0 : n;
        else
            l->filling->got += n;
        if (!l->left) {
            hx_work *w = l->into;
            l->into = NULL;
            l->filling = NULL;
            if (w)
                hx_p2p_received(c, w);
        }
    }
    return moved;
}
