/* SPDX-License-Identifier: Apache-2.0 */
#include "wait.h"
#include "team.h"
#include "threads.h"
#include <stdlib.h>

#define ROOM 512u                           /* jobs that wait at most: two rings of slots for each of several peers */

typedef struct entry {
    hx_job_fn run;
    void *job;
    _Atomic uint32_t *left;
} entry;

struct hx_team {
    int threads;
    _Atomic int stop;
    _Atomic uint32_t lock;                  /* held for some instructions: a job takes tens of microseconds */
    _Atomic uint32_t taken, posted;         /* jobs so far; `posted` is the helpers' futex word */
    _Atomic uint32_t sleepers, running;
    entry queue[ROOM];
    pthread_t helper[];
};

static void enter(hx_team *t)
{
    while (atomic_exchange_explicit(&t->lock, 1, memory_order_acquire))
        hetccl_pause();
}

static void leave(hx_team *t) { atomic_store_explicit(&t->lock, 0, memory_order_release); }

static int take(hx_team *t, entry *e)
{
    uint32_t at = atomic_load_explicit(&t->taken, memory_order_relaxed);
    if (at == atomic_load_explicit(&t->posted, memory_order_acquire))
        return 0;                           /* without the lock: waiters ask all the time */
    enter(t);
    at = atomic_load_explicit(&t->taken, memory_order_relaxed);
    int some = at != atomic_load_explicit(&t->posted, memory_order_relaxed);
    if (some) {
        *e = t->queue[at % ROOM];
        atomic_fetch_add_explicit(&t->running, 1, memory_order_relaxed);
        atomic_store_explicit(&t->taken, at + 1, memory_order_relaxed);
    }
    leave(t);
    return some;
}

static void finish(hx_team *t, const entry *e)
{
    e->run(e->job);
    atomic_store_explicit(e->left, 0, memory_order_release);
    atomic_fetch_sub_explicit(&t->running, 1, memory_order_release);
}

static void *work(void *arg)
{
    hx_team *t = arg;
    entry e;
    for (uint32_t turn = 0; !atomic_load_explicit(&t->stop, memory_order_relaxed);) {
        if (take(t, &e)) {
            finish(t, &e);
            turn = 0;
        } else if (hetccl_wait_turn(&turn, HETCCL_WAIT_PAUSES)) {
            uint32_t seen = atomic_load_explicit(&t->taken, memory_order_relaxed);
            atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst);
            if (!atomic_load_explicit(&t->stop, memory_order_seq_cst))
                hetccl_futex_wait(&t->posted, seen, 500000000u);    /* only while all that was posted is taken */
            atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_relaxed);
            turn = 0;
        }
    }
    return NULL;
}

hx_team *hx_team_new(int threads)
{
    hx_team *t = threads > 1 ? calloc(1, sizeof *t + (size_t)threads * sizeof *t->helper) : NULL;
    if (!t)
        return NULL;
    t->threads = 1;
    while (t->threads < threads && hetccl_thread_start(&t->helper[t->threads], NULL, work, t) == 0)
        t->threads++;
    return t;
}

void hx_team_free(hx_team *t)
{
    if (!t)
        return;
    hx_team_drained(t);
    atomic_store_explicit(&t->stop, 1, memory_order_seq_cst);
    enter(t);                               /* nothing is there to take, but nobody's word for sleeping is right any more */
    atomic_fetch_add_explicit(&t->posted, 1, memory_order_seq_cst);
    atomic_store_explicit(&t->taken, atomic_load_explicit(&t->posted, memory_order_relaxed), memory_order_relaxed);
    leave(t);
    hetccl_futex_wake(&t->posted);
    for (int i = 1; i < t->threads; i++)
        pthread_join(t->helper[i], NULL);
    free(t);
}

void hx_team_push(hx_team *t, hx_job_fn run, void *job, _Atomic uint32_t *left)
{
    uint32_t at = t ? atomic_load_explicit(&t->posted, memory_order_relaxed) : 0;
    atomic_store_explicit(left, 1, memory_order_relaxed);
    if (!t || at - atomic_load_explicit(&t->taken, memory_order_acquire) == ROOM) {
        run(job);
        atomic_store_explicit(left, 0, memory_order_release);
        return;
    }
    enter(t);
    t->queue[at % ROOM] = (entry){run, job, left};
    atomic_store_explicit(&t->posted, at + 1, memory_order_seq_cst);
    leave(t);
    if (atomic_load_explicit(&t->sleepers, memory_order_seq_cst))
        hetccl_futex_wake(&t->posted);
}

int hx_team_help(hx_team *t)
{
    entry e;
    if (!t || !take(t, &e))
        return 0;
    finish(t, &e);
    return 1;
}

int hx_team_drained(hx_team *t)
{
    if (!t)
        return 1;
    enter(t);
    atomic_store_explicit(&t->taken, atomic_load_explicit(&t->posted, memory_order_relaxed), memory_order_relaxed);
    leave(t);
    return atomic_load_explicit(&t->running, memory_order_acquire) == 0;
}
