/* SPDX-License-Identifier: Apache-2.0
 * The direct path between ranks of one host: border flows copy straight between the device's memory and a window, memory
 * that both ends of a link share and have registered with their devices (docs/design/device-path.md).
 *
 * A window holds, each way, a ring of slots for contributions, one for results and one for messages, a pair of buffers for words (small
 * exchanges by one kernel), and counters. A chunk is sent when the sender's copy has ended and taken when the receiver's has.
 */
#ifndef HETCCL_DIRECT_H
#define HETCCL_DIRECT_H
#include "executor.h"
#include "team.h"

#define HX_RING_BYTES ((size_t)16 << 20)    /* stays in the last-level cache, 32 would not */
#define HX_SLOTS 4u                         /* of a ring between devices: so large are chunks at most */
#define HX_MOST_SLOTS 32u                   /* of a ring where a rank's memory is the host's; half of them where several are */
#define HX_LEAST_CHUNK ((size_t)512 << 10)
#define HX_WORD_BYTES ((size_t)1 << 20)     /* words of one exchange: half of it is data */
#define HX_BY_HOST_BYTES (64u << 10)        /* up to here two copies and a sum of the host beat a kernel a chunk */
#define HX_PAST_BYTES ((size_t)8 << 20)    /* messages of which so much is not in a cache when somebody reads it */
#define HX_RUN_BYTES ((size_t)2 << 20)     /* of several chunks that a device copies or combines in one go */
#define HX_COMBINERS 4                      /* flows that combine at once; further ones wait */
#define HX_RINGS HETCCL_CHANNELS            /* contributions, results, data of messages */

typedef struct hx_line {
    _Alignas(8) _Atomic uint32_t value;     /* words are put 8 bytes at a time */
    uint32_t pad[31];
} hx_line;

typedef struct hx_note {                    /* what lies in a slot */
    _Alignas(8) uint32_t fingerprint;
    uint32_t nbytes;
} hx_note;

/* The shared words of one ring; free-running counts of chunks. */
typedef struct hx_ring_words {
    hx_line sent, taken;                    /* written by the sender, by the receiver */
    hx_note note[HX_MOST_SLOTS];
} hx_ring_words;

/* What one rank tells the other. */
typedef struct hx_side {
    _Atomic uint64_t announced;             /* sequence and fingerprint of the operation it is in: a mismatch is found so */
    uint32_t pad[30];
    hx_ring_words ring[HX_RINGS];           /* of what this rank sends */
} hx_side;

#define HX_SIDE_AT(side) ((size_t)(side) * 4096)
#define HX_WORDS_AT(side) (((size_t)1 << 20) + (size_t)(side) * 2 * HX_WORD_BYTES)
#define HX_RING_AT(side, channel) (((size_t)8 << 20) + ((size_t)(side) * HX_RINGS + (size_t)(channel)) * HX_RING_BYTES)
#define HX_WINDOW_BYTES HX_RING_AT(2, 0)

typedef struct hx_copy {                    /* of host memory, a slot's */
    char *to;
    const char *from;
    size_t n;
    int past;                               /* past the caches */
    _Atomic uint32_t left;                  /* 1 until it has ended */
} hx_copy;

typedef struct hx_sum_job {                 /* a chunk that the host combines */
    void *dst[HX_FAN + 1];
    const void *src[HX_FAN + 1];
    int n_dst, n_src, dtype, redop;
    size_t count, es;
    int past;                               /* dst[0] goes past the caches */
    double divisor;
    _Atomic int rc;
    _Atomic uint32_t left;
} hx_sum_job;

/* One ring as its sender or its receiver sees it. */
typedef struct hx_ring {
    hx_ring_words *shared;
    char *data;
    uint32_t begun, ended;                  /* chunks whose copy was begun; whose end the other side knows of */
    void *event[HX_MOST_SLOTS];             /* behind a device's copy; of several slots, that of the last */
    uint32_t last[HX_MOST_SLOTS];           /* slot whose event stands for this one's */
    hx_copy copy[HX_MOST_SLOTS];            /* else */
    struct hx_window *wire;                 /* its window, if each rank has a copy of that; NULL: the memory is shared */
} hx_ring;

enum { HX_WAIT_ALL, HX_WAIT_COPY_OUT, HX_WAIT_ROOM, HX_WAIT_DATA, HX_WAIT_COPY_IN, HX_WAIT_SUM, HX_WAITS };

typedef struct hx_window {
    hx_ring out[HX_RINGS], in[HX_RINGS];
    hx_side *mine, *theirs;
    char *words_out, *words_in;
    uint32_t exchanges;                     /* by words so far, the same at both ends */
    int spins;                              /* both ends exchange words */
    char *arrived;                          /* device memory: contributions wait there, slot by slot, to be combined */
    uint32_t arrived_free;                  /* contributions combined so far */
    void *base;                             /* registered with the device, or NULL */
    hx_peer *peer;
    const char *start;
    uint32_t slots;                         /* of its rings, and their bytes */
    size_t slot_bytes;
    uint64_t looked_ns, waits[HX_WAITS];    /* ns; only with copies */
    int copies, status;                     /* each rank has a copy (direct_wire.c); its transport's failure */
    _Atomic uint64_t sent;                  /* bytes that this rank has sent through it */
} hx_window;

enum { HX_HOW_AUTO = 0, HX_HOW_RESIDENT = 1, HX_HOW_KERNEL = 2, HX_HOW_HOST = 3 };
enum { HX_STREAM_OUT = 0, HX_STREAM_IN = 1, HX_STREAM_COMBINE = 2, HX_STREAMS = 2 + HX_COMBINERS };

typedef struct hx_combiner {                /* what a combining flow needs of its own */
    int busy;
    uint32_t base;                          /* chunks announced to its resident kernels so far */
    char *staging;                          /* pinned, a ring of slots: sums of the host */
    void *event[HX_MOST_SLOTS], *fetched[HX_MOST_SLOTS];    /* behind a sum's last device step; behind the copy of the own part */
    uint32_t last[HX_MOST_SLOTS];           /* as in hx_ring, of kernels */
    hx_sum_job sum[HX_MOST_SLOTS];          /* of the host */
} hx_combiner;

typedef struct hx_spin_words {              /* pinned memory that kernels poll */
    hx_line stop, done, arrive[HX_COMBINERS], freed[HX_COMBINERS];
} hx_spin_words;

typedef struct hx_direct {
    int how, may_spin, kernels;             /* how: forced, or HX_HOW_AUTO */
    uint32_t slots;                         /* of a ring, and their bytes; equal on all ranks */
    size_t slot_bytes;
    int hosts;                              /* ranks whose memory is the host's */
    int agreed, closed;                     /* all ranks can: flows go this way; hx_direct_close was called */
    void *stream[HX_STREAMS], *drain[HX_STREAMS], *begin;
    uint32_t fenced[HX_STREAMS];            /* sequence of the work that the stream has been ordered behind */
    uint32_t begun;                         /* sequence of the work whose `begin` was recorded */
    int draining;
    hx_combiner combiner[HX_COMBINERS];
    hx_spin_words *words;
    hx_team *team;                          /* of a rank whose memory is the host's; NULL: it works alone */
    char *scratch;                          /* device memory: a piece a combiner, and one for exchanges of words */
} hx_direct;

/* ---- windows.c */
typedef struct hx_direct_options {
    int how, may_spin;
    int hosts;                              /* ranks whose memory is the host's */
    int threads;                            /* of such a rank copy and sum */
} hx_direct_options;

/* Opens the windows of all linked peers and registers them. HETCCL_OK, or why not (text). Once, before the first operation. */
int hx_direct_open(hx_comm *c, const hx_direct_options *options, char *text, size_t room);
/* All ranks have opened theirs: from now on flows use them. `spinning[rank]`: that rank's kernels may spin. */
void hx_direct_agree(hx_comm *c, const uint8_t *spinning);
int hx_direct_spins(const hx_comm *c);      /* whether this rank's kernels may spin */
void hx_direct_stop(hx_comm *c);            /* kernels that spin shall leave; any thread */
int hx_direct_drained(hx_comm *c);          /* after a failure: whether the device has done with all copies and kernels */
void hx_direct_close(hx_comm *c);           /* unregisters; before the transports unmap. Idempotent */
void hx_direct_free(hx_comm *c);            /* the rest, the words among it: another thread may be in hx_direct_stop until then */
/* Orders stream `which` behind what the work's own stream holds, once a work. */
int hx_direct_fence(hx_comm *c, hx_work *w, int which);
/* Copies host memory into or out of a slot of a ring, by some thread of the rank: hx_slot_test. `past`: nobody reads it soon. */
void hx_slot_copy(hx_comm *c, hx_ring *r, uint32_t slot, char *to, const char *from, size_t n, int past);
int hx_direct_error(hx_comm *c, hx_work *w, int rc, const char *what);

static inline void hx_sent(hx_comm *c, hx_window *win, size_t nbytes)
{
    atomic_fetch_add_explicit(&c->border_sent, nbytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&win->sent, nbytes, memory_order_relaxed);
}

static inline uint64_t hx_direct_sent(const hx_comm *c, int peer)
{
    hx_window *win = c->peers[peer].window;
    return win ? atomic_load_explicit(&win->sent, memory_order_relaxed) : 0;
}

/* The six numbers of a window that each rank has a copy of; 0: it is none. */
static inline int hx_direct_waits(const hx_comm *c, int peer, uint64_t *ns)
{
    const hx_window *win = c->peers[peer].window;
    for (int i = 0; win && i < HX_WAITS; i++)
        ns[i] = win->waits[i];
    return win && win->copies;
}

static inline int hx_goes_direct(const hx_comm *c) { return c->direct && c->direct->agreed; }

/* ---- direct_wire.c: of a window that each rank has a copy of */
int hx_wire_word(hx_window *win, void *where, uint64_t value);          /* a failure shows in hx_wire_move */
int hx_wire_chunk(hx_window *win, const hx_ring *r, uint32_t slot, size_t nbytes);   /* IN_PROGRESS: call again */
/* Notes what a flow waits for: the time since the last look counts for each thing that is not there yet. */
void hx_wire_account(const hx_flow *f, const hx_flow_state *st, hx_window *win, int k, const hx_ring *out, int takes);
/* Moves what is under way along; *all stays set if nothing is left that this rank has put. */
int hx_wire_move(hx_comm *c, hx_work *w, hx_window *win, int rank, int *all);

/* ---- direct.c: as in flows.c */
size_t hx_direct_chunk(const hx_comm *c, size_t nbytes);    /* bytes of a chunk of a message; both ends compute the same */
void hx_direct_begin(hx_work *w, const hx_step *s);
int hx_direct_flow(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t es, int *moved);
hx_ring *hx_direct_out(hx_comm *c, const hx_flow *f, int k);    /* the ring that it uses for that */
/* The next slot of a ring, for chunk t. HETCCL_IN_PROGRESS: all are full. HETCCL_SYSTEM: its counts are damaged. */
int hx_direct_slot(hx_work *w, const hx_flow *f, hx_flow_state *st, int k, size_t es, uint32_t *slot);
/* Tells peer k of the chunks that are in its ring. */
int hx_direct_publish(hx_work *w, const hx_flow *f, hx_flow_state *st, int k, size_t es, int *moved);
/* Whether host memory of this flow goes past the caches: it is much, and the end of the way. The whole message counts, not
 * the segment that this flow carries. */
static inline int hx_direct_past(const hx_work *w, const hx_flow_state *st, size_t es)
{
    size_t n = w->count > st->n ? w->count : st->n;
    return n * es > HX_PAST_BYTES && w->plan->n_calls == 0;
}

/* ---- direct_combine.c */
int hx_combiner_start(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t es);   /* IN_PROGRESS: none is free */
int hx_combiner_run(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t es, int *moved);
void hx_combiner_end(hx_work *w, hx_flow_state *st);
/* The whole flow as one exchange of words. */
int hx_words_fit(const hx_work *w, const hx_flow *f, const hx_flow_state *st, size_t es);
int hx_words_run(hx_work *w, const hx_flow *f, hx_flow_state *st, int *moved);

/* Flows that combine take contributions of peers 0 .. sources - 1. */
static inline int hx_sources(const hx_flow *f)
{
    return f->kind == HX_FLOW_OWN || f->kind == HX_FLOW_EXCHANGE ? f->n_peers : f->kind == HX_FLOW_PASS ? f->n_peers - 1 : 0;
}

static inline int hx_takes(const hx_flow *f, int k)     /* whether a flow takes from its peer k */
{
    return f->kind == HX_FLOW_RECV || f->kind == HX_FLOW_FORWARD ? k == 0 : k < hx_sources(f);
}

static inline int hx_gives(const hx_flow *f, int k)     /* whether it sends to its peer k */
{
    switch (f->kind) {
    case HX_FLOW_SEND: return k == 0;
    case HX_FLOW_FORWARD: return k > 0;
    case HX_FLOW_OWN: return f->give_back;
    case HX_FLOW_PASS: return k == f->n_peers - 1;
    case HX_FLOW_EXCHANGE: return 1;
    default: return 0;
    }
}

static inline size_t hx_chunk_at(const hx_flow_state *st, uint32_t t)   /* elements of chunk t */
{
    size_t at = (size_t)t * st->chunk;
    return st->n - at < st->chunk ? st->n - at : st->chunk;
}

/* Of `n` chunks from a slot on, how many a device may take in one go: they lie side by side, and the other end does not wait
 * long for the first. A call of the driver costs as much as the copy of 256 KiB, so a rank that lags behind catches up. */
static inline uint32_t hx_run(const hx_direct *d, const hx_flow_state *st, size_t es, uint32_t slot, uint32_t n)
{
    uint32_t most = st->chunk * es == d->slot_bytes ? (uint32_t)(HX_RUN_BYTES / d->slot_bytes) : 1, side = d->slots - slot;
    n = n < side ? n : side;
    return n < most ? n : most > 1 ? most : 1;
}

/* Elements of the `n` chunks from t on. */
static inline size_t hx_chunks_at(const hx_flow_state *st, uint32_t t, uint32_t n)
{
    return (size_t)(n - 1) * st->chunk + hx_chunk_at(st, t + n - 1);
}

/* Whether the copy of a slot has ended. */
static inline int hx_slot_test(hx_comm *c, hx_ring *r, uint32_t slot)
{
    if (!c->host_memory)
        return c->dev->event_query(c->dev_ctx, r->event[r->last[slot]]);
    return atomic_load_explicit(&r->copy[slot].left, memory_order_acquire) ? HETCCL_IN_PROGRESS : HETCCL_OK;
}

/* Gives a slot of a ring back to its sender. */
static inline void hx_taken(hx_ring *r)
{
    atomic_store_explicit(&r->shared->taken.value, ++r->ended, memory_order_release);
    if (r->wire)
        hx_wire_word(r->wire, &r->shared->taken.value, r->ended);
}

/* Tells the receiver that the next slot's data is there. HETCCL_IN_PROGRESS: not yet, call again. */
static inline int hx_give(hx_ring *r, uint32_t slot, size_t nbytes)
{
    int rc = r->wire ? hx_wire_chunk(r->wire, r, slot, nbytes) : HETCCL_OK;
    if (rc == HETCCL_OK)
        atomic_store_explicit(&r->shared->sent.value, ++r->ended, memory_order_release);
    return rc;
}

/* Whether the receiver has taken all that was sent. */
static inline int hx_all_taken(const hx_ring *r)
{
    return atomic_load_explicit(&r->shared->taken.value, memory_order_acquire) == r->begun;
}
#endif
