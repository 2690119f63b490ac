/* SPDX-License-Identifier: Apache-2.0
 * The threads of the bulk sockets. They make blocking calls; closing shuts the sockets down, which ends those. Deadlines are
 * the core's: it gives an operation up and closes the link.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "window.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t most_part(const hetccl_tcp_window *w)
{
    if (w->ep->tcp->most_part)
        return w->ep->tcp->most_part;
    return (uint64_t)(w->n_bulk <= 4 ? 1 << 20 : 512 << 10);       /* measured, docs/design/tcp-sockets.md */
}

/* One part; 0 if the socket failed. */
static int send_part(hetccl_tcp_bulk *b, hetccl_tcp_frame *f)
{
    hetccl_tcp_window *w = b->window;
    size_t done = 0, total = sizeof *f + f->nbytes;
    while (done < total) {
        struct iovec part[2] = {{(uint8_t *)f + done, sizeof *f - done}, {w->memory + f->at, f->nbytes}};
        struct msghdr msg = {.msg_iov = part, .msg_iovlen = 2};
        if (done >= sizeof *f) {
            size_t sent = done - sizeof *f;
            part[0] = (struct iovec){w->memory + f->at + sent, f->nbytes - sent};
            msg.msg_iovlen = 1;
        }
        ssize_t n = sendmsg(b->out_fd, &msg, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            hetccl_tcp_window_broken(w, n, "sending to");
            return 0;
        }
        done += (size_t)n;
    }
    return 1;
}

static void *send_main(void *arg)
{
    hetccl_tcp_bulk *b = arg;
    hetccl_tcp_window *w = b->window;
    uint32_t sequence = 0;
    uint64_t since = now_ns();
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (w->head == w->tail && !w->stop)
            pthread_cond_wait(&w->work, &w->lock);
        if (w->stop)
            break;
        hetccl_tcp_frame f = w->part[w->head++ % HETCCL_TCP_PARTS];
        w->sending++;
        pthread_mutex_unlock(&w->lock);
        uint64_t begun = now_ns();
        b->idle_ns += begun - since;
        f.sequence = sequence++;
        int good = send_part(b, &f);
        since = now_ns();
        b->send_ns += since - begun;
        pthread_mutex_lock(&w->lock);
        w->sending--;
        if (!good)
            break;
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Reads n bytes; 0 if the stream ended or failed. Where it may end, that is no failure: the peer closes these sockets
 * before that of the words, and its last words may still have to be read. */
static int receive(hetccl_tcp_bulk *b, uint8_t *to, size_t n, int may_end)
{
    while (n) {
        ssize_t got = recv(b->in_fd, to, n, MSG_WAITALL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got == 0 && may_end)
            return 0;
        if (got <= 0) {
            hetccl_tcp_window_broken(b->window, got, "receiving from");
            return 0;
        }
        may_end = 0;
        to += got;
        n -= (size_t)got;
    }
    return 1;
}

static void *receive_main(void *arg)
{
    hetccl_tcp_bulk *b = arg;
    hetccl_tcp_window *w = b->window;
    hetccl_tcp_frame f;
    for (uint32_t sequence = 0; receive(b, (uint8_t *)&f, sizeof f, 1); sequence++) {
        if (!hetccl_tcp_window_check(w, &f, sequence) || f.nbytes == 0) {
            hetccl_tcp_window_fail(w, HETCCL_SYSTEM, "what rank %d sent is no frame: magic %08x, %u bytes at %llu, sequence %u",
                                   w->ep->peer, f.magic, f.nbytes, (unsigned long long)f.at, f.sequence);
            break;
        }
        uint64_t begun = now_ns();
        if (!receive(b, w->memory + f.at, f.nbytes, 0))
            break;
        b->recv_ns += now_ns() - begun;
        hetccl_tcp_window_land(w, &f);
    }
    return NULL;
}

/* Starts a thread; signals belong to the program's own. */
static int start(pthread_t *thread, void *(*run)(void *), hetccl_tcp_bulk *b)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(thread, NULL, run, b);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc == 0)
        pthread_setname_np(*thread, run == send_main ? "hetccl-tcp-out" : "hetccl-tcp-in");
    return rc == 0 ? HETCCL_OK : HETCCL_SYSTEM;
}

static void blocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK); }

int hetccl_tcp_bulk_send(hetccl_tcp_window *w, const hetccl_tcp_frame *f, uint64_t nbytes)
{
    for (int i = 0; i < w->n_bulk; i++)
        if (!w->bulk[i].sends) {
            blocking(w->bulk[i].out_fd);
            if (start(&w->bulk[i].sender, send_main, &w->bulk[i]) != HETCCL_OK)
                return hetccl_tcp_fail(w->ep->tcp, HETCCL_SYSTEM, "no threads can be made to send to rank %d", w->ep->peer);
            w->bulk[i].sends = 1;
        }
    uint64_t part = (nbytes / (uint64_t)w->n_bulk + 65535) & ~(uint64_t)65535;
    uint64_t most = most_part(w), least = most < HETCCL_TCP_LEAST_PART ? most : HETCCL_TCP_LEAST_PART;
    part = part < least ? least : part > most ? most : part;
    if (part < nbytes / 64 + 1)                     /* the queue must hold some puts */
        part = nbytes / 64 + 1;
    uint32_t parts = (uint32_t)((nbytes + part - 1) / part);
    pthread_mutex_lock(&w->lock);
    int fits = w->tail - w->head + parts <= HETCCL_TCP_PARTS;
    for (uint32_t i = 0; fits && i < parts; i++) {
        uint64_t at = (uint64_t)i * part;
        hetccl_tcp_frame *one = &w->part[w->tail++ % HETCCL_TCP_PARTS];
        *one = *f;
        one->at = f->at + at;
        one->nbytes = (uint32_t)(nbytes - at < part ? nbytes - at : part);
        one->parts = parts;
    }
    pthread_mutex_unlock(&w->lock);
    for (uint32_t i = 0; fits && i < parts && i < (uint32_t)w->n_bulk; i++)
        pthread_cond_signal(&w->work);
    return fits ? HETCCL_OK : HETCCL_IN_PROGRESS;
}

int hetccl_tcp_bulk_sent(hetccl_tcp_window *w)
{
    if (!w->bulk[0].sends)
        return 1;
    pthread_mutex_lock(&w->lock);
    int sent = w->head == w->tail && w->sending == 0;
    pthread_mutex_unlock(&w->lock);
    return sent;
}

int hetccl_tcp_bulk_receive(hetccl_tcp_window *w)
{
    for (int i = 0; i < w->n_bulk; i++)
        if (!w->bulk[i].receives) {
            blocking(w->bulk[i].in_fd);
            if (start(&w->bulk[i].receiver, receive_main, &w->bulk[i]) != HETCCL_OK)
                return HETCCL_SYSTEM;
            w->bulk[i].receives = 1;
        }
    return HETCCL_OK;
}

/* In a forked child the threads do not exist, and the sockets are the parent's: only its own descriptors are closed. */
void hetccl_tcp_bulk_close(hetccl_tcp_window *w)
{
    int mine = w->pid == (int)getpid();
    if (mine) {
        pthread_mutex_lock(&w->lock);
        w->stop = 1;
        int unsent = w->sending > 0;
        pthread_cond_broadcast(&w->work);
        pthread_mutex_unlock(&w->lock);
        for (int i = 0; i < w->n_bulk; i++) {       /* ends the calls in which threads wait */
            if (w->bulk[i].sends && unsent)
                shutdown(w->bulk[i].out_fd, SHUT_RDWR);
            if (w->bulk[i].receives)
                shutdown(w->bulk[i].in_fd, SHUT_RD);
        }
    }
    for (int i = 0; i < w->n_bulk; i++) {
        hetccl_tcp_bulk *b = &w->bulk[i];
        if (mine && b->sends)
            pthread_join(b->sender, NULL);
        if (mine && b->receives)
            pthread_join(b->receiver, NULL);
        b->sends = b->receives = 0;
        if (b->out_fd >= 0)
            close(b->out_fd);
        if (b->in_fd >= 0)
            close(b->in_fd);
        b->out_fd = b->in_fd = -1;
    }
}
