/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "window.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define OUT_MOST ((size_t)16 << 20)        /* of what waits for the words' socket; users' protocols stay far below */

static int failed(hetccl_tcp_window *w);
static int queue_words(hetccl_tcp_window *w, const hetccl_tcp_frame *f, const uint8_t *bytes);
static void send_words(hetccl_tcp_window *w);
static void read_words(hetccl_tcp_window *w);

hetccl_tcp_window *hetccl_tcp_window_new(hetccl_tcp_ep *ep, const int *fds, int n_bulk, int side)
{
    hetccl_tcp_window *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    w->ep = ep;
    w->pid = (int)getpid();
    w->side = side;
    w->words_fd = fds[0];
    w->n_bulk = n_bulk;
    for (int i = 0; i < n_bulk; i++)
        w->bulk[i] = (hetccl_tcp_bulk){.window = w, .out_fd = fds[1 + side * n_bulk + i], .in_fd = fds[1 + (1 - side) * n_bulk + i]};
    pthread_mutex_init(&w->lock, NULL);
    pthread_mutex_init(&w->landing_lock, NULL);
    pthread_cond_init(&w->work, NULL);
    return w;
}

int hetccl_tcp_window_map(hetccl_tcp_window *w, hetccl_window_args *args)
{
    if (args->size < sizeof *args || args->nbytes > HETCCL_TCP_WINDOW_BYTES || (w->memory && args->nbytes != w->nbytes))
        return hetccl_tcp_fail(w->ep->tcp, HETCCL_INVALID, "a window of %zu bytes was asked for; a link has one of at most %zu, "
                               "and the caller has to know copies", args->nbytes, HETCCL_TCP_WINDOW_BYTES);
    if (!w->memory) {
        void *made = mmap(NULL, args->nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED)
            return hetccl_tcp_fail(w->ep->tcp, HETCCL_NO_MEMORY, "no memory for a window of %zu bytes", args->nbytes);
        madvise(made, args->nbytes, MADV_DONTFORK);
        w->memory = made;
        w->nbytes = args->nbytes;
    }
    args->ptr = w->memory;
    args->side = w->side;
    args->copies = 1;
    return HETCCL_OK;
}

int hetccl_tcp_window_put(hetccl_tcp_window *w, const hetccl_window_put *put)
{
    hetccl_tcp_frame f = {.magic = HETCCL_TCP_BULK_MAGIC, .at = put->at, .n_words = (uint16_t)put->n_words};
    int wrong = put->size < sizeof *put || put->n_words > 2 || !w->memory || put->at > w->nbytes || put->nbytes > w->nbytes - put->at;
    for (uint32_t i = 0; !wrong && i < put->n_words; i++) {
        wrong = put->word[i].at % 8 != 0 || put->word[i].at > w->nbytes - 8;
        f.word[i][0] = put->word[i].at;
        f.word[i][1] = put->word[i].value;
    }
    if (wrong)
        return hetccl_tcp_fail(w->ep->tcp, HETCCL_INVALID, "%llu bytes at %llu and %u words were put into a window of %zu bytes",
                               (unsigned long long)put->nbytes, (unsigned long long)put->at, put->n_words, w->nbytes);
    if (atomic_load_explicit(&w->status, memory_order_acquire))
        return failed(w);
    if (put->nbytes <= HETCCL_TCP_SMALL) {
        f.nbytes = (uint32_t)put->nbytes;
        f.put = w->put;
        f.parts = put->nbytes > 0;
        w->put += f.parts;
        return queue_words(w, &f, w->memory + put->at);
    }
    f.put = w->put;
    int rc = hetccl_tcp_bulk_send(w, &f, put->nbytes);
    if (rc != HETCCL_OK)
        return rc;
    w->put++;
    if (!w->started) {
        w->started = 1;
        hetccl_tcp_frame start = {.magic = HETCCL_TCP_BULK_MAGIC, .flags = HETCCL_TCP_START};
        rc = queue_words(w, &start, NULL);
    }
    return rc;
}

int hetccl_tcp_window_test(hetccl_tcp_window *w)
{
    if (w->out_lo < w->out_hi)
        send_words(w);
    if (w->memory)
        read_words(w);
    if (atomic_load_explicit(&w->status, memory_order_acquire))
        return failed(w);
    return w->out_lo == w->out_hi && hetccl_tcp_bulk_sent(w) ? HETCCL_OK : HETCCL_IN_PROGRESS;
}

int hetccl_tcp_window_unsent(const hetccl_tcp_window *w) { return w->out_lo < w->out_hi; }

void hetccl_tcp_window_close(hetccl_tcp_window *w)
{
    hetccl_tcp_bulk_close(w);
    if (w->words_fd >= 0)
        close(w->words_fd);
    w->words_fd = -1;
}

void hetccl_tcp_window_free(hetccl_tcp_window *w)
{
    if (w->memory && w->pid == (int)getpid())
        munmap(w->memory, w->nbytes);
    free(w->out);
    free(w);
}

int hetccl_tcp_window_check(const hetccl_tcp_window *w, const hetccl_tcp_frame *f, uint32_t sequence)
{
    int good = f->magic == HETCCL_TCP_BULK_MAGIC && f->sequence == sequence && f->n_words <= 2 && f->at <= w->nbytes &&
               f->nbytes <= w->nbytes - f->at && (f->nbytes > 0) == (f->parts > 0) && f->parts <= HETCCL_TCP_PARTS;
    for (int i = 0; good && i < f->n_words; i++)
        good = f->word[i][0] % 8 == 0 && f->word[i][0] <= w->nbytes - 8;
    return good;
}

static void show(hetccl_tcp_window *w, uint32_t n_words, const uint64_t (*word)[2])
{
    for (uint32_t i = 0; i < n_words; i++)
        atomic_store_explicit((_Atomic uint64_t *)(w->memory + word[i][0]), word[i][1], memory_order_release);
}

/* A frame's bytes are in their place. Shows the words of all puts that are whole with it. */
void hetccl_tcp_window_land(hetccl_tcp_window *w, const hetccl_tcp_frame *f)
{
    if (f->parts == 0) {
        show(w, f->n_words, f->word);
        return;
    }
    pthread_mutex_lock(&w->landing_lock);
    hetccl_tcp_landing *l = &w->landing[f->put % HETCCL_TCP_PUTS];
    int wrong = f->put - w->landed >= HETCCL_TCP_PUTS;
    if (!wrong && !l->begun) {
        l->begun = 1;
        l->put = f->put;
        l->left = f->parts;
        l->n_words = f->n_words;
        memcpy(l->word, f->word, sizeof l->word);
    }
    wrong |= l->put != f->put || l->left == 0;
    if (!wrong)
        l->left--;
    for (l = &w->landing[w->landed % HETCCL_TCP_PUTS]; !wrong && l->begun && l->left == 0;
         l = &w->landing[++w->landed % HETCCL_TCP_PUTS]) {
        show(w, l->n_words, l->word);
        l->begun = 0;
    }
    pthread_mutex_unlock(&w->landing_lock);
    if (wrong)
        hetccl_tcp_window_fail(w, HETCCL_SYSTEM, "rank %d put number %u, which cannot be", w->ep->peer, f->put);
}

/* The first failure stays. Any thread. */
void hetccl_tcp_window_fail(hetccl_tcp_window *w, int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&w->landing_lock);
    if (!atomic_load_explicit(&w->status, memory_order_relaxed)) {
        vsnprintf(w->text, sizeof w->text, format, args);
        atomic_store_explicit(&w->status, status, memory_order_release);
    }
    pthread_mutex_unlock(&w->landing_lock);
    va_end(args);
}

/* --------------------------------------------------------------------------------------------------- helpers */

static int failed(hetccl_tcp_window *w)
{
    return hetccl_tcp_fail(w->ep->tcp, atomic_load_explicit(&w->status, memory_order_acquire), "%s", w->text);
}

/* A socket failed: result is what the call returned, 0 is the end of the stream. */
__attribute__((cold, noinline))
void hetccl_tcp_window_broken(hetccl_tcp_window *w, long result, const char *doing)
{
    int code = result == 0 ? 0 : errno;
    int gone = code == 0 || code == ECONNRESET || code == EPIPE || code == ETIMEDOUT || code == EHOSTUNREACH ||
               code == ENETUNREACH || code == ENETDOWN || code == ECONNABORTED;
    char reason[96];
    hetccl_tcp_window_fail(w, gone ? HETCCL_PEER_LOST : HETCCL_SYSTEM, "%s rank %d: %s", doing, w->ep->peer,
                           code == 0 ? "it has closed the connection" : strerror_r(code, reason, sizeof reason));
}

/* Sends a frame by the words' socket, or keeps what that does not take. */
static int queue_words(hetccl_tcp_window *w, const hetccl_tcp_frame *frame, const uint8_t *bytes)
{
    hetccl_tcp_frame f = *frame;
    size_t done = 0, total = sizeof f + f.nbytes;
    f.sequence = w->out_sequence++;
    if (w->out_lo == w->out_hi) {
        struct iovec part[2] = {{&f, sizeof f}, {(void *)bytes, f.nbytes}};
        struct msghdr msg = {.msg_iov = part, .msg_iovlen = f.nbytes ? 2 : 1};
        ssize_t n;
        do
            n = sendmsg(w->words_fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        while (n < 0 && errno == EINTR);
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
            hetccl_tcp_window_broken(w, n, "sending to");
            return failed(w);
        }
        done = n > 0 ? (size_t)n : 0;
        if (done == total)
            return HETCCL_OK;
        w->out_lo = w->out_hi = 0;
    }
    if (w->out_hi + total > w->out_room) {
        size_t room = w->out_room ? 2 * w->out_room : (size_t)128 << 10;
        uint8_t *more = room <= OUT_MOST ? realloc(w->out, room) : NULL;
        if (more == NULL) {
            hetccl_tcp_window_fail(w, HETCCL_NO_MEMORY, "no memory for what rank %d does not read: %zu bytes", w->ep->peer, w->out_hi - w->out_lo);
            return failed(w);
        }
        w->out = more;
        w->out_room = room;
    }
    if (done < sizeof f) {
        memcpy(w->out + w->out_hi, (uint8_t *)&f + done, sizeof f - done);
        w->out_hi += sizeof f - done;
        done = sizeof f;
    }
    memcpy(w->out + w->out_hi, bytes + (done - sizeof f), total - done);
    w->out_hi += total - done;
    return HETCCL_OK;
}

static void send_words(hetccl_tcp_window *w)
{
    while (w->out_lo < w->out_hi) {
        ssize_t n = send(w->words_fd, w->out + w->out_lo, w->out_hi - w->out_lo, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            w->out_lo += (size_t)n;
        } else if (errno != EINTR) {
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                hetccl_tcp_window_broken(w, n, "sending to");
            return;
        }
    }
}

/* Takes what the words' socket has: frames, whose bytes go straight to their place. */
static void read_words(hetccl_tcp_window *w)
{
    while (!atomic_load_explicit(&w->status, memory_order_relaxed)) {
        size_t head = sizeof w->in;
        uint8_t *to = (uint8_t *)&w->in + w->in_got;
        size_t want = head - w->in_got;
        if (w->in_got >= head) {
            to = w->memory + w->in.at + (w->in_got - head);
            want = head + w->in.nbytes - w->in_got;
        }
        ssize_t n = recv(w->words_fd, to, want, MSG_DONTWAIT);
        if (n <= 0) {
            if (n < 0 && errno == EINTR)
                continue;
            if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK))
                hetccl_tcp_window_broken(w, n, "receiving from");
            return;
        }
        w->in_got += (size_t)n;
        if (w->in_got == head && !hetccl_tcp_window_check(w, &w->in, w->in_sequence++)) {
            hetccl_tcp_window_fail(w, HETCCL_SYSTEM, "what rank %d sent is no frame: magic %08x, %u bytes at %llu, sequence %u",
                                   w->ep->peer, w->in.magic, w->in.nbytes, (unsigned long long)w->in.at, w->in.sequence);
            return;
        }
        if (w->in_got >= head && w->in_got == head + w->in.nbytes) {
            w->in_got = 0;
            if ((w->in.flags & HETCCL_TCP_START) && hetccl_tcp_bulk_receive(w) != HETCCL_OK)
                hetccl_tcp_window_fail(w, HETCCL_SYSTEM, "no threads can be made to receive from rank %d", w->ep->peer);
            hetccl_tcp_window_land(w, &w->in);
        }
    }
}
