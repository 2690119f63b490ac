/* SPDX-License-Identifier: Apache-2.0
 * Waiting: whom for, how to sleep until something happens, and how to wake who sleeps.
 */
#include "executor.h"
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

/* Whom a work waits for, for the text of a timeout. */
void hx_work_waiting(hx_work *w, int32_t *ranks, int32_t *n, int32_t max, const char **phase)
{
    int64_t segment;
    int index;
    *n = 0;
    *phase = "copy";
    if (!w->bound)
        return;
    const hx_step *s = hx_lane_next(w, HX_LANE_BORDER, &segment, &index);
    if (s && s->kind == HX_FLOWS && w->lane[HX_LANE_BORDER].running) {
        *phase = "border";
        for (int f = s->first_flow; f < s->first_flow + s->n_flows; f++)
            for (int i = 0; !w->flow[f].done && i < w->plan->flows[f].n_peers; i++) {
                int known = 0;
                for (int k = 0; k < *n; k++)
                    known |= ranks[k] == w->plan->flows[f].peer[i];
                if (!known && *n < max)
                    ranks[(*n)++] = w->plan->flows[f].peer[i];
            }
        return;
    }
    s = hx_lane_next(w, HX_LANE_ISLAND, &segment, &index);
    int calls = s && s->kind < HX_COPY;
    for (int i = 0; !s && w->comm->streaming && i < w->plan->n_steps; i++)
        calls |= w->plan->steps[i].kind < HX_COPY;     /* all is enqueued: on a stream, only calls wait for others */
    if (calls) {
        *phase = "island";
        for (int i = 0; i < w->comm->n_island_local && *n < max; i++)
            if (w->comm->island_ranks[i] != w->comm->rank)
                ranks[(*n)++] = w->comm->island_ranks[i];
    }
}
