/* SPDX-License-Identifier: Apache-2.0 */
#include "board.h"
#include "hetccl/spi.h"

static void wake_all(hx_board *b)
{
    atomic_fetch_add_explicit(&b->generation, 1, memory_order_seq_cst);
    for (uint32_t r = 0; r < b->size; r++)
        hetccl_futex_wake(&b->entry[r].meets);
}

void hx_board_mark(hx_board *b, int rank, uint32_t state)
{
    uint32_t before = atomic_load_explicit(&b->entry[rank].state, memory_order_relaxed);
    while (before < state && !atomic_compare_exchange_weak(&b->entry[rank].state, &before, state))
        ;
    if (before < state)
        wake_all(b);
}

void hx_board_abort(hx_board *b, int rank)
{
    uint32_t none = 0;
    atomic_compare_exchange_strong(&b->aborted_by, &none, (uint32_t)rank + 1);
    wake_all(b);
}

int hx_board_lost(const hx_board *b, int *who)
{
    for (uint32_t r = 0; r < b->size; r++)
        if (atomic_load_explicit(&((hx_board *)b)->entry[r].state, memory_order_relaxed) == HX_LOST) {
            *who = (int)r;
            return 1;
        }
    return 0;
}

/* Whether those who meet go: the first to say so, or to give up, decides for all. A later meeting that is decided already tells
 * that they went. */
static int decide(hx_entry *first, uint32_t meet, int go)
{
    uint64_t now = atomic_load_explicit(&first->decided, memory_order_acquire), mine = (uint64_t)meet << 1 | (uint64_t)go;
    for (;;) {
        if (now >> 1 == meet)
            return (int)(now & 1);
        if (now >> 1 == (uint32_t)(meet + 1))
            return 1;
        if (atomic_compare_exchange_weak_explicit(&first->decided, &now, mine, memory_order_acq_rel, memory_order_acquire))
            return go;
    }
}

int hx_board_gone(const hx_board *b, int rank, const _Atomic uint32_t *stop, int *who)
{
    if (atomic_load_explicit(&((hx_board *)b)->aborted_by, memory_order_relaxed) || atomic_load_explicit(stop, memory_order_relaxed))
        return HETCCL_ABORTED;
    /* any loss in the communicator ends the meeting: the lost rank's island mates cannot come */
    for (uint32_t r = 0; r < b->size; r++) {
        uint32_t state = atomic_load_explicit(&((hx_board *)b)->entry[r].state, memory_order_relaxed);
        if (state == HX_LOST || (state == HX_LEFT && (int)r == rank)) {
            *who = (int)r;
            return HETCCL_PEER_LOST;
        }
    }
    return HETCCL_OK;
}

int hx_board_meet(hx_board *b, int me, const int32_t *ranks, int n, uint32_t meet, const hx_call *call, int pauses,
                  uint64_t deadline_ns, const _Atomic uint32_t *stop, int *who)
{
    hx_entry *mine = &b->entry[me];
    mine->call[meet & 1] = *call;
    atomic_store_explicit(&mine->meets, meet, memory_order_seq_cst);
    if (atomic_load_explicit(&mine->sleepers, memory_order_seq_cst))
        hetccl_futex_wake(&mine->meets);
    for (int i = 0; i < n; i++) {
        hx_entry *e = &b->entry[ranks[i]];
        uint32_t turn = 0;
        *who = ranks[i];
        while (!hx_board_reached(&e->meets, meet)) {
            if (!hetccl_wait_turn(&turn, pauses))
                continue;
            int rc = hx_board_gone(b, ranks[i], stop, who);
            uint64_t now = hetccl_now_ns();
            if (rc == HETCCL_OK && now >= deadline_ns)
                rc = HETCCL_TIMED_OUT;
            if (rc != HETCCL_OK)
                return decide(&b->entry[ranks[0]], meet, 0) ? HETCCL_OK : rc;
            uint64_t ns = deadline_ns - now < 50000000u ? deadline_ns - now : 50000000u;
            uint32_t seen = atomic_load_explicit(&e->meets, memory_order_acquire);
            atomic_fetch_add_explicit(&e->sleepers, 1, memory_order_seq_cst);
            if (!hx_board_reached(&e->meets, meet))
                hetccl_futex_wait(&e->meets, seen, ns);
            atomic_fetch_sub_explicit(&e->sleepers, 1, memory_order_seq_cst);
        }
        if (e->call[meet & 1].fingerprint != call->fingerprint) {
            decide(&b->entry[ranks[0]], meet, 0);
            return HETCCL_MISMATCH;
        }
    }
    if (decide(&b->entry[ranks[0]], meet, 1))
        return HETCCL_OK;
    int rc = hx_board_gone(b, -1, stop, who);
    *who = rc == HETCCL_PEER_LOST ? *who : -1;
    return rc == HETCCL_OK ? HETCCL_ABORTED : rc;
}
