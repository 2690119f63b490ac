/* SPDX-License-Identifier: Apache-2.0 */
#include "team.h"
#include "wait.h"
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

typedef struct member {
    struct hx_team *team;
    pthread_t thread;
    int part;
} member;

struct hx_team {
    int threads, stop;
    _Atomic uint32_t round, finished;       /* futex words: jobs given out so far; parts done of this one */
    hx_share_fn share;
    void *job;
    member members[];
};

static void *work(void *arg)
{
    member *m = arg;
    struct hx_team *t = m->team;
    for (uint32_t seen = 0;;) {
        uint32_t turn = 0, now;
        while ((now = atomic_load_explicit(&t->round, memory_order_acquire)) == seen)
            if (hetccl_wait_turn(&turn, HETCCL_WAIT_PAUSES))
                hetccl_futex_wait(&t->round, seen, 500000000u);
        seen = now;
        if (t->stop)
            return NULL;
        t->share(t->job, m->part, t->threads);
        atomic_fetch_add_explicit(&t->finished, 1, memory_order_release);
    }
}

static void next_round(struct hx_team *t)
{
    atomic_store_explicit(&t->finished, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->round, 1, memory_order_seq_cst);
    hetccl_futex_wake(&t->round);
}

hx_team *hx_team_new(int threads)
{
    hx_team *t = threads > 1 ? calloc(1, sizeof *t + (size_t)threads * sizeof *t->members) : NULL;
    sigset_t all, before;
    if (!t)
        return NULL;
    t->threads = 1;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < threads; i++) {
        t->members[i] = (member){t, 0, i};
        if (pthread_create(&t->members[i].thread, NULL, work, &t->members[i]) != 0)
            break;
        t->threads = i + 1;                 /* before the first round nobody reads it */
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return t;
}

void hx_team_free(hx_team *t)
{
    if (!t)
        return;
    t->stop = 1;
    next_round(t);
    for (int i = 1; i < t->threads; i++)
        pthread_join(t->members[i].thread, NULL);
    free(t);
}

void hx_team_run(hx_team *t, hx_share_fn share, void *job)
{
    t->share = share;
    t->job = job;
    next_round(t);
    share(job, 0, t->threads);
    while (atomic_load_explicit(&t->finished, memory_order_acquire) != (uint32_t)t->threads - 1)
        hetccl_pause();
}
