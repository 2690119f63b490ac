/* SPDX-License-Identifier: Apache-2.0
 * Turns: calls of vendors' libraries in one order on all ranks of an island, though communicators are used in different ones.
 *
 * Two kinds of library need it. One that makes one call at a time a process (HETCCL_CCL_ONE_AT_A_TIME) would lock up where two
 * ranks call on two communicators in different orders, each holding its process and waiting for the other. And a device may
 * run one collective at a time: then the same happens with what is enqueued on it (HETCCL_ORDER=island; programs that keep one
 * order need it not). So a call takes the processes of its island one after another, in one order that all communicators share,
 * and only once all ranks have come to it; the first process's order is the order of all. A library that only enqueues gives
 * its process back when the last one is taken, and each call's stream waits for the call before it.
 */
#include "executor.h"

#define DEVICES 16

static pthread_mutex_t process = PTHREAD_MUTEX_INITIALIZER;   /* a call of such a library runs, or is being enqueued */

/* Behind the collective that was enqueued last on a device, whatever communicator it belongs to. Kept for the process's life. */
static struct { const hetccl_device_ops *dev; void *ctx, *event; } last_call[DEVICES];

#define LATE_NS 10000000000ull      /* after the deadline */

/* All ranks have said that they make this call, so a library that cannot abort must get it from all who live: an abort, or a
 * deadline that is only just over, comes after the call. */
static int overdue(hx_comm *c, const hx_work *w, int *who)
{
    if (!c->streaming) {
        if (hx_board_lost(c->board, who))
            return HETCCL_PEER_LOST;
        return hetccl_now_ns() >= w->deadline_ns + LATE_NS ? HETCCL_TIMED_OUT : HETCCL_OK;
    }
    int rc = hx_board_gone(c->board, *who, &c->aborted, who);
    return rc != HETCCL_OK ? rc : hetccl_now_ns() >= w->deadline_ns ? HETCCL_TIMED_OUT : HETCCL_OK;
}

/* Blocks until `rank` has taken its process for this communicator's turn number `turn`. */
static int await(hx_comm *c, const hx_work *w, int rank, uint32_t turn, int *who)
{
    _Atomic uint32_t *word = &c->board->entry[rank].turns;
    uint32_t looks = 0;
    while (!hx_board_reached(word, turn)) {
        if (!hetccl_wait_turn(&looks, c->pauses))
            continue;
        *who = rank;
        int rc = overdue(c, w, who);
        if (rc != HETCCL_OK)
            return rc;
        uint32_t seen = atomic_load_explicit(word, memory_order_acquire);
        if (!hx_board_reached(word, turn))
            hetccl_futex_wait(word, seen, 1000000u);
    }
    return HETCCL_OK;
}

static int take_process(hx_comm *c, const hx_work *w, int *who)
{
    while (pthread_mutex_trylock(&process) != 0) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 20000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        if (pthread_mutex_timedlock(&process, &until) == 0)
            break;
        *who = -1;
        int rc = overdue(c, w, who);
        if (rc != HETCCL_OK)
            return rc;
    }
    return HETCCL_OK;
}

/* The event behind the last call on this communicator's device; made with its first use. Process taken. */
static void **event_of(hx_comm *c)
{
    for (int i = 0; i < DEVICES; i++) {
        if (!last_call[i].event) {
            if (c->dev->event_create(c->dev_ctx, &last_call[i].event) != HETCCL_OK)
                return NULL;
            last_call[i].dev = c->dev;
            last_call[i].ctx = c->dev_ctx;
        }
        if (last_call[i].ctx == c->dev_ctx)
            return &last_call[i].event;
    }
    return NULL;
}

int hx_turn_take(hx_comm *c, const hx_work *w, int *who)
{
    uint32_t mine = ++c->turns;
    int rc = c->turn_before >= 0 ? await(c, w, c->turn_before, mine, who) : HETCCL_OK;
    if (rc == HETCCL_OK)
        rc = take_process(c, w, who);
    if (rc != HETCCL_OK)
        return rc;
    atomic_store_explicit(&c->board->entry[c->rank].turns, mine, memory_order_seq_cst);
    if (c->n_island_local > 1)
        hetccl_futex_wake(&c->board->entry[c->rank].turns);
    if (!c->streaming)
        return HETCCL_OK;
    void **event = event_of(c);
    rc = event ? c->dev->stream_wait_event(c->dev_ctx, w->stream, *event) : HETCCL_NO_MEMORY;
    if (rc != HETCCL_OK)
        pthread_mutex_unlock(&process);
    return rc;
}

int hx_turn_give(hx_comm *c, const hx_work *w, int *who)
{
    int rc = HETCCL_OK;
    if (c->streaming) {
        void **event = event_of(c);
        rc = event ? c->dev->event_record(c->dev_ctx, *event, w->stream) : HETCCL_NO_MEMORY;
        if (rc == HETCCL_OK)
            rc = await(c, w, c->island_ranks[c->n_island_local - 1], c->turns, who);
    }
    pthread_mutex_unlock(&process);
    return rc;
}

void hx_turns_after_fork(void)
{
    pthread_mutex_init(&process, NULL);
}
