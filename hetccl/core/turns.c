/* SPDX-License-Identifier: Apache-2.0
 * Turns: a library that makes one call at a time a process (HETCCL_CCL_ONE_AT_A_TIME) would lock up where two ranks call on
 * two communicators in different orders, each holding its process and waiting for the other. So a call takes the processes of
 * its island one after another in one order that all communicators share, and only once all ranks have come to it.
 */
#include "executor.h"

static pthread_mutex_t process = PTHREAD_MUTEX_INITIALIZER;   /* a call of such a library runs */

static int overdue(hx_comm *c, const hx_work *w, int *who)
{
    int rc = hx_board_gone(c->board, *who, &c->aborted, who);
    return rc != HETCCL_OK ? rc : hetccl_now_ns() >= w->deadline_ns ? HETCCL_TIMED_OUT : HETCCL_OK;
}

int hx_turn_take(hx_comm *c, const hx_work *w, int *who)
{
    uint32_t mine = ++c->turns, turn = 0;
    for (int rc; c->turn_before >= 0 && !hx_board_reached(&c->board->entry[c->turn_before].turns, mine);) {
        _Atomic uint32_t *word = &c->board->entry[c->turn_before].turns;
        if (!hetccl_wait_turn(&turn, c->pauses))
            continue;
        *who = c->turn_before;
        if ((rc = overdue(c, w, who)) != HETCCL_OK)
            return rc;
        uint32_t seen = atomic_load_explicit(word, memory_order_acquire);
        if (!hx_board_reached(word, mine))
            hetccl_futex_wait(word, seen, 1000000u);
    }
    for (int rc; pthread_mutex_trylock(&process) != 0;) {
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
        if ((rc = overdue(c, w, who)) != HETCCL_OK)
            return rc;
    }
    atomic_store_explicit(&c->board->entry[c->rank].turns, mine, memory_order_seq_cst);
    if (c->turn_after)
        hetccl_futex_wake(&c->board->entry[c->rank].turns);
    return HETCCL_OK;
}

void hx_turn_give(void)
{
    pthread_mutex_unlock(&process);
}

void hx_turns_after_fork(void)
{
    pthread_mutex_init(&process, NULL);
}
