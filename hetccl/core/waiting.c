/* SPDX-License-Identifier: Apache-2.0
 * Waiting: how to sleep until something happens, and how to wake who sleeps. Driving a work to its end is waiting,
 * too: looks at once after something has moved, then yields, then sleep (docs/design/waiting.md).
 */
#include "direct.h"
#include <poll.h>

void hx_kick(hx_comm *c)
{
    uint64_t one = 1;
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&c->sleeping, memory_order_relaxed) && write(c->kick_fd, &one, sizeof one) < 0)
        return;                             /* the counter is full: the sleeper is awake anyway */
}

/* Sleeps until a transport, the lane thread or another thread has something, at most ns. */
int hx_comm_sleep(hx_comm *c, uint64_t ns)
{
    struct pollfd q[HX_POLL];
    uint32_t n = 1;
    int awake = 0;
    q[0] = (struct pollfd){c->kick_fd, POLLIN, 0};
    atomic_store_explicit(&c->sleeping, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);  /* no load below comes before */
    if (atomic_load_explicit(&c->lane_word, memory_order_acquire) == 2)
        awake = 1;
    for (int i = 0; i < c->n_transports; i++) {
        int fds[HX_POLL];
        uint32_t some = 0;
        awake |= c->transports[i].ops->arm(c->transports[i].ctx) == HETCCL_IN_PROGRESS;
        c->transports[i].ops->wait_fds(c->transports[i].ctx, fds, HX_POLL, &some);
        for (uint32_t k = 0; k < some && n < HX_POLL; k++)
            q[n++] = (struct pollfd){fds[k] & ~HETCCL_WAIT_WRITABLE, fds[k] & HETCCL_WAIT_WRITABLE ? POLLOUT : POLLIN, 0};
    }
    if (!awake) {
        struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
        ppoll(q, n, &t, NULL);
    }
    for (int i = 0; i < c->n_transports; i++)
        c->transports[i].ops->disarm(c->transports[i].ctx);
    atomic_store_explicit(&c->sleeping, 0, memory_order_seq_cst);
    uint64_t kicks;
    if (q[0].revents && read(c->kick_fd, &kicks, sizeof kicks) < 0)
        awake = 1;
    return awake;
}

static int final(hx_work *w) { return atomic_load_explicit(&w->finished, memory_order_acquire) != 0; }

#define HX_LONG_NS 150000u          /* a wait that one should have slept through */
#define HX_LEAST_YIELDS 32u
#define HX_LOOK_NS 30000u           /* between two looks at what has no descriptor to sleep on ... */
#define HX_MOST_LOOK_NS 1000000u    /* ... or at most, while it is not what holds a work up */

/* Whether a work waits for its peers' messages, which wake a sleeper, and for nothing else that does not. */
static int awaits_messages(const hx_comm *c, const hx_work *w)
{
    return w->plan && !w->streamed && !w->plan->device_sums && !hx_goes_direct(c) && w->lane[HX_LANE_BORDER].running &&
           atomic_load_explicit(&c->pending, memory_order_acquire) == 1 &&
           !atomic_load_explicit(&c->failed, memory_order_relaxed);
}

/* How long to sleep at most. Streams of a device and windows have no descriptor. While messages come in, a device that is
 * at work beside them is looked at the rarer the longer nothing has come of it. */
static uint64_t nap(const hx_comm *c, const hx_work *w, uint64_t now, uint64_t until)
{
    uint64_t look = HX_LOOK_NS, rest = until - now;
    if (c->host_memory && !hx_goes_direct(c))
        return rest;
    if (awaits_messages(c, w)) {
        look = w->event_head < w->event_tail ? (now - c->news_ns) / 16 : HX_MOST_LOOK_NS;
        look = look < HX_LOOK_NS ? HX_LOOK_NS : look > HX_MOST_LOOK_NS ? HX_MOST_LOOK_NS : look;
    }
    return look < rest ? look : rest;
}

/* The next wait will be about as long as this one: after a long one the driver gives up its core sooner. */
static void learn(hx_comm *c, uint64_t began)
{
    if (hetccl_now_ns() - began <= HX_LONG_NS)
        c->yields = HETCCL_WAIT_YIELDS;
    else if (c->yields > HX_LEAST_YIELDS)
        c->yields /= 2;
}

/* Whether this rank's part ends with messages while ranks share cores. Those on this core may then have all they wait for,
 * and others wait for them, so they shall end the operation before this rank's program goes on. */
static int should_let_pass(const hx_comm *c, const hx_plan *p)
{
    return !c->pauses && p && p->n_steps && p->steps[p->n_steps - 1].kind == HX_FLOWS;
}

/* Returns whether the caller should give way once the work has ended: its plan may be gone by then. */
static int drive_locked(hx_comm *c, hx_work *w, uint64_t until)
{
    uint32_t turn = 0, pauses = (uint32_t)c->pauses;
    int lets_pass = !final(w) && should_let_pass(c, w->plan);
    uint64_t began = 0;                     /* of a wait that is no longer short */
    int32_t seen = w->event_head;
    c->news_ns = 0;
    while (!final(w)) {
        if (hx_comm_progress(c, 1)) {
            if (began)
                learn(c, began);
            turn = 0;
            began = 0;
            continue;
        }
        if (turn++ < pauses) {
            hetccl_pause();
            continue;
        }
        if (turn >= pauses + HX_LEAST_YIELDS && !began)
            began = hetccl_now_ns();
        if (turn < pauses + c->yields) {
            sched_yield();
            continue;
        }
        hx_comm_check(c);
        if (atomic_load_explicit(&c->failed, memory_order_relaxed))
            continue;
        uint64_t now = hetccl_now_ns();
        if (now >= until)
            return lets_pass;
        if (!c->news_ns || seen != w->event_head) {
            c->news_ns = now;
            seen = w->event_head;
        }
        uint64_t most = nap(c, w, now, until);
        hx_comm_sleep(c, most);
        turn = pauses + c->yields - (most > HX_MOST_LOOK_NS ? c->yields / 2 : 1);
    }
    return lets_pass;
}

/* Moves a work to its end, or for slice_ns. */
int hx_drive(hx_comm *c, hx_work *w, uint64_t slice_ns)
{
    uint64_t until = 0;
    int lets_pass = 0;
    while (!final(w)) {
        if (pthread_mutex_trylock(&c->driver) == 0) {
            if (!until)
                until = hetccl_now_ns() + slice_ns;
            lets_pass |= drive_locked(c, w, until);
            pthread_mutex_unlock(&c->driver);
            if (atomic_load_explicit(&c->pending, memory_order_acquire))
                hx_engine_kick();
        } else {                            /* somebody else drives: sleep until it has finished our work */
            if (!until)
                until = hetccl_now_ns() + slice_ns;
            atomic_fetch_add_explicit(&w->waiting, 1, memory_order_seq_cst);
            hetccl_futex_wait(&w->finished, 0, 1000000u);
            atomic_fetch_sub_explicit(&w->waiting, 1, memory_order_seq_cst);
        }
        if (!final(w) && hetccl_now_ns() >= until)
            return HETCCL_IN_PROGRESS;
    }
    if (lets_pass)
        sched_yield();
    return w->status;
}
