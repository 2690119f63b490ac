/* SPDX-License-Identifier: Apache-2.0
 * The progress thread of the process, which drives every communicator that nobody else drives, and the list of completed
 * works, which the completion thread empties (that one is Python's and takes the GIL; this one never does).
 */
#include "direct.h"
#include "threads.h"
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>

static struct {
    pthread_mutex_t lock;
    pthread_t thread;
    hx_comm *comms;
    int started, stop, wake_fd;
    _Atomic uint32_t sleeping;
    pthread_mutex_t done_lock;
    hx_work *done_head, *done_tail;
    _Atomic uint32_t done_word;
} E = {.lock = PTHREAD_MUTEX_INITIALIZER, .done_lock = PTHREAD_MUTEX_INITIALIZER, .wake_fd = -1};

/* One pass over all communicators: how many this thread drove, and whether something moved. */
static int pass(int *moved)
{
    int driven = 0;
    for (hx_comm *c = E.comms; c; c = c->engine_next) {
        if (!atomic_load_explicit(&c->pending, memory_order_acquire) || pthread_mutex_trylock(&c->driver) != 0)
            continue;
        if (!c->engine_bound)               /* this thread, too, works on the device */
            c->engine_bound = !c->host_memory && c->dev->bind_thread(c->dev_ctx) == HETCCL_OK;
        driven += atomic_load_explicit(&c->pending, memory_order_acquire) > atomic_load_explicit(&c->n_streamed, memory_order_relaxed);
        *moved |= hx_comm_progress(c, 0);
        pthread_mutex_unlock(&c->driver);
    }
    return driven;
}

/* Sleeps until something happens to a communicator with pending works, or to the list of them. */
static void sleep_on_all(void)
{
    struct pollfd q[2 * HX_POLL];
    nfds_t n = 1;
    int awake = 0, stream = 0, busy = 0, streamed = 0;
    uint64_t drained;
    q[0] = (struct pollfd){E.wake_fd, POLLIN, 0};
    atomic_store_explicit(&E.sleeping, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);  /* no load below comes before */
    for (hx_comm *c = E.comms; c; c = c->engine_next) {
        if (!atomic_load_explicit(&c->pending, memory_order_acquire) || pthread_mutex_trylock(&c->driver) != 0)
            continue;
        busy = 1;
        hx_comm_check(c);
        awake |= atomic_load_explicit(&c->failed, memory_order_relaxed) != 0;
        if (atomic_load_explicit(&c->pending, memory_order_acquire) == atomic_load_explicit(&c->n_streamed, memory_order_relaxed))
            streamed = 1;                   /* the device goes on by itself: only deadlines and callbacks wait for us */
        else
            stream |= !c->host_memory || hx_goes_direct(c);
        for (int i = 0; i < c->n_transports; i++) {
            int fds[HX_POLL];
            uint32_t some = 0;
            awake |= c->transports[i].ops->arm(c->transports[i].ctx) == HETCCL_IN_PROGRESS;
            c->transports[i].ops->wait_fds(c->transports[i].ctx, fds, HX_POLL, &some);
            for (uint32_t k = 0; k < some && n < 2 * HX_POLL; k++)
                q[n++] = (struct pollfd){fds[k] & ~HETCCL_WAIT_WRITABLE, fds[k] & HETCCL_WAIT_WRITABLE ? POLLOUT : POLLIN, 0};
        }
        pthread_mutex_unlock(&c->driver);
    }
    if (!awake) {
        struct timespec t = {0, stream ? 50000 : streamed ? 1000000 : busy ? 50000000 : 500000000};
        pthread_mutex_unlock(&E.lock);
        ppoll(q, n, &t, NULL);
        pthread_mutex_lock(&E.lock);
    }
    atomic_store_explicit(&E.sleeping, 0, memory_order_seq_cst);
    for (hx_comm *c = E.comms; c; c = c->engine_next)
        if (pthread_mutex_trylock(&c->driver) == 0) {
            for (int i = 0; i < c->n_transports; i++)
                c->transports[i].ops->disarm(c->transports[i].ctx);
            pthread_mutex_unlock(&c->driver);
        }
    if (q[0].revents && read(E.wake_fd, &drained, sizeof drained) < 0)
        return;
}

static void *progress_main(void *unused)
{
    (void)unused;
    uint32_t turn = 0;
    pthread_mutex_lock(&E.lock);
    while (!E.stop) {
        int moved = 0, driven = pass(&moved);
        if (moved)
            turn = 0;
        else if (!driven || hetccl_wait_turn(&turn, 0))
            sleep_on_all();
        pthread_mutex_unlock(&E.lock);      /* lets hx_engine_add and _remove in */
        pthread_mutex_lock(&E.lock);
    }
    pthread_mutex_unlock(&E.lock);
    return NULL;
}

void hx_engine_add(hx_comm *c)
{
    pthread_mutex_lock(&E.lock);
    if (!E.started) {
        E.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        E.stop = 0;
        E.started = hetccl_thread_start(&E.thread, NULL, progress_main, NULL) == 0;
    }
    c->engine_next = E.comms;
    E.comms = c;
    c->in_engine = 1;
    pthread_mutex_unlock(&E.lock);
}

void hx_engine_remove(hx_comm *c)
{
    hx_engine_kick();
    pthread_mutex_lock(&E.lock);
    for (hx_comm **p = &E.comms; *p; p = &(*p)->engine_next)
        if (*p == c) {
            *p = c->engine_next;
            break;
        }
    c->in_engine = 0;
    pthread_mutex_unlock(&E.lock);
}

void hx_engine_kick(void)
{
    uint64_t one = 1;
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&E.sleeping, memory_order_relaxed) && E.wake_fd >= 0 && write(E.wake_fd, &one, sizeof one) < 0)
        return;
}

/* Joins the progress thread. Blocks until its pass ends. */
void hx_engine_stop(void)
{
    pthread_mutex_lock(&E.lock);
    int started = E.started;
    E.stop = 1;
    pthread_mutex_unlock(&E.lock);
    if (!started)
        return;
    uint64_t one = 1;
    if (write(E.wake_fd, &one, sizeof one) == sizeof one)
        pthread_join(E.thread, NULL);
    close(E.wake_fd);
    E.wake_fd = -1;
    E.started = 0;
}

void hx_completed_push(hx_work *w)
{
    pthread_mutex_lock(&E.done_lock);
    w->next = NULL;
    if (E.done_tail)
        E.done_tail->next = w;
    else
        E.done_head = w;
    E.done_tail = w;
    pthread_mutex_unlock(&E.done_lock);
    atomic_fetch_add_explicit(&E.done_word, 1, memory_order_seq_cst);
    hetccl_futex_wake(&E.done_word);
}

hx_work *hx_completed_pop(uint64_t timeout_ns)
{
    for (int turn = 0; turn < 2; turn++) {
        uint32_t seen = atomic_load_explicit(&E.done_word, memory_order_acquire);
        pthread_mutex_lock(&E.done_lock);
        hx_work *w = E.done_head;
        if (w && !(E.done_head = w->next))
            E.done_tail = NULL;
        pthread_mutex_unlock(&E.done_lock);
        if (w)
            return w;
        if (turn == 0)
            hetccl_futex_wait(&E.done_word, seen, timeout_ns);
    }
    return NULL;
}

/* In a forked child: the threads are gone, and their locks may be held for ever. */
void hx_engine_after_fork(void)
{
    hx_turns_after_fork();
    pthread_mutex_init(&E.lock, NULL);
    pthread_mutex_init(&E.done_lock, NULL);
    E.comms = NULL;
    E.done_head = E.done_tail = NULL;
    E.started = 0;
    E.wake_fd = -1;                         /* the number may be reused: never write to the parent's */
}
