/* SPDX-License-Identifier: Apache-2.0
 * The life of an island's handle, its end, and waiting.
 */
#include "island_impl.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define PAGE ((size_t)4096)
#define SLEEP_NS 100000000u                   /* so that a deadline or an abort whose wake-up went astray is noticed */

_Static_assert(sizeof(island_flag) == ISLAND_LINE, "a flag has its own pair of cache lines");
_Static_assert(sizeof(island_pair) % ISLAND_LINE == 0, "messages begin on a cache line");
_Static_assert(sizeof(struct hetccl_island) <= PAGE, "a handle is one page");
_Static_assert((ISLAND_SLOTS & (ISLAND_SLOTS - 1)) == 0, "step numbers wrap");
_Static_assert(sizeof(island_head) <= PAGE, "the head is one page");

static size_t place(hetccl_island *s, int n);
static void wake_all(hetccl_island *s);

int hetccl_island_open(int fd, int rank, int n, int local_ranks, uint64_t timeout_ns, hetccl_island **out)
{
    struct stat st;
    size_t nbytes = hetccl_island_region_bytes(n);
    if (nbytes == 0 || rank < 0 || rank >= n || timeout_ns == 0 || fstat(fd, &st) != 0 || (uint64_t)st.st_size < nbytes)
        return HETCCL_INVALID;
    char *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return HETCCL_NO_MEMORY;
    hetccl_island *s = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) {
        munmap(base, nbytes);
        return HETCCL_NO_MEMORY;
    }
    uint32_t found = 0, layout = ISLAND_LAYOUT << 16 | (uint32_t)n;
    if (madvise(base, nbytes, MADV_DONTFORK) != 0 || madvise(s, PAGE, MADV_WIPEONFORK) != 0 ||
        (!atomic_compare_exchange_strong_explicit(&((island_head *)base)->layout, &found, layout, memory_order_acq_rel,
                                                  memory_order_acquire) &&
         found != layout)) {
        munmap(base, nbytes);
        munmap(s, PAGE);
        return found != 0 && found != layout ? HETCCL_MISMATCH : HETCCL_SYSTEM;
    }
    s->base = base;
    s->nbytes = nbytes;
    s->rank = rank;
    s->n = n;
    s->sharers = local_ranks > n ? local_ranks : n;
    s->pauses = hetccl_wait_pauses(s->sharers);
    s->timeout_ns = timeout_ns;
    s->waiting_for = -1;
    s->threads = 1;
    place(s, n);
    *out = s;
    return HETCCL_OK;
}

void hetccl_island_destroy(hetccl_island *s)
{
    if (!s)
        return;
    island_team_free(s->team);                /* a fork has wiped it: it has no such threads */
    if (s->base)
        munmap(s->base, s->nbytes);
    munmap(s, PAGE);
}

size_t hetccl_island_region_bytes(int n)
{
    hetccl_island s;
    return n < 1 || n > HETCCL_ISLAND_RANKS_MAX ? 0 : place(&s, n);
}

void hetccl_island_abort(hetccl_island *s)
{
    uint32_t nobody = 0;
    if (!s || !s->base)
        return;
    atomic_compare_exchange_strong_explicit(&((island_head *)s->base)->aborted, &nobody, (uint32_t)s->rank + 1,
                                            memory_order_seq_cst, memory_order_seq_cst);
    wake_all(s);
}

int hetccl_island_error(const hetccl_island *s)
{
    if (!s || !s->base)
        return HETCCL_INVALID;
    int failed = atomic_load_explicit(&s->failed, memory_order_relaxed);
    if (failed != HETCCL_OK)
        return failed;
    return hetccl_island_aborted_by(s) >= 0 ? HETCCL_ABORTED : HETCCL_OK;
}

int hetccl_island_aborted_by(const hetccl_island *s)
{
    if (!s || !s->base)
        return -1;
    return (int)atomic_load_explicit(&((island_head *)s->base)->aborted, memory_order_relaxed) - 1;
}

int hetccl_island_waiting_for(const hetccl_island *s)
{
    return s && s->base ? atomic_load_explicit(&s->waiting_for, memory_order_relaxed) : -1;
}

int hetccl_island_rank(const hetccl_island *s) { return s->rank; }
int hetccl_island_size(const hetccl_island *s) { return s->n; }

void hetccl_island_set_threads(hetccl_island *s, int threads) { s->threads = threads < 1 ? 1 : threads > 64 ? 64 : threads; }

void hetccl_island_set_timeout(hetccl_island *s, uint64_t timeout_ns)
{
    atomic_store_explicit(&s->timeout_ns, timeout_ns, memory_order_relaxed);
}

int hetccl_island_idle(hetccl_island *s, island_wait *w, island_flag *flag, uint32_t want, int peer)
{
    if (atomic_load_explicit(&((island_head *)s->base)->aborted, memory_order_relaxed) != 0)
        return hetccl_island_error(s);
    int sleep = hetccl_wait_turn(&w->turn, s->pauses);
    if (!sleep && w->turn % 64 != 63)         /* reading the clock at every turn would double its cost */
        return HETCCL_OK;
    atomic_store_explicit(&s->waiting_for, peer, memory_order_relaxed);
    uint64_t now = hetccl_now_ns();
    if (w->deadline == 0)
        w->deadline = now + atomic_load_explicit(&s->timeout_ns, memory_order_relaxed);
    if (now >= w->deadline) {
        atomic_store_explicit(&s->failed, HETCCL_TIMED_OUT, memory_order_relaxed);
        hetccl_island_abort(s);
        return HETCCL_TIMED_OUT;
    }
    if (sleep) {
        uint64_t left = w->deadline - now;
        atomic_fetch_add_explicit(&flag->sleepers, 1, memory_order_seq_cst);
        uint32_t value = atomic_load_explicit(&flag->value, memory_order_seq_cst);
        if ((int32_t)(value - want) < 0)
            hetccl_futex_wait(&flag->value, value, left < SLEEP_NS ? left : SLEEP_NS);
        atomic_fetch_sub_explicit(&flag->sleepers, 1, memory_order_relaxed);
    }
    return HETCCL_OK;
}

/* Lays the region of n ranks out; returns its bytes. */
static size_t place(hetccl_island *s, int n)
{
    size_t ranks = (size_t)n, at = PAGE;
    s->n = n;
    for (int i = 0; i < island_tracks_of(n); i++) {
        s->track[i].boards = at;
        at += (ranks * sizeof(island_board) + PAGE - 1) / PAGE * PAGE;
    }
    s->smalls = at;
    at += ranks * 2 * ISLAND_SMALL;
    for (int i = 0; i < island_tracks_of(n); i++) {
        s->track[i].slots = at;
        at += ranks * ISLAND_SLOTS * ISLAND_SLOT;
    }
    s->pairs = at;
    s->message_bytes = n <= 16 ? 16384 : 4096;
    s->pair_bytes = (sizeof(island_pair) + ISLAND_MESSAGES * s->message_bytes + PAGE - 1) / PAGE * PAGE;
    return at + ranks * ranks * s->pair_bytes;
}

/* A wake-up for everybody asleep in a collective: they see `aborted`. Sleepers in send and recv see it within SLEEP_NS. */
static void wake_all(hetccl_island *s)
{
    for (int i = 0; i < s->n * island_tracks_of(s->n); i++) {
        island_board *b = island_track_board(s, &s->track[i / s->n], i % s->n);
        island_flag *flags[] = {&b->small[0], &b->small[1], &b->sent, &b->done, &b->taken};
        for (size_t k = 0; k < sizeof flags / sizeof *flags; k++)
            if (atomic_load_explicit(&flags[k]->sleepers, memory_order_seq_cst) != 0)
                hetccl_futex_wake(&flags[k]->value);
    }
}
