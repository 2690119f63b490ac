/* SPDX-License-Identifier: Apache-2.0
 * The table of functions, the list of endpoints, and the signs by which a vanished host is known.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "window.h"

#include <errno.h>
#include <netinet/in.h>
#include <linux/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* TCP_USER_TIMEOUT is not used: it also ends a healthy connection whose receiver is merely busy (zero window). */
#define LOOK_EVERY_NS 1000000000u
#define SILENT_MS 10000u           /* nothing at all has come back for so long, and */
#define SILENT_TRIES 6            /* so many retransmissions, or window probes, in a row were not answered: 12 s at least */

static hetccl_tcp_channel *channel_of(void *ctx, void *ep, int32_t channel);
static int no_channel(void *ctx, void *ep, int32_t channel);
static int look(hetccl_tcp_ep *ep);
static void close_ep(hetccl_tcp_ep *ep);
static hetccl_tcp_text *own_text(hetccl_tcp *tcp);

/* ------------------------------------------------------------------------------------------------- the table */

static int op_send(void *ctx, void *ep, hetccl_message *m)
{
    hetccl_tcp_channel *c = channel_of(ctx, ep, m->channel);
    return c ? hetccl_tcp_channel_send(c, m) : no_channel(ctx, ep, m->channel);
}

static int op_recv(void *ctx, void *ep, hetccl_message *m)
{
    hetccl_tcp_channel *c = channel_of(ctx, ep, m->channel);
    return c ? hetccl_tcp_channel_recv(c, m) : no_channel(ctx, ep, m->channel);
}

static int op_reserve(void *ctx, void *ep, hetccl_message *m)
{
    hetccl_tcp_channel *c = channel_of(ctx, ep, m->channel);
    return c ? hetccl_tcp_channel_reserve(c, m) : no_channel(ctx, ep, m->channel);
}

static int op_commit(void *ctx, void *ep, hetccl_message *m)
{
    hetccl_tcp_channel *c = channel_of(ctx, ep, m->channel);
    return c ? hetccl_tcp_channel_commit(c, m) : no_channel(ctx, ep, m->channel);
}

static int op_peek(void *ctx, void *ep, hetccl_message *m, uint32_t index)
{
    hetccl_tcp_channel *c = channel_of(ctx, ep, m->channel);
    return c ? hetccl_tcp_channel_peek(c, m, index) : no_channel(ctx, ep, m->channel);
}

static int op_release(void *ctx, void *ep, int32_t channel)
{
    hetccl_tcp_channel *c = channel_of(ctx, ep, channel);
    return c ? hetccl_tcp_channel_release(c) : no_channel(ctx, ep, channel);
}

static int op_progress(void *ctx, void *ep)
{
    hetccl_tcp_ep *e = ep;
    if (e->closed)
        return no_channel(ctx, ep, 0);
    for (int i = 0; i < HETCCL_CHANNELS; i++) {
        hetccl_tcp_channel *c = &e->channel[i];
        if (hetccl_tcp_channel_unsent(c)) {
            c->tx_blocked = 0;               /* a send that has not begun asks again itself */
            int rc = hetccl_tcp_channel_flush(c);
            if (rc > HETCCL_IN_PROGRESS)
                return rc;
        }
    }
    if (e->window && e->window->memory) {
        int rc = hetccl_tcp_window_test(e->window);
        if (rc > HETCCL_IN_PROGRESS)
            return rc;
    }
    return look(e);
}

/* Notes a descriptor to wait for, if there is room; counts it anyway. */
static void want(int *fds, uint32_t max, uint32_t *wanted, int fd)
{
    if (*wanted < max)
        fds[*wanted] = fd;
    ++*wanted;
}

static int op_wait_fds(void *ctx, int *fds, uint32_t max, uint32_t *n)
{
    hetccl_tcp *tcp = ctx;
    uint32_t wanted = 0;
    pthread_mutex_lock(&tcp->lock);
    for (hetccl_tcp_ep *ep = tcp->eps; ep; ep = ep->next) {
        for (int i = 0; i < HETCCL_CHANNELS && !ep->closed; i++) {
            const hetccl_tcp_channel *c = &ep->channel[i];
            if (!c->rx_status)               /* a lost one would be readable for ever */
                want(fds, max, &wanted, c->fd);
            if (hetccl_tcp_channel_unsent(c))
                want(fds, max, &wanted, c->fd | HETCCL_WAIT_WRITABLE);
        }
        const hetccl_tcp_window *w = ep->closed ? NULL : ep->window;
        if (!w || !w->memory || atomic_load_explicit(&w->status, memory_order_relaxed))
            continue;
        want(fds, max, &wanted, w->words_fd);
        if (hetccl_tcp_window_unsent(w))
            want(fds, max, &wanted, w->words_fd | HETCCL_WAIT_WRITABLE);
    }
    pthread_mutex_unlock(&tcp->lock);
    *n = wanted < max ? wanted : max;
    if (wanted > max)
        return hetccl_tcp_fail(tcp, HETCCL_INVALID, "there are %u descriptors to wait for, room was given for %u", wanted, max);
    return HETCCL_OK;
}

/* The descriptors are level-triggered: nothing can slip between the last call and poll. */
static int op_arm(void *ctx) { return HETCCL_OK; }

static int op_disarm(void *ctx) { return HETCCL_OK; }

static int op_counters(void *ctx, void *ep, hetccl_transport_counters *out)
{
    hetccl_transport_counters mine = ((hetccl_tcp_ep *)ep)->counters;
    const hetccl_tcp_window *w = ((hetccl_tcp_ep *)ep)->window;
    for (int i = 0; w && i < w->n_bulk; i++) {
        mine.put_threads += w->started != 0;
        mine.put_send_ns += w->bulk[i].send_ns;
        mine.put_receive_ns += w->bulk[i].recv_ns;
        mine.put_idle_ns += w->bulk[i].idle_ns;
    }
    mine.size = out->size < sizeof mine ? out->size : (uint32_t)sizeof mine;
    memcpy(out, &mine, mine.size);
    return HETCCL_OK;
}

static int op_ep_error(void *ctx, void *ep)
{
    hetccl_tcp_ep *e = ep;
    if (e->closed)
        return no_channel(ctx, ep, 0);
    for (int i = 0; i < HETCCL_CHANNELS; i++) {
        int status = e->channel[i].rx_status ? e->channel[i].rx_status : e->channel[i].tx_status;
        if (status)
            return hetccl_tcp_fail(ctx, status, "the connection to rank %d was lost", e->peer);
    }
    if (e->window && atomic_load_explicit(&e->window->status, memory_order_acquire))
        return hetccl_tcp_window_test(e->window);
    struct pollfd fds[HETCCL_CHANNELS];
    for (int i = 0; i < HETCCL_CHANNELS; i++)
        fds[i] = (struct pollfd){e->channel[i].fd, POLLRDHUP, 0};
    if (poll(fds, HETCCL_CHANNELS, 0) > 0) {
        for (int i = 0; i < HETCCL_CHANNELS; i++) {
            char byte;
            errno = 0;
            /* Unread data is still good: the loss is told when it has been taken. */
            if (fds[i].revents && recv(fds[i].fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) <= 0 && errno != EAGAIN) {
                hetccl_tcp_channel_lost(&e->channel[i], HETCCL_PEER_LOST);
                return hetccl_tcp_fail(ctx, HETCCL_PEER_LOST, "rank %d has closed the connection", e->peer);
            }
        }
    }
    return look(e);
}

static int no_window(void *ctx, const hetccl_tcp_ep *ep)
{
    return hetccl_tcp_fail(ctx, HETCCL_UNSUPPORTED, "the link to rank %d was made without sockets for a window", ep->peer);
}

static int op_window(void *ctx, void *ep, hetccl_window_args *args)
{
    hetccl_tcp_ep *e = ep;
    if (e->closed)
        return no_channel(ctx, ep, 0);
    return e->window ? hetccl_tcp_window_map(e->window, args) : no_window(ctx, e);
}

static int op_window_put(void *ctx, void *ep, const hetccl_window_put *put)
{
    hetccl_tcp_ep *e = ep;
    if (e->closed)
        return no_channel(ctx, ep, 0);
    return e->window ? hetccl_tcp_window_put(e->window, put) : no_window(ctx, e);
}

static int op_window_test(void *ctx, void *ep)
{
    hetccl_tcp_ep *e = ep;
    if (e->closed)
        return no_channel(ctx, ep, 0);
    return e->window ? hetccl_tcp_window_test(e->window) : no_window(ctx, e);
}

static int op_ep_close(void *ctx, void *ep)
{
    hetccl_tcp *tcp = ctx;
    pthread_mutex_lock(&tcp->lock);
    close_ep(ep);
    pthread_mutex_unlock(&tcp->lock);
    return HETCCL_OK;
}

static const char *op_last_error(void *ctx)
{
    hetccl_tcp *tcp = ctx;
    pthread_mutex_lock(&tcp->lock);
    hetccl_tcp_text *mine = own_text(tcp);
    pthread_mutex_unlock(&tcp->lock);
    return mine ? mine->text : "";
}

/* ----------------------------------------------------------------------------------------------------- life */

hetccl_tcp *hetccl_tcp_new(size_t max_message, uint32_t most_part)
{
    hetccl_tcp *tcp = calloc(1, sizeof *tcp);
    if (tcp == NULL)
        return NULL;
    pthread_mutex_init(&tcp->lock, NULL);
    tcp->most_part = most_part;
    tcp->ops = (hetccl_transport_ops){
        .version = HETCCL_SPI_VERSION, .size = sizeof tcp->ops, .caps = HETCCL_TRANSPORT_HOST_MEMORY | HETCCL_TRANSPORT_WINDOW | HETCCL_TRANSPORT_PUT, .max_message = max_message,
        .last_error = op_last_error, .send = op_send, .recv = op_recv, .reserve = op_reserve, .commit = op_commit,
        .peek = op_peek, .release = op_release, .progress = op_progress, .wait_fds = op_wait_fds, .arm = op_arm,
        .disarm = op_disarm, .counters = op_counters, .ep_error = op_ep_error, .ep_close = op_ep_close,
        .window = op_window, .window_put = op_window_put, .window_test = op_window_test};
    tcp->table = (hetccl_table){&tcp->ops, tcp};
    return tcp;
}

void hetccl_tcp_free(hetccl_tcp *tcp)
{
    hetccl_tcp_close_all(tcp);
    while (tcp->eps) {
        hetccl_tcp_ep *next = tcp->eps->next;
        free(tcp->eps);
        tcp->eps = next;
    }
    pthread_mutex_destroy(&tcp->lock);
    free(tcp);
}

hetccl_tcp_ep *hetccl_tcp_open(hetccl_tcp *tcp, int peer, const int *fds, int n_fds, int side)
{
    hetccl_tcp_ep *ep = calloc(1, sizeof *ep);
    if (ep == NULL)
        return NULL;
    ep->tcp = tcp;
    ep->peer = peer;
    for (int i = 0; i < HETCCL_CHANNELS; i++) {
        hetccl_tcp_channel *c = &ep->channel[i];
        c->ep = ep;
        c->index = i;
        c->fd = fds[i];
        c->stage_size = HETCCL_TCP_HEADER + (tcp->ops.max_message > HETCCL_TCP_GULP ? tcp->ops.max_message : HETCCL_TCP_GULP);
        c->stage = malloc(c->stage_size);    /* touched only as far as bytes are read ahead */
        if (c->stage == NULL) {
            for (int k = 0; k < i; k++)
                free(ep->channel[k].stage);
            free(ep);
            return NULL;
        }
    }
    if (n_fds > HETCCL_CHANNELS + 1) {
        ep->window = hetccl_tcp_window_new(ep, fds + HETCCL_CHANNELS, (n_fds - HETCCL_CHANNELS - 1) / 2, side);
        if (ep->window == NULL) {
            for (int i = 0; i < HETCCL_CHANNELS; i++)
                free(ep->channel[i].stage);
            free(ep);
            return NULL;
        }
    }
    pthread_mutex_lock(&tcp->lock);
    ep->next = tcp->eps;
    tcp->eps = ep;
    pthread_mutex_unlock(&tcp->lock);
    return ep;
}

void hetccl_tcp_close_all(hetccl_tcp *tcp)
{
    pthread_mutex_lock(&tcp->lock);
    for (hetccl_tcp_ep *ep = tcp->eps; ep; ep = ep->next) {
        close_ep(ep);
        if (ep->window)
            hetccl_tcp_window_free(ep->window);
        ep->window = NULL;
    }
    pthread_mutex_unlock(&tcp->lock);
}

int hetccl_tcp_fail(hetccl_tcp *tcp, int status, const char *format, ...)
{
    char text[HETCCL_TCP_TEXT];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    pthread_mutex_lock(&tcp->lock);
    hetccl_tcp_text *mine = own_text(tcp);
    if (mine == NULL) {                      /* the oldest entry goes */
        mine = &tcp->text[tcp->next_text++ % (sizeof tcp->text / sizeof *tcp->text)];
        mine->thread = pthread_self();
        mine->used = 1;
    }
    memcpy(mine->text, text, sizeof text);
    pthread_mutex_unlock(&tcp->lock);
    return status;
}

/* --------------------------------------------------------------------------------------------------- helpers */

static hetccl_tcp_channel *channel_of(void *ctx, void *ep, int32_t channel)
{
    hetccl_tcp_ep *e = ep;
    return e->closed || (uint32_t)channel >= HETCCL_CHANNELS ? NULL : &e->channel[channel];
}

static int no_channel(void *ctx, void *ep, int32_t channel)
{
    if (((hetccl_tcp_ep *)ep)->closed)
        return hetccl_tcp_fail(ctx, HETCCL_ABORTED, "the endpoint to rank %d is closed on this side", ((hetccl_tcp_ep *)ep)->peer);
    return hetccl_tcp_fail(ctx, HETCCL_INVALID, "channel %d does not exist, there are %d", channel, HETCCL_CHANNELS);
}

/* Once a second: is the peer's host still answering? A host that is cut off closes nothing; without this the kernel would
 * send again for a quarter of an hour. An idle connection is watched by keep-alive. */
static int look(hetccl_tcp_ep *ep)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t now = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    if (now - ep->looked_ns < LOOK_EVERY_NS)
        return HETCCL_OK;
    ep->looked_ns = now;
    int fds[HETCCL_CHANNELS + 1 + 2 * HETCCL_TCP_MOST_BULK], n = 0;
    for (; n < HETCCL_CHANNELS; n++)
        fds[n] = ep->channel[n].fd;
    if (ep->window)
        fds[n++] = ep->window->words_fd;
    for (int i = 0; ep->window && i < ep->window->n_bulk; i++) {
        fds[n++] = ep->window->bulk[i].out_fd;
        fds[n++] = ep->window->bulk[i].in_fd;
    }
    for (int i = 0; i < n; i++) {
        struct tcp_info info = {0};
        socklen_t size = sizeof info;
        if (getsockopt(fds[i], IPPROTO_TCP, TCP_INFO, &info, &size) != 0)
            continue;
        int tries = info.tcpi_retransmits > info.tcpi_probes ? info.tcpi_retransmits : info.tcpi_probes;
        if (tries >= SILENT_TRIES && info.tcpi_last_ack_recv > SILENT_MS) {
            for (int k = 0; k < HETCCL_CHANNELS; k++)
                hetccl_tcp_channel_lost(&ep->channel[k], HETCCL_PEER_LOST);
            return hetccl_tcp_fail(ep->tcp, HETCCL_PEER_LOST, "the host of rank %d has not answered for %u ms", ep->peer, info.tcpi_last_ack_recv);
        }
    }
    return HETCCL_OK;
}

/* Closes without shutdown(), so that a forked child that closes its copies leaves the parent's connection alone. */
static void close_ep(hetccl_tcp_ep *ep)
{
    if (ep->closed)
        return;
    ep->closed = 1;
    if (ep->window)
        hetccl_tcp_window_close(ep->window);
    for (int i = 0; i < HETCCL_CHANNELS; i++) {
        hetccl_tcp_channel *c = &ep->channel[i];
        close(c->fd);
        c->fd = -1;
        free(c->stage);
        c->stage = NULL;
        for (uint32_t k = 0; k < HETCCL_TCP_SLOTS; k++) {
            free(c->rx_slot[k].data);
            free(c->tx_slot[k].data);
            c->rx_slot[k].data = c->tx_slot[k].data = NULL;
        }
    }
}

/* The calling thread's entry, NULL if it has none. Lock held. */
static hetccl_tcp_text *own_text(hetccl_tcp *tcp)
{
    for (size_t i = 0; i < sizeof tcp->text / sizeof *tcp->text; i++)
        if (tcp->text[i].used && pthread_equal(tcp->text[i].thread, pthread_self()))
            return &tcp->text[i];
    return NULL;
}
