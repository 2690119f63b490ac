/* SPDX-License-Identifier: Apache-2.0
 * What ring.c (messages), doorbell.c (sleeping) and link.c (layout, life cycle) share.
 */
#ifndef HETCCL_SHM_RING_PRIVATE_H
#define HETCCL_SHM_RING_PRIVATE_H
#include <stdatomic.h>
#include <sys/types.h>

#include "ring.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

enum { SLEEPING = 1u, CLOSED = 2u };           /* bits of a rank's state word */
enum {                                         /* slot header, flags: where the payload lies */
    IN_LINE = 1u,                              /* in the header's own line */
    ANSWERED = 2u                              /* in the receiver's own contribute slot, named by `place` */
};
#define SIZE_IN_LINE 0x80000000u               /* private note of reserve: the same */

typedef struct slot_header {
    _Atomic uint32_t sequence;                 /* position of the message + 1, stored last */
    _Atomic uint32_t nbytes, fingerprint, flags;
    union {
        uint8_t payload[HETCCL_SHM_INLINE];
        _Atomic uint32_t place;                /* ANSWERED: position of the contribution that was answered */
    };
} slot_header;
_Static_assert(sizeof(slot_header) == 64, "a slot header is one cache line");

/* Positions are free-running message numbers; slot = position modulo the number of slots. */
typedef struct out_ring {
    slot_header *headers;
    uint8_t *data;
    _Atomic uint32_t *released;                /* shared, written by the peer */
    uint32_t *sizes;                           /* what was reserved, by slot */
    uint32_t slots, reserved, committed, released_seen;
    uint32_t waiting;                          /* the last reserve found no room */
    uint8_t *lent;                             /* contribute only, by slot: holds an answer that is not released yet */
} out_ring;

typedef struct in_ring {
    slot_header *headers;
    uint8_t *data;
    _Atomic uint32_t *released;                /* shared, written by this rank */
    uint32_t slots, head;                      /* head: oldest unreleased position */
    uint32_t scanned;                          /* result only: answers before this position are in `lent` or released */
    uint32_t noticed;                          /* every position before this one was peeked at or announced by arm */
} in_ring;

struct hetccl_shm_ep {
    in_ring in[HETCCL_CHANNELS];
    out_ring out[HETCCL_CHANNELS];
    _Atomic uint32_t *mine, *theirs;           /* state words */
    hetccl_shm *shm;
    int error;                                 /* sticky; 0 while the endpoint works */
    int peer_doorbell, closed_noticed;
    uint32_t peer, slot_bytes;
    hetccl_transport_counters counters;
    void *region;                              /* the rings */
    size_t region_bytes;
    void *window;
    int side;                                  /* 0: dialer */
    hetccl_shm_ep *next;
    uint32_t *sizes;                           /* backs out[].sizes and out[].lent */
};

struct hetccl_shm {
    hetccl_table table;
    hetccl_transport_ops ops;
    uint32_t rank, slots, slot_bytes;
    int doorbell;
    pid_t pid;
    _Atomic uint32_t armed;
    _Atomic(hetccl_shm_ep *) first;            /* only ever grows at the front until it is freed */
    char text[256];
};

/* Keeps the text for last_error and returns `status`. */
__attribute__((cold, format(printf, 3, 4)))
int hetccl_shm_fail(hetccl_shm *shm, int status, const char *format, ...);

__attribute__((cold))
void hetccl_shm_ring_doorbell(hetccl_shm_ep *ep);

/* Called after a store that the peer may be waiting for. The fence stands against the one in arm(): either we see its
 * SLEEPING or it sees our store. Returns the peer's state. */
static inline uint32_t wake_peer(hetccl_shm_ep *ep)
{
    atomic_thread_fence(memory_order_seq_cst);
    uint32_t state = atomic_load_explicit(ep->theirs, memory_order_relaxed);
    if (UNLIKELY(state & SLEEPING))
        hetccl_shm_ring_doorbell(ep);
    return state;
}

static inline int arrived(const in_ring *in, uint32_t position)
{
    const slot_header *header = &in->headers[position & (in->slots - 1)];
    return atomic_load_explicit(&header->sequence, memory_order_acquire) == position + 1;
}

/* Marks an endpoint as one whose owner sleeps; the peer's next commit or release then rings. */
void hetccl_shm_lie_down(hetccl_shm_ep *ep);

int hetccl_shm_window(void *ctx, void *handle, hetccl_window_args *args);

int hetccl_shm_arm(void *ctx);
int hetccl_shm_disarm(void *ctx);
int hetccl_shm_wait_fds(void *ctx, int *fds, uint32_t max, uint32_t *n);

/* The table, for messages of at most `slot_bytes` bytes. */
hetccl_transport_ops hetccl_shm_ops(uint32_t slot_bytes);
int hetccl_shm_ep_close(hetccl_shm_ep *ep);
#endif
