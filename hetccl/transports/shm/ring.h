/* SPDX-License-Identifier: Apache-2.0
 * Shared-memory rings between two ranks of one host, as a transport_ops table.
 *
 * A link is one sealed memfd mapped by both ranks. It holds, for every channel and each direction, a ring of `slots`
 * slots. A slot has a header in a cache line of its own (sequence, length, fingerprint, and up to 48 bytes of payload,
 * so that a small message costs one cache-line transfer) and a page-aligned data area of `slot_bytes` bytes.
 *
 * The sender writes payload and header and stores the slot's sequence word last; the receiver polls that word. Credit
 * comes back through one counter a ring, in a line of its own, which the sender reads only when its known credit is
 * used up. Nothing else is shared while messages flow, except one word a rank that says "sleeping" or "closed" and that
 * the peer reads after each commit and release.
 */
#ifndef HETCCL_SHM_RING_H
#define HETCCL_SHM_RING_H
#include <stddef.h>
#include <stdint.h>

#include "hetccl/spi.h"

#define HETCCL_SHM_INLINE 48u                  /* bytes of payload that fit beside the header */
#define HETCCL_SHM_MIN_SLOT 4096u              /* slot_bytes: a power of two within these bounds */
#define HETCCL_SHM_MAX_SLOT (16u << 20)
#define HETCCL_SHM_MIN_SLOTS 2u                /* slots: a power of two within these bounds */
#define HETCCL_SHM_MAX_SLOTS 1024u
#define HETCCL_SHM_WINDOW ((size_t)128 << 20)  /* bytes after the rings for hetccl_transport_ops.window; sparse */

typedef struct hetccl_shm hetccl_shm;          /* one rank in one communicator: table, doorbell, endpoints */
typedef struct hetccl_shm_ep hetccl_shm_ep;    /* one rank's end of one link */

typedef struct hetccl_shm_link {
    uint32_t dialer, acceptor;                 /* ranks */
    int32_t create;                            /* 1: this rank is the dialer and lays the region out; 0: it checks it */
    int32_t region_fd;                         /* stays the caller's, who may close it afterwards */
    int32_t peer_doorbell;                     /* eventfd of the peer; the endpoint owns it once attach has succeeded */
} hetccl_shm_link;

/* `doorbell` is this rank's eventfd (non-blocking); it stays the caller's. NULL: no memory. The sizes must be valid. */
hetccl_shm *hetccl_shm_new(uint32_t rank, uint32_t slots, uint32_t slot_bytes, int doorbell);
const hetccl_table *hetccl_shm_table(hetccl_shm *shm);
int hetccl_shm_valid(uint64_t slots, uint64_t slot_bytes);
size_t hetccl_shm_region_bytes(uint32_t slots, uint32_t slot_bytes);   /* rings and window */

/* Maps and prefaults a link. Any thread, also beside calls on other endpoints. On failure `last_error` has the text. */
int hetccl_shm_attach(hetccl_shm *shm, const hetccl_shm_link *link, hetccl_shm_ep **ep);

/* Closes every endpoint and unmaps its region; no other call may run. The table stays callable: every call answers
 * HETCCL_INVALID. In a forked child it only forgets. Idempotent. */
void hetccl_shm_close(hetccl_shm *shm);
void hetccl_shm_free(hetccl_shm *shm);
#endif
