/* SPDX-License-Identifier: Apache-2.0
 * Inside an island: what lies in the shared region, this rank's handle, and how to post and to wait. Private to island_*.c.
 *
 * The region: a head; for each track and rank its flags and a ring of slots; for each rank two small buffers; for each ordered
 * pair a message ring. A large operation is cut up among as many tracks as a rank has threads; they know nothing of each other.
 * A flag counts up and has one writer; the numbers run on from call to call, so nothing is ever reset.
 */
#ifndef HETCCL_ISLAND_LAYOUT_H
#define HETCCL_ISLAND_LAYOUT_H
#include "wait.h"

#include <stddef.h>
#include <string.h>

#include "hetccl/spi.h"
#include "island.h"

#define ISLAND_LAYOUT 3u                      /* changes whenever anything below does */
#define ISLAND_SMALL ((size_t)4096)           /* bytes that go in one exchange */
#define ISLAND_INLINE ((size_t)56)            /* bytes that travel in the flag's own cache line */
#ifndef ISLAND_SLOT
#define ISLAND_SLOT ((size_t)65536)           /* bytes of a ring slot; an operation divides it into lanes */
#endif
#ifndef ISLAND_SLOTS
#define ISLAND_SLOTS 4u
#endif
#define ISLAND_TRACKS 8                       /* 1 where ranks are many: they have no cores to spare */
#define ISLAND_MESSAGES 4u                    /* slots of a pair's message ring */
#define ISLAND_LINE 128                       /* two cache lines: processors fetch them in pairs */

typedef struct island_flag {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;                /* processes asleep on `value`; too high after a death, without harm */
    char data[ISLAND_INLINE];
    char pad[ISLAND_LINE - 64];
} island_flag;

/* What rank r writes and the others read; `small` only on the first track. */
typedef struct island_board {
    island_flag small[2];                     /* exchanges, by their number's parity */
    island_flag sent, done, taken;            /* steps put into the slot; combined; of which no more is read */
} island_board;

typedef struct island_head {
    _Atomic uint32_t layout;                  /* set by the first that opens, compared by the others */
    _Atomic uint32_t aborted;                 /* 0, or 1 + the rank that aborted */
} island_head;

typedef struct island_pair {
    island_flag head, tail;                   /* messages' chunks written, read */
    uint64_t nbytes[ISLAND_MESSAGES][2];      /* of the whole message, of this chunk */
    char pad[ISLAND_LINE - 16 * ISLAND_MESSAGES];
} island_pair;

typedef struct island_track {
    size_t boards, slots;                     /* offsets in the region */
    uint32_t steps;                           /* so far: equal on all ranks between calls */
} island_track;

typedef struct island_team island_team;

/* One page that a fork wipes: in the child `base` is NULL and every call answers HETCCL_INVALID. */
struct hetccl_island {
    char *base;
    size_t nbytes;
    int rank, n, pauses;
    int sharers;                              /* ranks of this host, of other islands, too */
    _Atomic uint64_t timeout_ns;
    _Atomic int32_t waiting_for, failed;      /* failed: HETCCL_OK or HETCCL_TIMED_OUT */
    uint32_t exchanges;                       /* so far: equal on all ranks between calls */
    int threads, tracks;                      /* of this rank; the most of any, 0: nobody has asked yet */
    island_team *team;
    size_t smalls, pairs, pair_bytes, message_bytes;     /* offsets in the region; sizes */
    island_track track[ISLAND_TRACKS];
};

/* A wait that goes on from turn to turn. Zero it after progress. */
typedef struct island_wait {
    uint32_t turn;
    uint64_t deadline;
} island_wait;

/* One turn of waiting until `flag`, of `peer`, has reached `want`: pauses, then yields, then sleeps up to 100 ms.
 * HETCCL_OK: look again. */
int hetccl_island_idle(hetccl_island *s, island_wait *w, island_flag *flag, uint32_t want, int peer);

/* HETCCL_OK if the handle can be used. */
static inline int island_usable(const hetccl_island *s)
{
    if (__builtin_expect(s == NULL || s->base == NULL, 0))
        return HETCCL_INVALID;
    if (__builtin_expect(atomic_load_explicit(&((island_head *)s->base)->aborted, memory_order_relaxed) != 0, 0))
        return hetccl_island_error(s);
    return HETCCL_OK;
}

static inline int island_reached(island_flag *flag, uint32_t want)
{
    return (int32_t)(atomic_load_explicit(&flag->value, memory_order_acquire) - want) >= 0;
}

/* The exchange orders the new value before the look at `sleepers`; a sleeper does the two the other way round. */
static inline void island_post(island_flag *flag, uint32_t value)
{
    atomic_exchange_explicit(&flag->value, value, memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&flag->sleepers, memory_order_seq_cst) != 0, 0))
        hetccl_futex_wake(&flag->value);
}

/* Blocks as hetccl_island_idle does. */
static inline int island_await(hetccl_island *s, island_flag *flag, uint32_t want, int peer)
{
    island_wait w = {0, 0};
    while (!island_reached(flag, want)) {
        int status = hetccl_island_idle(s, &w, flag, want, peer);
        if (__builtin_expect(status != HETCCL_OK, 0))
            return status;
    }
    return HETCCL_OK;
}

static inline int island_finished(hetccl_island *s)
{
    atomic_store_explicit(&s->waiting_for, -1, memory_order_relaxed);
    return HETCCL_OK;
}

static inline int island_tracks_of(int n) { return n <= 16 ? ISLAND_TRACKS : 1; }

static inline island_board *island_track_board(const hetccl_island *s, const island_track *t, int rank)
{
    return (island_board *)(s->base + t->boards) + rank;
}

static inline island_board *island_board_of(const hetccl_island *s, int rank)
{
    return island_track_board(s, &s->track[0], rank);
}

static inline char *island_small_of(const hetccl_island *s, int rank, uint32_t exchange)
{
    return s->base + s->smalls + ((size_t)rank * 2 + (exchange & 1)) * ISLAND_SMALL;
}

static inline char *island_slot_of(const hetccl_island *s, const island_track *t, int rank, uint32_t step)
{
    return s->base + t->slots + ((size_t)rank * ISLAND_SLOTS + step % ISLAND_SLOTS) * ISLAND_SLOT;
}

static inline island_pair *island_pair_of(const hetccl_island *s, int from, int to)
{
    return (island_pair *)(s->base + s->pairs + ((size_t)from * (size_t)s->n + (size_t)to) * s->pair_bytes);
}

static inline char *island_message_of(const hetccl_island *s, island_pair *pair, uint32_t number)
{
    return (char *)(pair + 1) + (size_t)(number % ISLAND_MESSAGES) * s->message_bytes;
}
#endif
