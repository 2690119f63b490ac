/* SPDX-License-Identifier: Apache-2.0
 * Communicators: the queue of works, driving, sleeping, failing.
 */
#include "direct.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#define DRAIN_NS 5000000000u           /* that a device has for what was enqueued, after a failure or at the end */

hx_comm *hx_comm_new(int rank, int size)
{
    hx_comm *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->yields = HETCCL_WAIT_YIELDS;
    c->rank = rank;
    c->size = size;
    c->check = 1;
    c->peers = calloc((size_t)size, sizeof *c->peers);
    c->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->driver, NULL);
    if (!c->peers || c->kick_fd < 0 || hx_p2p_init(c) != HETCCL_OK) {
        hx_comm_free(c);
        return NULL;
    }
    return c;
}

static void free_work(hx_work *w)
{
    for (int i = 0; i < w->n_events; i++)
        w->comm->dev->event_destroy(w->comm->dev_ctx, w->events[i]);
    for (int i = 0; i < 2; i++)
        if (w->edge[i])
            w->comm->dev->event_destroy(w->comm->dev_ctx, w->edge[i]);
    if (w->p2p_staging)
        w->comm->dev->host_free(w->comm->dev_ctx, w->p2p_staging);
    free(w->done), free(w->flow), free(w);
}

/* After the last work has ended. Waits for the lane thread unless its call was abandoned. */
void hx_comm_free(hx_comm *c)
{
    if (c->hangs)
        return;
    hx_lane_stop(c);
    hx_p2p_free(c);
    for (hx_work *w = c->free_works, *next; w; w = next) {
        next = w->next;
        free_work(w);
    }
    hx_sums_free(c);
    if (c->dev) {
        hx_direct_free(c);
        hx_aside_free(c);
        char *device[] = {c->device_scratch, c->staged_in, c->staged_out};
        for (int i = 0; i < 3; i++)
            if (device[i])
                c->dev->free(c->dev_ctx, device[i]);
        if (c->host_scratch)
            c->dev->host_free(c->dev_ctx, c->host_scratch);
        if (c->drain_event)
            c->dev->event_destroy(c->dev_ctx, c->drain_event);
        if (c->order_event)
            c->dev->event_destroy(c->dev_ctx, c->order_event);
        if (c->stream)
            c->dev->stream_destroy(c->dev_ctx, c->stream);
    }
    if (c->kick_fd >= 0)
        close(c->kick_fd);
    free(c->peers);
    free(c->island_ranks);
    free(c->groups);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->driver);
    free(c);
}

hx_work *hx_work_get(hx_comm *c, const hx_plan *p)
{
    int steps = p ? p->n_steps : 0, flows = p ? p->n_flows : 0;
    pthread_mutex_lock(&c->lock);
    hx_work *w = c->free_works;
    if (w)
        c->free_works = w->next;
    pthread_mutex_unlock(&c->lock);
    if (!w && !(w = calloc(1, sizeof *w)))
        return NULL;
    w->comm = c;
    if (w->step_cap < steps) {
        free(w->done);
        w->done = calloc((size_t)steps, sizeof *w->done);
        w->step_cap = w->done ? steps : 0;
    }
    if (w->flow_cap < flows) {
        free(w->flow);
        w->flow = calloc((size_t)flows, sizeof *w->flow);
        w->flow_cap = w->flow ? flows : 0;
    }
    if (w->step_cap < steps || w->flow_cap < flows) {
        hx_work_put(c, w);
        return NULL;
    }
    w->plan = p;
    w->next = NULL;
    w->bound = 0;
    w->user_in = w->user_out = NULL;
    w->status = HETCCL_IN_PROGRESS;
    w->asynchronous = w->has_caller = w->streamed = w->captured = 0;
    w->stream = c->stream;
    w->source = -1;
    w->factor = 1.0;
    w->owner = NULL;
    w->text[0] = 0;
    atomic_store_explicit(&w->finished, 0, memory_order_relaxed);
    return w;
}

void hx_work_put(hx_comm *c, hx_work *w)
{
    pthread_mutex_lock(&c->lock);
    w->next = c->free_works;
    c->free_works = w;
    pthread_mutex_unlock(&c->lock);
}

static uint32_t mix(uint32_t h, uint64_t v)
{
    for (int i = 0; i < 2; i++, v >>= 32) {
        h = (h ^ (uint32_t)v) * 0x9E3779B1u;
        h ^= h >> 15;
    }
    return h;
}

void hx_number(hx_comm *c, hx_work *w)
{
    const hx_plan *p = w->plan;
    w->sequence = ++c->sequence;
    uint32_t h = mix(w->sequence, (uint64_t)p->op | (uint64_t)p->dtype << 8 | (uint64_t)p->redop << 16 | (uint64_t)(uint32_t)p->root << 32);
    w->fingerprint = mix(mix(h, p->digest), w->count) | 1u;
    if (c->board)
        c->board->entry[c->rank].now = (hx_call){p->op, p->dtype, p->redop, p->root, w->count, w->sequence, w->fingerprint};
}

int hx_submit(hx_comm *c, hx_work *w)
{
    pthread_mutex_lock(&c->lock);
    int failed = (int)atomic_load_explicit(&c->failed, memory_order_acquire);
    if (failed) {
        pthread_mutex_unlock(&c->lock);
        return failed;
    }
    if (w->plan) {
        hx_number(c, w);
        if (c->tail)
            c->tail->next = w;
        else
            c->head = w;
        c->tail = w;
    } else {
        hx_p2p_submit(c, w);
    }
    atomic_fetch_add_explicit(&c->pending, 1, memory_order_release);
    pthread_mutex_unlock(&c->lock);
    return HETCCL_OK;
}

void hx_finish(hx_work *w, int status)
{
    w->status = status;
    w->bound = 2;
}

void hx_publish(hx_work *w)
{
    int asynchronous = w->asynchronous;
    atomic_fetch_sub_explicit(&w->comm->pending, 1, memory_order_release);
    atomic_store_explicit(&w->finished, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&w->waiting, memory_order_seq_cst))   /* works are pooled: the memory stays readable */
        hetccl_futex_wake(&w->finished);
    if (asynchronous)                       /* held by the in-flight table until the completion thread has seen it */
        hx_completed_push(w);
}

void hx_fail(hx_comm *c, int status, const char *text)
{
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&c->failed, &none, (uint32_t)status))
        return;
    snprintf(c->fail_text, sizeof c->fail_text, "%s", text);
    hx_direct_stop(c);
    hx_abort_calls(c);
    /* Ranks of other causes find out by themselves: a loss is on the board, a timeout comes to each with its own text. */
    if (c->board && (status == HETCCL_MISMATCH || status == HETCCL_VENDOR || status == HETCCL_SYSTEM || status == HETCCL_INVALID))
        hx_board_abort(c->board, c->rank);
}

static hx_work *pop(hx_comm *c)
{
    pthread_mutex_lock(&c->lock);
    hx_work *w = c->head;
    if (w && !(c->head = w->next))
        c->tail = NULL;
    pthread_mutex_unlock(&c->lock);
    return w;
}

static hx_work *first(hx_comm *c)
{
    pthread_mutex_lock(&c->lock);
    hx_work *w = c->head;
    pthread_mutex_unlock(&c->lock);
    return w;
}

/* After a failure, or before the end: whether the device has done with what was enqueued, so that memory may be let go, or
 * has had so many ns for it. */
static int drained(hx_comm *c, uint64_t ns)
{
    if (c->host_memory || !c->stream)
        return !c->host_memory || hx_direct_drained(c);
    if (!c->drain_event) {
        c->drain_since = hetccl_now_ns();
        if (c->dev->event_create(c->dev_ctx, &c->drain_event) != HETCCL_OK ||
            c->dev->event_record(c->dev_ctx, c->drain_event, c->stream) != HETCCL_OK)
            return 1;                       /* the device itself has failed: it does nothing any more */
    }
    int busy = hx_sums_busy(c) || c->dev->event_query(c->dev_ctx, c->drain_event) == HETCCL_IN_PROGRESS;
    return (!busy && hx_direct_drained(c)) || hetccl_now_ns() - c->drain_since > ns;
}

int hx_comm_progress(hx_comm *c, int inline_calls)
{
    int moved = 0;
    hx_work *w;
    while (!atomic_load_explicit(&c->failed, memory_order_acquire) && (w = first(c))) {
        int some = hx_work_progress(w, inline_calls);
        moved |= some;
        if (w->bound != 2)
            break;
        pop(c);
        hx_publish(w);
    }
    if (!atomic_load_explicit(&c->failed, memory_order_acquire))
        moved |= hx_streamed_progress(c) | hx_p2p_progress(c);
    if (atomic_load_explicit(&c->failed, memory_order_acquire)) {
        int status = (int)atomic_load_explicit(&c->failed, memory_order_acquire);
        if (!drained(c, DRAIN_NS))
            return 0;
        if (atomic_load_explicit(&c->lane_word, memory_order_acquire) == 1 && !atomic_load(&c->lane_abandoned)) {
            uint64_t now = hetccl_now_ns();
            c->lane_since = c->lane_since ? c->lane_since : now;
            /* An aborted call will return, and so will one that all ranks of the island have begun, unless one has died.
             * Until then it may use the works' memory. */
            uint64_t patience = status == HETCCL_ABORTED ? 15 : c->ccl->caps & HETCCL_CCL_ABORT ? 5 : 2;
            if (now - c->lane_since < patience * 1000000000u)
                return 0;
            atomic_store(&c->lane_abandoned, 1);
        }
        while ((w = pop(c))) {
            hx_finish(w, status);
            hx_publish(w);
        }
        hx_streamed_fail(c, status);
        hx_p2p_fail_all(c, status);
        return 1;
    }
    c->moves += (uint64_t)moved;
    return moved;
}

/* The ranks that the work at the head, or a point-to-point work, waits for. */
static void awaited_ranks(hx_comm *c, int32_t *ranks, int32_t *n, int32_t max)
{
    const char *phase;
    int32_t peer;
    hx_work *w = first(c);
    if (w)
        hx_work_waiting(w, ranks, n, max - 1, &phase);
    hx_p2p_deadline(c, &peer);
    if (peer >= 0 && *n < max)
        ranks[(*n)++] = peer;
}

/* Whether the control plane has said of a rank that it has left, or is lost. */
static int has_state(const hx_comm *c, int rank, uint32_t state)
{
    return c->board && atomic_load(&c->board->generation) &&
           atomic_load_explicit(&c->board->entry[rank].state, memory_order_relaxed) == state;
}

/* Who keeps us from going on: ranks known to be dead, else ranks that left or whose link broke a while ago. */
static int someone_is_gone(hx_comm *c, uint64_t now, uint64_t idle)
{
    int32_t awaited[64], n_awaited = 0;
    int n = 0, suspects = 0;
    if (idle < HX_GRACE_NS)
        return 0;
    for (int r = 0; r < c->size && n < 8; r++)
        if (has_state(c, r, HX_LOST))
            c->fail_ranks[n++] = r;
    for (int r = 0; !n && r < c->size; r++)
        suspects |= has_state(c, r, HX_LEFT) || c->peers[r].broken;
    if (suspects)                           /* only then: looking for what has come takes it from a sleeper's signals */
        awaited_ranks(c, awaited, &n_awaited, 64);
    for (int r = 0; suspects && r < c->size; r++) {
        int wanted = 0;
        for (int i = 0; i < n_awaited; i++)
            wanted |= awaited[i] == r;
        if (!wanted || (!has_state(c, r, HX_LEFT) && !c->peers[r].broken)) {
            c->peers[r].trouble_ns = 0;     /* a rank may leave when it has done its part */
            continue;
        }
        if (!c->peers[r].trouble_ns)
            c->peers[r].trouble_ns = now;
        if (now - c->peers[r].trouble_ns > HX_FAREWELL_NS && n < 8)
            c->fail_ranks[n++] = r;
    }
    c->n_fail_ranks = n;
    return n;
}

/* Takes out what the device has ended, or ends at once: an idle engine looks for that twice a second only, and a failure
 * would abort the vendor's communicator. */
static void reap_streamed(hx_comm *c)
{
    uint64_t until = hetccl_now_ns() + 20000000u;
    while (atomic_load(&c->n_streamed) && !atomic_load(&c->failed) && hetccl_now_ns() < until) {
        if (pthread_mutex_trylock(&c->driver) == 0) {
            hx_streamed_progress(c);
            pthread_mutex_unlock(&c->driver);
        }
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
}

/* After hx_engine_remove: ends what is in flight and blocks until nobody is inside this communicator, at most ns, and then until
 * its device has done, for letting go of what that uses would wait for it without a limit. */
int hx_comm_quiesce(hx_comm *c, uint64_t ns)
{
    uint64_t until = hetccl_now_ns() + ns, drains = 0;
    reap_streamed(c);
    if (atomic_load(&c->pending))
        hx_fail(c, HETCCL_ABORTED, "it was closed");
    for (int quiet = 0;; nanosleep(&(struct timespec){0, 200000}, NULL)) {
        hx_kick(c);
        if (pthread_mutex_trylock(&c->driver) == 0) {
            if (atomic_load(&c->pending))
                hx_comm_progress(c, 0);
            quiet = !atomic_load(&c->pending) && (atomic_load(&c->lane_word) != 1 || atomic_load(&c->lane_abandoned));
            if (quiet && c->dev) {
                if (!drains) {
                    drains = hetccl_now_ns();
                    until = until > drains + DRAIN_NS ? until : drains + DRAIN_NS;
                    if (!c->host_memory)
                        c->dev->bind_thread(c->dev_ctx);
                    hx_direct_stop(c);
                }
                quiet = drained(c, UINT64_MAX);
            }
            pthread_mutex_unlock(&c->driver);
        }
        if (quiet)
            hx_direct_close(c);             /* before the transports unmap what is registered */
        if (quiet || hetccl_now_ns() >= until) {
            c->hangs = !quiet;
            return quiet ? HETCCL_OK : HETCCL_TIMED_OUT;
        }
    }
}

/* Losses, aborts and deadlines. Called when a waiter has nothing left but to sleep. */
void hx_comm_check(hx_comm *c)
{
    if (atomic_load_explicit(&c->failed, memory_order_acquire))
        return;                             /* it may be closed already: its links are not touched any more */
    uint64_t now = hetccl_now_ns();
    char text[HX_TEXT];
    if (c->moves != c->moves_seen || !c->progress_ns) {
        c->moves_seen = c->moves;
        c->progress_ns = now;
    }
    uint64_t idle = now - c->progress_ns;
    if (now - c->looked_ns > 500000000u) {  /* lets a transport find out that a host has vanished */
        c->looked_ns = now;
        for (int r = 0; r < c->size; r++)
            if (c->peers[r].ops)
                c->peers[r].ops->progress(c->peers[r].ctx, c->peers[r].ep);
    }
    if (c->board && atomic_load_explicit(&c->board->generation, memory_order_acquire)) {
        uint32_t by = atomic_load_explicit(&c->board->aborted_by, memory_order_relaxed);
        if (by) {
            c->fail_ranks[0] = (int)by - 1;
            c->n_fail_ranks = 1;
            hx_fail(c, HETCCL_ABORTED, "");
            return;
        }
    }
    if (someone_is_gone(c, now, idle)) {
        hx_fail(c, HETCCL_PEER_LOST, "");
        return;
    }
    if (c->island_aborted && !c->aborted_ns)
        c->aborted_ns = now;
    if (atomic_load_explicit(&c->aborted, memory_order_relaxed) ||
        (c->island_aborted && now - c->aborted_ns > HX_FAREWELL_NS)) {
        hx_fail(c, HETCCL_ABORTED, c->island_aborted ? "a rank of this island aborted the vendor's call" : "");
        return;
    }
    hx_work *w = hx_streamed_first(c);
    if (w && now >= w->deadline_ns) {
        c->n_fail_ranks = 0;
        for (int i = 0; i < c->n_island_local && c->n_fail_ranks < 8; i++)
            if (c->island_ranks[i] != c->rank)
                c->fail_ranks[c->n_fail_ranks++] = c->island_ranks[i];
        hx_fail(c, HETCCL_TIMED_OUT, "island");
        return;
    }
    w = first(c);
    if (w && now >= w->deadline_ns) {
        const char *phase;
        hx_work_waiting(w, c->fail_ranks, &c->n_fail_ranks, 8, &phase);
        snprintf(text, sizeof text, "%s", phase);
        hx_fail(c, HETCCL_TIMED_OUT, text);
        return;
    }
    int32_t peer;
    uint64_t deadline = hx_p2p_deadline(c, &peer);
    if (now >= deadline) {
        c->fail_ranks[0] = peer;
        c->n_fail_ranks = peer >= 0;
        hx_fail(c, HETCCL_TIMED_OUT, "point-to-point");
    }
}
