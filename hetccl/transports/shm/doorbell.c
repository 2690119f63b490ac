/* SPDX-License-Identifier: Apache-2.0
 * Sleeping and waking: one eventfd a rank, and one word a link that says its owner sleeps.
 */
#include <errno.h>
#include <unistd.h>

#include "ring_private.h"

void hetccl_shm_ring_doorbell(hetccl_shm_ep *ep)
{
    uint64_t one = 1;
    /* Whoever takes the bit away rings: one system call a sleep, however many messages follow. A full counter (EAGAIN)
     * is as good as a ring. */
    if (atomic_fetch_and_explicit(ep->theirs, ~SLEEPING, memory_order_acq_rel) & SLEEPING)
        if (write(ep->peer_doorbell, &one, sizeof one) < 0)
            return;
}

/* True once for everything that came since the owner last looked. */
static int something_new(hetccl_shm_ep *ep)
{
    int found = 0;
    if (!ep->closed_noticed && atomic_load_explicit(ep->theirs, memory_order_acquire) & CLOSED)
        found = ep->closed_noticed = 1;
    for (int c = 0; c < HETCCL_CHANNELS; c++) {
        in_ring *in = &ep->in[c];
        out_ring *out = &ep->out[c];
        uint32_t position = in->noticed;
        if ((int32_t)(position - in->head) < 0)
            position = in->head;
        while (position - in->head < in->slots && arrived(in, position))
            position++;
        if (position != in->noticed) {
            in->noticed = position;
            found = 1;
        }
        if (out->waiting && atomic_load_explicit(out->released, memory_order_acquire) != out->released_seen) {
            out->waiting = 0;
            found = 1;
        }
    }
    return found;
}

void hetccl_shm_lie_down(hetccl_shm_ep *ep)
{
    atomic_fetch_or_explicit(ep->mine, SLEEPING, memory_order_seq_cst);
}

static void get_up(hetccl_shm *shm)
{
    atomic_store_explicit(&shm->armed, 0, memory_order_seq_cst);
    for (hetccl_shm_ep *ep = atomic_load_explicit(&shm->first, memory_order_acquire); ep; ep = ep->next)
        if (!ep->error && atomic_load_explicit(ep->mine, memory_order_relaxed) & SLEEPING)
            atomic_fetch_and_explicit(ep->mine, ~SLEEPING, memory_order_acq_rel);
}

int hetccl_shm_arm(void *ctx)
{
    hetccl_shm *shm = ctx;
    int found = 0;
    atomic_store_explicit(&shm->armed, 1, memory_order_seq_cst);
    hetccl_shm_ep *first = atomic_load_explicit(&shm->first, memory_order_seq_cst);
    for (hetccl_shm_ep *ep = first; ep; ep = ep->next)
        if (!ep->error)
            hetccl_shm_lie_down(ep);
    atomic_thread_fence(memory_order_seq_cst); /* against the one in wake_peer */
    for (hetccl_shm_ep *ep = first; ep; ep = ep->next)
        if (!ep->error)
            found |= something_new(ep);
    if (!found)
        return HETCCL_OK;
    get_up(shm);
    return HETCCL_IN_PROGRESS;
}

int hetccl_shm_disarm(void *ctx)
{
    hetccl_shm *shm = ctx;
    uint64_t rings;
    get_up(shm);
    if (read(shm->doorbell, &rings, sizeof rings) < 0 && errno != EAGAIN && errno != EINTR)
        return hetccl_shm_fail(shm, HETCCL_SYSTEM, "reading the shared-memory doorbell failed: errno %d", errno);
    return HETCCL_OK;
}

int hetccl_shm_wait_fds(void *ctx, int *fds, uint32_t max, uint32_t *n)
{
    hetccl_shm *shm = ctx;
    if (max < 1)
        return hetccl_shm_fail(shm, HETCCL_INVALID, "wait_fds needs room for one descriptor");
    fds[0] = shm->doorbell;
    *n = 1;
    return HETCCL_OK;
}
