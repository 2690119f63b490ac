/* SPDX-License-Identifier: Apache-2.0
 * The lane thread of a communicator makes the calls of a BLOCKING vendor library, so that whoever drives the communicator can
 * go on. One call at a time. A call that never returns, in a library without abort, is left behind (lane_abandoned).
 */
#include "executor.h"
#include "threads.h"

static void *lane_main(void *arg)
{
    hx_comm *c = arg;
    if (c->dev->bind_thread(c->dev_ctx) != HETCCL_OK)
        c->lane_status = HETCCL_VENDOR;
    for (;;) {
        uint32_t turn = 0, word;
        while ((word = atomic_load_explicit(&c->lane_word, memory_order_acquire)) != 1) {
            if (c->lane_stop)
                return NULL;
            if (hetccl_wait_turn(&turn, 0))
                hetccl_futex_wait(&c->lane_word, word, 100000000u);
        }
        c->lane_status = hx_vendor_call(c, c->lane_work, c->lane_step, c->lane_segment);
        atomic_store_explicit(&c->lane_word, 2, memory_order_seq_cst);
        hx_kick(c);
        hx_engine_kick();
    }
}

int hx_lane_post(hx_comm *c, hx_work *w, const hx_step *s, int64_t segment)
{
    if (!c->lane_started) {
        if (hetccl_thread_start(&c->lane_thread, NULL, lane_main, c) != 0)
            return HETCCL_SYSTEM;
        c->lane_started = 1;
    }
    c->lane_work = w;
    c->lane_step = s;
    c->lane_segment = segment;
    atomic_store_explicit(&c->lane_word, 1, memory_order_seq_cst);
    hetccl_futex_wake(&c->lane_word);
    return HETCCL_OK;
}

int hx_lane_test(hx_comm *c)
{
    if (atomic_load_explicit(&c->lane_word, memory_order_acquire) != 2)
        return HETCCL_IN_PROGRESS;
    int status = c->lane_status;
    atomic_store_explicit(&c->lane_word, 0, memory_order_release);
    return status;
}

void hx_lane_stop(hx_comm *c)
{
    if (!c->lane_started)
        return;
    if (atomic_load(&c->lane_abandoned) && atomic_load(&c->lane_word) == 1) {
        pthread_detach(c->lane_thread);
        return;
    }
    c->lane_stop = 1;
    hetccl_futex_wake(&c->lane_word);
    pthread_join(c->lane_thread, NULL);
    c->lane_started = 0;
}
