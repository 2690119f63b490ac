/* SPDX-License-Identifier: Apache-2.0
 * Point to point. A link has one sender, which dialled it, and one receiver. Messages are numbered per link and matched by
 * tag in the order sent. Up to EAGER bytes and while the credit lasts, data follows its header at once and is buffered by a
 * receiver that has not asked yet; beyond, a header announces the message and the data waits for the receiver's go-ahead.
 * Control records are HETCCL_CHANNEL_P2P messages of sizeof(record) bytes; data follows in messages of at most max_message.
 */
#include "executor.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EAGER (64u << 10)
#define CREDIT (1u << 20)                   /* unacknowledged eager bytes a plink */
#define CONTROL 0x70327063u                 /* fingerprints of control records and of data */
#define DATA 0x70327064u

enum { R_EAGER = 1, R_ANNOUNCE = 2, R_DATA = 3, R_GO = 4, R_ACK = 5 };
enum { S_COPY = 0, S_READY = 1, S_ANNOUNCED = 2, S_QUEUED = 3, S_ACTIVE = 4, S_COPY_OUT = 5, S_DONE = 6 };

typedef struct record {
    uint32_t kind, message;
    int32_t tag;
    uint32_t pad;
    uint64_t nbytes;
} record;

typedef struct arrival {                    /* announced or buffered, not asked for yet */
    struct arrival *next;
    record r;
    char *data;                             /* eager: the bytes */
    size_t got;
} arrival;

typedef struct plink {
    struct plink *next;
    const hetccl_transport_ops *ops;
    void *ctx, *ep;
    int peer, outgoing;
    int dead;                               /* the peer has gone: what had arrived can still be read */
    uint32_t messages;                      /* sender: numbered so far */
    size_t unacked;
    /* what is being written: records go first, then the data of the active send */
    record out[64];
    uint32_t out_head, out_tail;
    hx_work *active;                        /* sender: its data is under way */
    size_t active_sent;
    hx_work *sends, *sends_tail;            /* in order; announced ones wait here too */
    /* receiver */
    arrival *arrivals, *arrivals_tail;
    arrival *filling;                       /* data of an eager message nobody asked for goes here ... */
    hx_work *into;                          /* ... or straight to the one who did */
    size_t left;
    size_t into_at;
} plink;

struct hx_p2p {
    plink *links;
    hx_work *recvs, *recvs_tail;            /* posted, in order */
    int n_links;
};

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
    w->p2p_state = w->p2p_staging ? S_COPY : S_READY;
    if (w->sending) {
        plink *l = find(c, w->peer, 1);      /* dialled before the work was made */
        w->message = l->messages++;
        append(&l->sends, &l->sends_tail, w);
    } else {
        append(&c->p2p->recvs, &c->p2p->recvs_tail, w);
    }
}

/* A peer that has gone only matters to those who still wait for it: see missed(). */
static int link_error(hx_comm *c, plink *l, int rc)
{
    if (rc == HETCCL_PEER_LOST) {
        l->dead = 1;
        return rc;
    }
    c->fail_ranks[0] = l->peer;
    c->n_fail_ranks = 1;
    hx_fail(c, rc, l->ops->last_error(l->ctx));
    return rc;
}

static int put(plink *l, uint32_t kind, uint32_t message, int32_t tag, uint64_t nbytes)
{
    if (l->out_tail - l->out_head == 64)
        return 0;
    l->out[l->out_tail++ % 64] = (record){kind, message, tag, 0, nbytes};
    return 1;
}

static void done(hx_comm *c, hx_work *w, hx_work **head, hx_work **tail)
{
    take_out(head, tail, w);
    if (w->p2p_staging) {
        c->dev->host_free(c->dev_ctx, w->p2p_staging);
        w->p2p_staging = NULL;
    }
    hx_finish(w, HETCCL_OK);
    hx_publish(w);
}

/* Writes records and the active send's data. The lock is held. */
static int write_out(hx_comm *c, plink *l)
{
    int moved = 0;
    for (;;) {
        int rc;
        if (l->active) {                    /* its header is out; nothing may come between it and its data */
            hx_work *w = l->active;
            size_t n = w->nbytes - l->active_sent < c->chunk_bytes ? w->nbytes - l->active_sent : c->chunk_bytes;
            hetccl_message m = {sizeof m, DATA, HETCCL_CHANNEL_P2P, 0, w->p2p_ptr + l->active_sent, n};
            rc = n ? l->ops->send(l->ctx, l->ep, &m) : HETCCL_OK;
            if (rc == HETCCL_OK && (l->active_sent += n) == w->nbytes) {
                l->active = NULL;
                done(c, w, &l->sends, &l->sends_tail);
            }
        } else if (l->out_head != l->out_tail) {
            record *r = &l->out[l->out_head % 64];
            hetccl_message m = {sizeof m, CONTROL, HETCCL_CHANNEL_P2P, 0, r, sizeof *r};
            rc = l->ops->send(l->ctx, l->ep, &m);
            if (rc == HETCCL_OK) {
                l->out_head++;
                if (r->kind == R_EAGER || r->kind == R_DATA)
                    for (hx_work *w = l->sends; w; w = w->p2p_next)
                        if (w->message == r->message) {
                            l->active = w;
                            l->active_sent = 0;
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
static int start_sends(hx_comm *c, plink *l)
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
        if (!put(l, eager ? R_EAGER : R_ANNOUNCE, w->message, w->tag, w->nbytes))
            break;
        if (eager)
            l->unacked += w->nbytes;
        w->p2p_state = eager ? S_QUEUED : S_ANNOUNCED;
        moved = 1;
    }
    return moved;
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

static void received(hx_comm *c, hx_work *w)
{
    if (w->p2p_staging) {                   /* from pinned memory to the device, then done */
        c->dev->copy_async(c->dev_ctx, w->out, w->p2p_staging, w->nbytes, c->stream);
        c->dev->event_record(c->dev_ctx, w->events[0], c->stream);
        w->p2p_state = S_COPY_OUT;
        return;
    }
    done(c, w, &c->p2p->recvs, &c->p2p->recvs_tail);
}

/* A record has come in. */
static void handle(hx_comm *c, plink *l, const record *r)
{
    hx_work *w;
    if (l->outgoing) {                      /* I am the sender: go-aheads and acknowledgements */
        if (r->kind == R_ACK)
            l->unacked -= r->nbytes;
        for (w = l->sends; r->kind == R_GO && w; w = w->p2p_next)
            if (w->message == r->message && w->p2p_state == S_ANNOUNCED) {
                w->p2p_state = S_QUEUED;
                put(l, R_DATA, w->message, w->tag, w->nbytes);
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
        l->into_at = 0;
        l->left = r->nbytes;
        return;
    }
    for (w = c->p2p->recvs; w && !matches(w, l, r); w = w->p2p_next)
        ;
    if (w && !accept_message(c, l, w, r))
        return;
    if (w && r->kind == R_ANNOUNCE) {
        put(l, R_GO, r->message, r->tag, r->nbytes);
        return;
    }
    if (w) {
        l->into = w;
        l->into_at = 0;
        l->left = r->nbytes;
        put(l, R_ACK, r->message, r->tag, r->nbytes);
        if (!l->left) {
            l->into = NULL;
            received(c, w);
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

static int read_in(hx_comm *c, plink *l)
{
    int moved = 0;
    while (l->out_tail - l->out_head < 60) { /* every record may ask for an answer */
        record r;
        int data = l->into || l->filling, rc;
        size_t n = l->left < c->chunk_bytes ? l->left : c->chunk_bytes;
        hetccl_message m = {sizeof m, data ? DATA : CONTROL, HETCCL_CHANNEL_P2P, 0, &r, sizeof r};
        if (data) {
            m.ptr = l->into ? l->into->p2p_ptr + l->into_at : l->filling->data + l->filling->got;
            m.nbytes = n;
        }
        rc = l->ops->recv(l->ctx, l->ep, &m);
        if (rc == HETCCL_IN_PROGRESS)
            return moved;
        if (rc != HETCCL_OK) {
            link_error(c, l, rc);
            return moved;
        }
        moved = 1;
        if (!data) {
            handle(c, l, &r);
            if (atomic_load_explicit(&c->failed, memory_order_relaxed))
                return 1;
            continue;
        }
        l->left -= n;
        if (l->into)
            l->into_at += n;
        else
            l->filling->got += n;
        if (!l->left) {
            hx_work *w = l->into;
            l->into = NULL;
            l->filling = NULL;
            if (w)
                received(c, w);
        }
    }
    return moved;
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
                put(l, R_GO, a->r.message, a->r.tag, a->r.nbytes);
            } else {
                memcpy(w->p2p_ptr, a->data, w->nbytes);
                put(l, R_ACK, a->r.message, a->r.tag, a->r.nbytes);
                received(c, w);
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
            done(c, w, &p->recvs, &p->recvs_tail);
            moved = 1;
        }
    }
    for (plink *l = p->links; l && !atomic_load_explicit(&c->failed, memory_order_relaxed); l = l->next) {
        if (!l->dead) {
            if (l->outgoing)
                moved |= start_sends(c, l);
            moved |= write_out(c, l);
            moved |= read_in(c, l);
            moved |= write_out(c, l);
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
