/* SPDX-License-Identifier: Apache-2.0
 * Point to point: links, posted receives, and matching them with what arrives.
 */
#include "p2p.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PINNED ((size_t)64 << 10)           /* bytes; staging comes in multiples */

int hx_p2p_init(hx_comm *c)
{
    c->p2p = calloc(1, sizeof *c->p2p);
    return c->p2p ? HETCCL_OK : HETCCL_NO_MEMORY;
}

void hx_p2p_free(hx_comm *c)
{
    if (!c->p2p)
        return;
    for (plink *l = c->p2p->links, *next; l; l = next) {
        next = l->next;
        for (arrival *a = l->arrivals, *n; a; a = n) {
            n = a->next;
            free(a->data);
            free(a);
        }
        free(l->out);
        free(l);
    }
    free(c->p2p);
}

int hx_p2p_add_link(hx_comm *c, int peer, int outgoing, const hetccl_transport_ops *ops, void *ctx, void *ep)
{
    plink *l = calloc(1, sizeof *l);
    if (!l)
        return HETCCL_NO_MEMORY;
    l->ops = ops;
    l->ctx = ctx;
    l->ep = ep;
    l->peer = peer;
    l->outgoing = outgoing;
    pthread_mutex_lock(&c->lock);
    l->next = c->p2p->links;
    c->p2p->links = l;
    c->p2p->n_links++;
    pthread_mutex_unlock(&c->lock);
    hx_kick(c);                             /* a receive may be waiting for this plink */
    hx_engine_kick();
    return HETCCL_OK;
}

static plink *find(hx_comm *c, int peer, int outgoing)
{
    for (plink *l = c->p2p->links; l; l = l->next)
        if (l->peer == peer && l->outgoing == outgoing)
            return l;
    return NULL;
}

int hx_p2p_has_link(hx_comm *c, int peer)
{
    pthread_mutex_lock(&c->lock);
    int yes = find(c, peer, 1) != NULL;
    pthread_mutex_unlock(&c->lock);
    return yes;
}

static void append(hx_work **head, hx_work **tail, hx_work *w)
{
    w->p2p_next = NULL;
    if (*tail)
        (*tail)->p2p_next = w;
    else
        *head = w;
    *tail = w;
}

static void take_out(hx_work **head, hx_work **tail, hx_work *w)
{
    hx_work *before = NULL;
    for (hx_work *x = *head; x; before = x, x = x->p2p_next)
        if (x == w) {
            if (before)
                before->p2p_next = w->p2p_next;
            else
                *head = w->p2p_next;
            if (*tail == w)
                *tail = before;
            return;
        }
}

void hx_p2p_submit(hx_comm *c, hx_work *w)
{
    w->p2p_done = 0;
    w->p2p_state = w->p2p_staged ? S_COPY : S_READY;
    if (w->sending) {
        plink *l = find(c, w->peer, 1);      /* dialled before the work was made */
        w->message = l->messages++;
        append(&l->sends, &l->sends_tail, w);
    } else {
        append(&c->p2p->recvs, &c->p2p->recvs_tail, w);
    }
}

void hx_p2p_done(hx_comm *c, hx_work *w, hx_work **head, hx_work **tail)
{
    take_out(head, tail, w);
    hx_finish(w, HETCCL_OK);
    hx_publish(w);
}

static int matches(const hx_work *w, const plink *l, const record *r)
{
    return (w->peer == l->peer || w->peer < 0) && w->tag == r->tag && w->p2p_state == S_READY;
}

static int accept_message(hx_comm *c, plink *l, hx_work *w, const record *r)
{
    if (w->nbytes != r->nbytes) {
        char text[HX_TEXT];
        snprintf(text, sizeof text, "rank %d sent %llu bytes with tag %d, the receive expects %zu", l->peer,
                 (unsigned long long)r->nbytes, r->tag, w->nbytes);
        c->fail_ranks[0] = l->peer;
        c->n_fail_ranks = 1;
        hx_fail(c, HETCCL_MISMATCH, text);
        return 0;
    }
    w->source = l->peer;
    w->message = r->message;
    w->p2p_state = S_ACTIVE;
    return 1;
}

void hx_p2p_received(hx_comm *c, hx_work *w)
{
    if (w->p2p_staged) {                    /* from pinned memory to the device, then done */
        c->dev->copy_async(c->dev_ctx, w->out, w->p2p_staging, w->nbytes, c->stream);
        c->dev->event_record(c->dev_ctx, w->events[0], c->stream);
        w->p2p_state = S_COPY_OUT;
        return;
    }
    hx_p2p_done(c, w, &c->p2p->recvs, &c->p2p->recvs_tail);
}

/* A record has come in. */
void hx_p2p_handle(hx_comm *c, plink *l, const record *r)
{
    hx_work *w;
    if (l->outgoing) {                      /* I am the sender: go-aheads and acknowledgements */
        if (r->kind == R_ACK)
            l->unacked -= r->nbytes;
        for (w = l->sends; r->kind == R_GO && w; w = w->p2p_next)
            if (w->message == r->message && w->p2p_state == S_ANNOUNCED) {
                w->p2p_state = S_QUEUED;
                hx_p2p_put(c, l, R_DATA, w->message, w->tag, w->nbytes);
            }
        return;
    }
    if (r->kind == R_DATA) {
        for (w = c->p2p->recvs; w; w = w->p2p_next)
            if (w->p2p_state == S_ACTIVE && w->source == l->peer && w->message == r->message)
                break;
        if (!w) {
            hx_fail(c, HETCCL_SYSTEM, "data arrived that nobody had asked for");
            return;
        }
        l->into = w;
        l->into_at = l->into_begun = 0;
        l->left = r->nbytes;
        return;
    }
    int overtakes = 0;                      /* an earlier message of this tag, still coming in, is matched first */
    for (const arrival *a = l->arrivals; a; a = a->next)
        overtakes |= a->r.tag == r->tag;
    for (w = overtakes ? NULL : c->p2p->recvs; w && !matches(w, l, r); w = w->p2p_next)
        ;
    if (w && !accept_message(c, l, w, r))
        return;
    if (w && r->kind == R_ANNOUNCE) {
        hx_p2p_put(c, l, R_GO, r->message, r->tag, r->nbytes);
        return;
    }
    if (w) {
        l->into = w;
        l->into_at = 0;
        l->left = r->nbytes;
        hx_p2p_put(c, l, R_ACK, r->message, r->tag, r->nbytes);
        if (!l->left) {
            l->into = NULL;
            hx_p2p_received(c, w);
        }
        return;
    }
    arrival *a = calloc(1, sizeof *a);
    if (!a || (r->kind == R_EAGER && r->nbytes && !(a->data = malloc(r->nbytes)))) {
        free(a);
        hx_fail(c, HETCCL_NO_MEMORY, "no memory for a message that nobody has asked for yet");
        return;
    }
    a->r = *r;
    if (l->arrivals_tail)
        l->arrivals_tail->next = a;
    else
        l->arrivals = a;
    l->arrivals_tail = a;
    if (r->kind == R_EAGER && r->nbytes) {
        l->filling = a;
        l->left = r->nbytes;
    }
}

/* A posted receive against what has arrived already. */
static int match_arrivals(hx_comm *c, hx_work *w)
{
    for (plink *l = c->p2p->links; l; l = l->next) {
        if (l->outgoing)
            continue;
        arrival *before = NULL;
        for (arrival *a = l->arrivals; a; before = a, a = a->next) {
            if (!matches(w, l, &a->r))
                continue;
            if (l->filling == a)
                return 0;                   /* its last bytes are on the way */
            if (!accept_message(c, l, w, &a->r))
                return 1;
            if (before)
                before->next = a->next;
            else
                l->arrivals = a->next;
            if (l->arrivals_tail == a)
                l->arrivals_tail = before;
            if (a->r.kind == R_ANNOUNCE) {
                hx_p2p_put(c, l, R_GO, a->r.message, a->r.tag, a->r.nbytes);
            } else {
                memcpy(w->p2p_ptr, a->data, w->nbytes);
                hx_p2p_put(c, l, R_ACK, a->r.message, a->r.tag, a->r.nbytes);
                hx_p2p_received(c, w);
            }
            free(a->data);
            free(a);
            return 1;
        }
    }
    return 0;
}

/* Whether somebody waits for what a dead link can no longer bring. */
static int missed(const hx_comm *c, const plink *l)
{
    if (l->sends || l->into || l->filling)
        return 1;
    for (const hx_work *w = c->p2p->recvs; w && !l->outgoing; w = w->p2p_next)
        if ((w->peer == l->peer && w->p2p_state == S_READY) || (w->source == l->peer && w->p2p_state == S_ACTIVE))
            return 1;
    return 0;
}

int hx_p2p_progress(hx_comm *c)
{
    struct hx_p2p *p = c->p2p;
    int moved = 0;
    if (!p->links && !p->recvs)
        return 0;
    pthread_mutex_lock(&c->lock);
    for (hx_work *w = p->recvs, *next; w; w = next) {
        next = w->p2p_next;
        if (w->p2p_state == S_READY || w->p2p_state == S_COPY) {
            w->p2p_state = S_READY;
            moved |= match_arrivals(c, w);
        } else if (w->p2p_state == S_COPY_OUT && c->dev->event_query(c->dev_ctx, w->events[0]) == HETCCL_OK) {
            hx_p2p_done(c, w, &p->recvs, &p->recvs_tail);
            moved = 1;
        }
    }
    for (plink *l = p->links; l && !atomic_load_explicit(&c->failed, memory_order_relaxed); l = l->next) {
        if (!l->dead) {
            if (l->outgoing)
                moved |= hx_p2p_start_sends(c, l);
            moved |= hx_p2p_write(c, l);
            moved |= hx_p2p_read(c, l);
            moved |= hx_p2p_write(c, l);
        }
        if (l->dead && missed(c, l)) {
            c->fail_ranks[0] = l->peer;
            c->n_fail_ranks = 1;
            hx_fail(c, HETCCL_PEER_LOST, l->ops->last_error(l->ctx));
        }
    }
    pthread_mutex_unlock(&c->lock);
    return moved;
}

void hx_p2p_fail_all(hx_comm *c, int status)
{
    pthread_mutex_lock(&c->lock);
    hx_work *w;
    while ((w = c->p2p->recvs)) {
        take_out(&c->p2p->recvs, &c->p2p->recvs_tail, w);
        hx_finish(w, status);
        hx_publish(w);
    }
    for (plink *l = c->p2p->links; l; l = l->next) {
        l->active = l->into = NULL;
        while ((w = l->sends)) {
            take_out(&l->sends, &l->sends_tail, w);
            hx_finish(w, status);
            hx_publish(w);
        }
    }
    pthread_mutex_unlock(&c->lock);
}

uint64_t hx_p2p_deadline(hx_comm *c, int32_t *peer)
{
    uint64_t earliest = UINT64_MAX;
    pthread_mutex_lock(&c->lock);
    *peer = -1;
    for (hx_work *w = c->p2p->recvs; w; w = w->p2p_next)
        if (w->deadline_ns < earliest) {
            earliest = w->deadline_ns;
            *peer = w->peer;
        }
    for (plink *l = c->p2p->links; l; l = l->next)
        for (hx_work *w = l->sends; w; w = w->p2p_next)
            if (w->deadline_ns < earliest) {
                earliest = w->deadline_ns;
                *peer = w->peer;
            }
    pthread_mutex_unlock(&c->lock);
    return earliest;
}

/* Pinned memory stays with the work, whoever waits for it: to give it back is to wait for kernels (memory.c), and after a
 * failure the device may still copy from it. */
static int pinned(hx_comm *c, hx_work *w)
{
    size_t room = w->nbytes > 2 * w->p2p_room ? w->nbytes : 2 * w->p2p_room;    /* so all that is set aside is no more than that */
    return w->nbytes <= w->p2p_room ? HETCCL_OK
                                    : hx_grow_aside(c, &w->p2p_staging, &w->p2p_room, (room + PINNED - 1) / PINNED * PINNED, 1);
}

int hx_p2p_stage(hx_comm *c, hx_work *w)
{
    if (hx_p2p_direct(c, w->peer, w->nbytes)) {
        w->p2p_device = 1;
        return w->has_caller ? hx_mark_caller(c, w) : HETCCL_OK;
    }
    int rc = pinned(c, w);
    if (rc == HETCCL_OK && w->n_events == 0) {
        rc = c->dev->event_create(c->dev_ctx, &w->events[0]);
        w->n_events = rc == HETCCL_OK;
    }
    if (rc == HETCCL_OK && w->has_caller) {
        rc = hx_mark_caller(c, w);
        if (rc == HETCCL_OK && w->has_caller)
            rc = c->dev->stream_wait_event(c->dev_ctx, c->stream, w->edge[0]);
    }
    if (rc == HETCCL_OK && w->sending) {
        rc = c->dev->copy_async(c->dev_ctx, w->p2p_staging, w->in, w->nbytes, c->stream);
        if (rc == HETCCL_OK)
            rc = c->dev->event_record(c->dev_ctx, w->events[0], c->stream);
    }
    w->p2p_staged = 1;
    w->p2p_ptr = w->p2p_staging;
    return rc;
}
