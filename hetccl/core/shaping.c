/* SPDX-License-Identifier: Apache-2.0
 * See shaping.h. A message starts when the link is free and takes it for its bytes over the rate; what a late waker lost
 * while something waited, up to SLACK_NS, is made good, so that the mean rate holds.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "shaping.h"

#include <string.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "wait.h"

#define SLACK_NS 50000000u

static int is_free(hx_shaped *s, struct hx_way *way)
{
    uint64_t at = atomic_load_explicit(&way->free_ns, memory_order_relaxed);
    if (at <= hetccl_now_ns())
        return 1;
    atomic_store_explicit(&way->wanted, 1, memory_order_relaxed);
    if (!s->wake_ns || at < s->wake_ns)
        s->wake_ns = at;
    return 0;
}

static void charge(hx_shaped *s, struct hx_way *way, size_t nbytes)
{
    uint64_t lasts = (uint64_t)((double)nbytes * 1e9 / (double)s->rate->bytes_s), earliest = hetccl_now_ns(), end;
    if (atomic_exchange_explicit(&way->wanted, 0, memory_order_relaxed))
        earliest -= SLACK_NS;
    uint64_t before = atomic_load_explicit(&way->free_ns, memory_order_relaxed);
    do {
        end = (before > earliest ? before : earliest) + lasts;
    } while (!atomic_compare_exchange_weak_explicit(&way->free_ns, &before, end, memory_order_relaxed, memory_order_relaxed));
}

/* The link was free, and nothing went: it is not what was waited for. */
static int settled(struct hx_way *way, int rc)
{
    if (rc == HETCCL_IN_PROGRESS)
        atomic_store_explicit(&way->wanted, 0, memory_order_relaxed);
    return rc;
}

static const char *shaped_last_error(void *ctx)
{
    hx_shaped *s = ctx;
    return s->inner->last_error(s->ctx);
}

static int shaped_send(void *ctx, void *ep, hetccl_message *m)
{
    hx_shaped *s = ctx;
    if (!is_free(s, &s->rate->out))
        return HETCCL_IN_PROGRESS;
    int rc = s->inner->send(s->ctx, ep, m);
    if (rc == HETCCL_OK)
        charge(s, &s->rate->out, m->nbytes);
    return settled(&s->rate->out, rc);
}

static int shaped_recv(void *ctx, void *ep, hetccl_message *m)
{
    hx_shaped *s = ctx;
    if (!is_free(s, &s->rate->in))
        return HETCCL_IN_PROGRESS;
    int rc = s->inner->recv(s->ctx, ep, m);
    if (rc == HETCCL_OK)
        charge(s, &s->rate->in, m->nbytes);
    return settled(&s->rate->in, rc);
}

static int shaped_reserve(void *ctx, void *ep, hetccl_message *m)
{
    hx_shaped *s = ctx;
    return is_free(s, &s->rate->out) ? s->inner->reserve(s->ctx, ep, m) : HETCCL_IN_PROGRESS;
}

static int shaped_commit(void *ctx, void *ep, hetccl_message *m)
{
    hx_shaped *s = ctx;
    int rc = s->inner->commit(s->ctx, ep, m);
    if (rc == HETCCL_OK)
        charge(s, &s->rate->out, m->nbytes);
    return rc;
}

static int shaped_peek(void *ctx, void *ep, hetccl_message *m, uint32_t index)
{
    hx_shaped *s = ctx;
    return is_free(s, &s->rate->in) ? settled(&s->rate->in, s->inner->peek(s->ctx, ep, m, index)) : HETCCL_IN_PROGRESS;
}

/* What is released has come in; its length is only known before. */
static int shaped_release(void *ctx, void *ep, int32_t channel)
{
    hx_shaped *s = ctx;
    hetccl_message m = {.size = sizeof m, .channel = channel};
    size_t nbytes = s->inner->peek(s->ctx, ep, &m, 0) == HETCCL_OK ? m.nbytes : 0;
    int rc = s->inner->release(s->ctx, ep, channel);
    if (rc == HETCCL_OK)
        charge(s, &s->rate->in, nbytes);
    return rc;
}

static int shaped_answer(void *ctx, void *ep, hetccl_message *m)
{
    hx_shaped *s = ctx;
    if (!is_free(s, &s->rate->out))
        return HETCCL_IN_PROGRESS;
    hetccl_message in = {.size = sizeof in, .channel = HETCCL_CHANNEL_CONTRIBUTE};
    size_t nbytes = s->inner->peek(s->ctx, ep, &in, 0) == HETCCL_OK ? in.nbytes : 0;
    int rc = s->inner->answer(s->ctx, ep, m);
    if (rc == HETCCL_OK) {
        charge(s, &s->rate->out, m->nbytes);
        charge(s, &s->rate->in, nbytes);
    }
    return rc;
}

static int shaped_progress(void *ctx, void *ep)
{
    hx_shaped *s = ctx;
    return s->inner->progress(s->ctx, ep);
}

static int shaped_wait_fds(void *ctx, int *fds, uint32_t max, uint32_t *n)
{
    hx_shaped *s = ctx;
    int rc = s->inner->wait_fds(s->ctx, fds, max, n);
    if (rc == HETCCL_OK && *n < max)
        fds[(*n)++] = s->timer;
    return rc;
}

static int shaped_arm(void *ctx)
{
    hx_shaped *s = ctx;
    if (s->wake_ns && s->wake_ns <= hetccl_now_ns())
        return HETCCL_IN_PROGRESS;
    struct itimerspec t = {.it_value = {(time_t)(s->wake_ns / 1000000000u), (long)(s->wake_ns % 1000000000u)}};
    timerfd_settime(s->timer, TFD_TIMER_ABSTIME, &t, NULL);     /* 0: no alarm */
    return s->inner->arm(s->ctx);
}

static int shaped_disarm(void *ctx)
{
    hx_shaped *s = ctx;
    uint64_t alarms;
    s->wake_ns = 0;                            /* who is still refused says so again */
    if (read(s->timer, &alarms, sizeof alarms) < 0)
        alarms = 0;                            /* it has not gone off */
    return s->inner->disarm(s->ctx);
}

static int shaped_counters(void *ctx, void *ep, hetccl_transport_counters *out)
{
    hx_shaped *s = ctx;
    return s->inner->counters(s->ctx, ep, out);
}

static int shaped_ep_error(void *ctx, void *ep)
{
    hx_shaped *s = ctx;
    return s->inner->ep_error(s->ctx, ep);
}

static int shaped_ep_close(void *ctx, void *ep)
{
    hx_shaped *s = ctx;
    return s->inner->ep_close(s->ctx, ep);
}

int hx_shape(hx_shaped *s, const hetccl_transport_ops *inner, void *ctx, hx_rate *rate)
{
    memset(s, 0, sizeof *s);
    s->inner = inner;
    s->ctx = ctx;
    s->rate = rate;
    s->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    s->ops = (hetccl_transport_ops){
        .version = HETCCL_SPI_VERSION, .size = sizeof(hetccl_transport_ops),
        .caps = inner->caps & ~(uint64_t)(HETCCL_TRANSPORT_ONE_SIDED | HETCCL_TRANSPORT_WINDOW | HETCCL_TRANSPORT_PUT), .max_message = inner->max_message,
        .last_error = shaped_last_error, .send = shaped_send, .recv = shaped_recv, .reserve = shaped_reserve,
        .commit = shaped_commit, .peek = shaped_peek, .release = shaped_release, .progress = shaped_progress,
        .wait_fds = shaped_wait_fds, .arm = shaped_arm, .disarm = shaped_disarm, .counters = shaped_counters,
        .ep_error = shaped_ep_error, .ep_close = shaped_ep_close, .answer = shaped_answer,
    };
    return s->timer < 0 ? HETCCL_SYSTEM : HETCCL_OK;
}

void hx_unshape(hx_shaped *s)
{
    if (s->timer >= 0)
        close(s->timer);
    s->timer = -1;
}
