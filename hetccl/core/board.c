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
            if (rc != HETCCL_OK)
                return rc;
            uint64_t now = hetccl_now_ns();
            if (now >= deadline_ns)
                return HETCCL_TIMED_OUT;
            uint64_t ns = deadline_ns - now < 50000000u ? deadline_ns - now : 50000000u;
            uint32_t seen = atomic_load_explicit(&e->meets, memory_order_acquire);
            atomic_fetch_add_explicit(&e->sleepers, 1, memory_order_seq_cst);
            if (!hx_board_reached(&e->meets, meet))
                hetccl_futex_wait(&e->meets, seen, ns);
            atomic_fetch_sub_explicit(&e->sleepers, 1, memory_order_seq_cst);
        }
        if (e->call[meet & 1].fingerprint != call->fingerprint)
            return HETCCL_MISMATCH;
    }
    return HETCCL_OK;
}
