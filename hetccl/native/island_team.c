/* SPDX-License-Identifier: Apache-2.0
 * Threads of one rank that carry the tracks of a large operation. The first such operation starts them; they sleep between.
 */
#include "island_impl.h"
#include "threads.h"

#include <stdlib.h>

struct island_team {
    int threads;                              /* with the caller */
    _Atomic int stop;
    _Atomic uint32_t turn;                    /* counts jobs: what helpers wait for */
    _Atomic uint32_t left, sleepers;          /* helpers that are not done; that sleep */
    island_share share;
    void *job;
    struct helper {
        struct island_team *team;
        pthread_t thread;
        int number;
    } helper[];
};

static void *help(void *arg)
{
    struct helper *me = arg;
    island_team *t = me->team;
    for (uint32_t seen = 0;;) {
        uint32_t turn = 0;
        while (atomic_load_explicit(&t->turn, memory_order_acquire) == seen) {
            if (!hetccl_wait_turn(&turn, HETCCL_WAIT_PAUSES))
                continue;
            atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst);
            hetccl_futex_wait(&t->turn, seen, 500000000u);
            atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_relaxed);
        }
        seen++;
        if (atomic_load_explicit(&t->stop, memory_order_relaxed))
            return NULL;
        t->share(t->job, me->number, t->threads);
        if (atomic_fetch_sub_explicit(&t->left, 1, memory_order_acq_rel) == 1)
            hetccl_futex_wake(&t->left);
    }
}

static void call_helpers(island_team *t)
{
    atomic_fetch_add_explicit(&t->turn, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&t->sleepers, memory_order_seq_cst))
        hetccl_futex_wake(&t->turn);
}

island_team *island_team_new(int threads)
{
    island_team *t = threads > 1 ? calloc(1, sizeof *t + (size_t)threads * sizeof *t->helper) : NULL;
    if (!t)
        return NULL;
    t->threads = 1;
    while (t->threads < threads) {
        struct helper *h = &t->helper[t->threads];
        h->team = t;
        h->number = t->threads;
        if (hetccl_thread_start(&h->thread, NULL, help, h) != 0)
            break;
        t->threads++;                         /* read by helpers only behind a job */
    }
    return t;
}

void island_team_free(island_team *t)
{
    if (!t)
        return;
    atomic_store_explicit(&t->stop, 1, memory_order_relaxed);
    call_helpers(t);
    for (int i = 1; i < t->threads; i++)
        pthread_join(t->helper[i].thread, NULL);
    free(t);
}

void island_team_run(island_team *t, island_share share, void *job)
{
    uint32_t turn = 0, left;
    if (!t) {
        share(job, 0, 1);
        return;
    }
    t->share = share;
    t->job = job;
    atomic_store_explicit(&t->left, (uint32_t)t->threads - 1, memory_order_relaxed);
    call_helpers(t);
    share(job, 0, t->threads);
    while ((left = atomic_load_explicit(&t->left, memory_order_acquire)) != 0)
        if (hetccl_wait_turn(&turn, HETCCL_WAIT_PAUSES))
            hetccl_futex_wait(&t->left, left, 100000000u);
}
