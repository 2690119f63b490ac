/* SPDX-License-Identifier: Apache-2.0 */
#include "wait.h"
#include "team.h"
#include "threads.h"
#include <stdlib.h>

#define ROOM 512u                           /* jobs of a thread that wait at most: rings of slots for each of several peers */

typedef struct entry {
    hx_job_fn run;
    void *job;
    _Atomic uint32_t *left;
} entry;

typedef struct lane {                       /* a thread's jobs */
    _Atomic uint32_t lock;                  /* held for some instructions: a job takes tens of microseconds */
    _Atomic uint32_t taken, posted;         /* jobs so far */
    pthread_t helper;                       /* but for the first, the driving thread's */
    entry queue[ROOM];
} lane;

struct hx_team {
    uint32_t threads, started;              /* with the driving thread */
    _Atomic int stop;
    _Atomic uint32_t posted;                /* changes with every job: the helpers' futex word */
    _Atomic uint32_t sleepers, running, numbered;
    lane lane[];
};

static void enter(lane *l)
{
    while (atomic_exchange_explicit(&l->lock, 1, memory_order_acquire))
        hetccl_pause();
}

static void leave(lane *l) { atomic_store_explicit(&l->lock, 0, memory_order_release); }

/* Without the lock: waiters ask all the time. */
static int has_some(lane *l)
{
    return atomic_load_explicit(&l->taken, memory_order_relaxed) != atomic_load_explicit(&l->posted, memory_order_seq_cst);
}

static int take_from(hx_team *t, lane *l, entry *e)
{
    if (!has_some(l))
        return 0;
    enter(l);
    uint32_t at = atomic_load_explicit(&l->taken, memory_order_relaxed);
    int some = at != atomic_load_explicit(&l->posted, memory_order_relaxed);
    if (some) {
        *e = l->queue[at % ROOM];
        atomic_fetch_add_explicit(&t->running, 1, memory_order_relaxed);
        atomic_store_explicit(&l->taken, at + 1, memory_order_relaxed);
    }
    leave(l);
    return some;
}

static int take(hx_team *t, uint32_t me, entry *e)
{
    for (uint32_t i = 0; i < t->threads; i++)
        if (take_from(t, &t->lane[(me + i) % t->threads], e))
            return 1;
    return 0;
}

static void finish(hx_team *t, const entry *e)
{
    e->run(e->job);
    atomic_store_explicit(e->left, 0, memory_order_release);
    atomic_fetch_sub_explicit(&t->running, 1, memory_order_release);
}

static void sleep_until_posted(hx_team *t)
{
    uint32_t seen = atomic_load_explicit(&t->posted, memory_order_seq_cst);
    atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst);
    int some = atomic_load_explicit(&t->stop, memory_order_seq_cst);
    for (uint32_t i = 0; i < t->threads; i++)
        some |= has_some(&t->lane[i]);
    if (!some)
        hetccl_futex_wait(&t->posted, seen, 500000000u);
    atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_relaxed);
}

static void *work(void *arg)
{
    hx_team *t = arg;
    uint32_t me = 1 + atomic_fetch_add_explicit(&t->numbered, 1, memory_order_relaxed);
    entry e;
    for (uint32_t turn = 0; !atomic_load_explicit(&t->stop, memory_order_relaxed);) {
        if (take(t, me, &e)) {
            finish(t, &e);
            turn = 0;
        } else if (hetccl_wait_turn(&turn, HETCCL_WAIT_PAUSES)) {
            sleep_until_posted(t);
            turn = 0;
        }
    }
    return NULL;
}

hx_team *hx_team_new(int threads)
{
    hx_team *t = threads > 1 ? calloc(1, sizeof *t + (size_t)threads * sizeof *t->lane) : NULL;
    if (!t)
        return NULL;
    t->threads = (uint32_t)threads;
    t->started = 1;
    while (t->started < t->threads && hetccl_thread_start(&t->lane[t->started].helper, NULL, work, t) == 0)
        t->started++;                       /* what lies in the lane of one that did not start is taken by the others */
    return t;
}

void hx_team_free(hx_team *t)
{
    if (!t)
        return;
    hx_team_drained(t);
    atomic_store_explicit(&t->stop, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&t->posted, 1, memory_order_seq_cst);
    hetccl_futex_wake(&t->posted);
    for (uint32_t i = 1; i < t->started; i++)
        pthread_join(t->lane[i].helper, NULL);
    free(t);
}

void hx_team_push(hx_team *t, uint32_t place, hx_job_fn run, void *job, _Atomic uint32_t *left)
{
    lane *l = t ? &t->lane[place % t->threads] : NULL;
    uint32_t at = l ? atomic_load_explicit(&l->posted, memory_order_relaxed) : 0;
    atomic_store_explicit(left, 1, memory_order_relaxed);
    if (!l || at - atomic_load_explicit(&l->taken, memory_order_acquire) == ROOM) {
        run(job);
        atomic_store_explicit(left, 0, memory_order_release);
        return;
    }
    enter(l);
    l->queue[at % ROOM] = (entry){run, job, left};
    atomic_store_explicit(&l->posted, at + 1, memory_order_seq_cst);
    leave(l);
    atomic_fetch_add_explicit(&t->posted, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&t->sleepers, memory_order_seq_cst))
        hetccl_futex_wake(&t->posted);
}

int hx_team_help(hx_team *t)
{
    entry e;
    if (!t || !take(t, 0, &e))
        return 0;
    finish(t, &e);
    return 1;
}

int hx_team_drained(hx_team *t)
{
    if (!t)
        return 1;
    for (uint32_t i = 0; i < t->threads; i++) {
        lane *l = &t->lane[i];
        enter(l);
        atomic_store_explicit(&l->taken, atomic_load_explicit(&l->posted, memory_order_relaxed), memory_order_relaxed);
        leave(l);
    }
    return atomic_load_explicit(&t->running, memory_order_acquire) == 0;
}
