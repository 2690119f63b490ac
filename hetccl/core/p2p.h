/* SPDX-License-Identifier: Apache-2.0
 * Point to point, shared by p2p.c (matching) and p2p_wire.c (what goes over a link).
 *
 * A link has one sender, which dialled it, and one receiver. Messages are numbered per link and matched by tag in the order
 * sent. Up to EAGER bytes and while the credit lasts, data follows its header at once and is buffered by a receiver that has
 * not asked yet; beyond, a header announces the message and the data waits for the receiver's go-ahead. Control records are
 * HETCCL_CHANNEL_P2P messages of sizeof(record) bytes; data follows in messages of at most max_message.
 */
#ifndef HETCCL_P2P_H
#define HETCCL_P2P_H
#include "executor.h"

#define EAGER (64u << 10)
#define CREDIT (1u << 20)                   /* unacknowledged eager bytes a link */
#define HEADERS 64u                         /* headers of sends that are queued at once; answers come on top */
#define READS 256                           /* messages taken at once from one link, so that the others have their turn */
#define CONTROL 0x70327063u                 /* fingerprints of control records and of data */
#define DATA 0x70327064u

enum { R_EAGER = 1, R_ANNOUNCE = 2, R_DATA = 3, R_GO = 4, R_ACK = 5 };
enum { S_COPY = 0, S_READY = 1, S_ANNOUNCED = 2, S_QUEUED = 3, S_ACTIVE = 4, S_COPY_OUT = 5, S_DONE = 6 };

typedef struct record {
    uint32_t kind, message;
    int32_t tag;
    uint32_t pad;
    uint64_t nbytes;
} record;

typedef struct arrival {                    /* announced or buffered, not asked for yet */
    struct arrival *next;
    record r;
    char *data;                             /* eager: the bytes */
    size_t got;
} arrival;

typedef struct plink {
    struct plink *next;
    const hetccl_transport_ops *ops;
    void *ctx, *ep;
    int peer, outgoing;
    int dead;                               /* the peer has gone: what had arrived can still be read */
    uint32_t messages;                      /* sender: numbered so far */
    size_t unacked;
    /* what is being written: records go first, then the data of the active send */
    record *out, writing;                   /* a ring, and its head on its way out */
    uint32_t out_room, out_head, out_tail;  /* room: a power of two, or 0 */
    hx_work *active;                        /* sender: its data is under way */
    size_t active_sent, active_begun;       /* bytes; begun: direct path only */
    hx_work *sends, *sends_tail;            /* in order; announced ones wait here too */
    /* receiver */
    arrival *arrivals, *arrivals_tail;
    arrival *filling;                       /* data of an eager message nobody asked for goes here ... */
    hx_work *into;                          /* ... or straight to the one who did */
    size_t left;
    size_t into_at, into_begun;
} plink;

struct hx_p2p {
    plink *links;
    hx_work *recvs, *recvs_tail;            /* posted, in order */
    int n_links;
};

/* p2p_wire.c; the communicator's lock is held in all of them */
/* Queues a record. What comes in is always read and answered, whatever waits to go out: two ends that stopped reading until
 * they could write would wait for each other. So the queue grows, by at most two records an unfinished message. */
void hx_p2p_put(hx_comm *c, plink *l, uint32_t kind, uint32_t message, int32_t tag, uint64_t nbytes);
int hx_p2p_start_sends(hx_comm *c, plink *l);
int hx_p2p_write(hx_comm *c, plink *l);
int hx_p2p_read(hx_comm *c, plink *l);

/* direct_p2p.c: the data of an announced message goes through the window. HETCCL_OK when all of it has ended. */
int hx_p2p_direct(const hx_comm *c, int peer, size_t nbytes);
int hx_p2p_push(hx_comm *c, plink *l, int *moved);
int hx_p2p_pull(hx_comm *c, plink *l, int *moved);

/* p2p.c */
void hx_p2p_done(hx_comm *c, hx_work *w, hx_work **head, hx_work **tail);
void hx_p2p_handle(hx_comm *c, plink *l, const record *r);
void hx_p2p_received(hx_comm *c, hx_work *w);
#endif
