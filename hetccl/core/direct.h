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

#define HX_SLOTS 4u                         /* of a ring */
#define HX_SLOT_BYTES ((size_t)4 << 20)     /* a ring of 16 MiB stays in the last-level cache, one of 32 does not */
#define HX_LEAST_CHUNK ((size_t)512 << 10)
#define HX_WORD_BYTES ((size_t)1 << 20)     /* words of one exchange: half of it is data */
#define HX_BY_HOST_BYTES (64u << 10)        /* up to here two copies and a sum of the host beat a kernel a chunk */
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
    hx_note note[HX_SLOTS];
    uint32_t pad[32 - 2 * HX_SLOTS];
} hx_ring_words;

/* What one rank tells the other. */
typedef struct hx_side {
    _Atomic uint64_t announced;             /* sequence and fingerprint of the operation it is in: a mismatch is found so */
    uint32_t pad[30];
    hx_ring_words ring[HX_RINGS];           /* of what this rank sends */
} hx_side;

#define HX_SIDE_AT(side) ((size_t)(side) * 4096)
#define HX_WORDS_AT(side) (((size_t)1 << 20) + (size_t)(side) * 2 * HX_WORD_BYTES)
#define HX_RING_AT(side, channel) (((size_t)8 << 20) + ((size_t)(side) * HX_RINGS + (size_t)(channel)) * HX_SLOTS * HX_SLOT_BYTES)
#define HX_WINDOW_BYTES HX_RING_AT(2, 0)

/* One ring as its sender or its receiver sees it. */
typedef struct hx_ring {
    hx_ring_words *shared;
    char *data;
    uint32_t begun, ended;                  /* chunks whose copy was begun; whose end the other side knows of */
    void *event[HX_SLOTS];                  /* behind the copy of a slot */
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
    uint64_t looked_ns, waits[HX_WAITS];    /* ns; only with copies */
    int copies, status;                     /* each rank has a copy (direct_wire.c); its transport's failure */
    _Atomic uint64_t sent;                  /* bytes that this rank has sent through it */
} hx_window;

enum { HX_HOW_AUTO = 0, HX_HOW_RESIDENT = 1, HX_HOW_KERNEL = 2, HX_HOW_HOST = 3 };
enum { HX_STREAM_OUT = 0, HX_STREAM_IN = 1, HX_STREAM_COMBINE = 2, HX_STREAMS = 2 + HX_COMBINERS };

typedef struct hx_combiner {                /* what a combining flow needs of its own */
    int busy;
    uint32_t base;                          /* chunks announced to its resident kernels so far */
    char *staging;                          /* pinned, HX_SLOTS slots: sums of the host */
    void *event[HX_SLOTS], *fetched[HX_SLOTS];  /* behind a sum's last device step; behind the copy of the own part */
} hx_combiner;

typedef struct hx_spin_words {              /* pinned memory that kernels poll */
    hx_line stop, done, arrive[HX_COMBINERS], freed[HX_COMBINERS];
} hx_spin_words;

typedef struct hx_direct {
    int how, may_spin, kernels;             /* how: forced, or HX_HOW_AUTO */
    size_t most;                            /* bytes of a chunk at most, equal on all ranks */
    int agreed;                             /* all ranks can: flows go this way */
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
    int hosts;                              /* some rank's memory is the host's */
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
/* Orders stream `which` behind what the work's own stream holds, once a work. */
int hx_direct_fence(hx_comm *c, hx_work *w, int which);
void hx_direct_copy(hx_comm *c, char *to, const char *from, size_t n);   /* host memory, by all threads of the rank */
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
size_t hx_direct_chunk(size_t nbytes, size_t most);     /* bytes of a chunk of a message; both ends compute the same */
void hx_direct_begin(hx_work *w, const hx_step *s);
int hx_direct_flow(hx_work *w, const hx_flow *f, hx_flow_state *st, size_t es, int *moved);

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

static inline size_t hx_chunk_at(const hx_flow_state *st, uint32_t t)   /* elements of chunk t */
{
    size_t at = (size_t)t * st->chunk;
    return st->n - at < st->chunk ? st->n - at : st->chunk;
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
