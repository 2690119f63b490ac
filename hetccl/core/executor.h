/* SPDX-License-Identifier: Apache-2.0
 * The engine: communicators, works in flight, and who drives them.
 *
 * A work is driven by one thread at a time, whoever holds its communicator's `driver` lock: the caller of a blocking
 * operation, a waiter, or the progress thread. Collectives of a communicator run first in, first out; point-to-point works run
 * beside them. Nothing here takes the GIL.
 */
#ifndef HETCCL_EXECUTOR_H
#define HETCCL_EXECUTOR_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "hetccl/spi.h"
#include "board.h"
#include "combine.h"
#include "plan.h"
#include "trace.h"
#include "wait.h"
#include <pthread.h>
#include <stdatomic.h>

#define HX_TEXT 512
#define HX_TRANSPORTS 4
#define HX_EVENTS 16
#define HX_POLL 1024                /* descriptors that a sleeper watches at most */
#define HX_INLINE_BYTES 65536u      /* a BLOCKING vendor call up to here runs on the thread that drives (design D7) */
#define HX_GRACE_NS 250000000ull    /* without progress for so long, a lost peer fails the work ... */
#define HX_FAREWELL_NS 1000000000ull /* ... and after so long one that left, or whose link broke: it may only be the first to
                                       * fail of what will soon be known to have another cause */

typedef struct hx_transport {
    const hetccl_transport_ops *ops;
    void *ctx;
} hx_transport;

typedef struct hx_peer {
    const hetccl_transport_ops *ops;   /* NULL: no link */
    void *ctx, *ep;
    size_t max_message;
    int slots;                         /* reserve and commit write where the peer reads */
    int answers;                       /* a contribution's own memory can carry the result back */
    int broken;                        /* the link reports its peer as gone */
    uint64_t trouble_ns;               /* when that, or a farewell, was noticed first */
    struct hx_window *window;          /* of the direct path, or NULL */
} hx_peer;

#define HX_SUMS 4                   /* chunks that the device combines at once, for border flows */

typedef struct hx_sum {                /* one of them: device_sum.c */
    void *event;
    char *memory;                      /* of the device: the contributions, the first of which becomes the result */
    size_t cap;
    int busy;
} hx_sum;

typedef struct hx_group {              /* a vendor's communicator of some ranks of the island, one after another */
    void *comm;                        /* NULL: this rank is not in it */
    int32_t first, size;               /* island ranks */
} hx_group;

typedef struct hx_flow_state {
    char *src, *dst;
    size_t n, pos;                     /* elements; done so far (combined, sent or received) */
    size_t sent[HX_FAN];               /* elements sent to each peer */
    int done;
    int sum;                           /* place in hx_comm.sums of the chunk that the device combines, -1: none */
    /* direct path (direct.h); counts of chunks */
    size_t chunk;                      /* elements */
    uint32_t chunks, combine_begun, combined, fetch_begun, fetched;
    uint32_t out_begun[HX_FAN], out_ended[HX_FAN], in_begun[HX_FAN], in_ended[HX_FAN];
    int started, combiner, how;
} hx_flow_state;

typedef struct hx_lane_state {
    int64_t iteration;
    int32_t index;                     /* position in plan->lane_steps */
    int32_t running;                   /* a vendor call is on the lane thread, or flows are under way */
    int32_t turn;                      /* which flow of the step that is under way tries first */
} hx_lane_state;

typedef struct hx_work {
    struct hx_work *next;
    struct hx_comm *comm;
    const hx_plan *plan;
    /* bound when submitted */
    char *in, *out;                    /* device addresses the plan works on */
    char *user_in, *user_out;          /* host memory of the caller when staged, else NULL */
    uint64_t count, segment;
    double factor;                     /* of premul_sum: this rank's own */
    int64_t segments;
    uint32_t fingerprint, sequence;
    uint64_t deadline_ns;
    /* state */
    int32_t bound;                     /* 0 queued, 1 running, 2 final */
    hx_lane_state lane[HX_LANES];
    int64_t *done;                     /* per step: segments completed */
    hx_flow_state *flow;
    int32_t step_cap, flow_cap;
    void *events[HX_EVENTS];           /* created with the work's first use on a stream device */
    int32_t event_step[HX_EVENTS], event_head, event_tail, last_recorded, n_events;
    int32_t staged_in, touched;        /* touched: something was enqueued on its stream */
    _Atomic uint32_t finished;         /* futex word: 1 when status is final */
    _Atomic uint32_t waiting;          /* somebody sleeps on `finished` */
    int32_t status;
    int32_t asynchronous;
    int32_t source;                    /* rank that a recv from any source got its message from */
    void *owner;                       /* the Python object, for the completion thread */
    /* streams: streamed.c */
    void *stream;                      /* device work is enqueued here: the communicator's stream, or the caller's */
    void *caller;                      /* the caller's stream, if has_caller: its work so far comes first */
    int32_t has_caller, streamed;      /* streamed: all is enqueued, nothing is left to drive; ends at edge[1] */
    int32_t captured;                  /* the caller's stream was being captured into a graph when it was enqueued */
    void *edge[2];                     /* events: on the caller's stream at the call; behind the last device step */
    char text[HX_TEXT];
    /* point to point (plan is NULL): p2p.c */
    int32_t sending, peer, tag, p2p_state;
    uint32_t message;                  /* number of the message on its link */
    size_t nbytes, p2p_done;
    int32_t p2p_device;                /* p2p_ptr is the device's memory: its data goes by the direct path */
    char *p2p_ptr;                     /* host memory that is sent from or received into */
    int32_t p2p_staged;                /* p2p_ptr is p2p_staging */
    char *p2p_staging;                 /* pinned, for device memory; kept for later messages */
    size_t p2p_room;
    struct hx_work *p2p_next;
} hx_work;

typedef struct hx_comm {
    int32_t rank, size;
    int32_t pauses, forked, check;     /* check: meet on the board before blocking vendor calls */
    int32_t local_ranks;               /* of the communicator on this host */
    uint32_t yields;                   /* before the driver sleeps: HETCCL_WAIT_YIELDS, fewer after long waits */
    uint64_t news_ns;                  /* when the device last ended something that the driver waits for */
    const hetccl_device_ops *dev;
    void *dev_ctx;
    const hetccl_ccl_ops *ccl;
    void *ccl_ctx, *ccl_comm;
    int32_t island_rank;
    hx_group *groups;                  /* a step's group g is groups[g - 1]; 0 is the whole island */
    int32_t n_groups;
    int32_t *island_ranks;             /* ranks of my island that share my board, in the order of their processes: turns.c */
    int32_t n_island_local;
    int host_memory, streaming;        /* of the device; of the ccl */
    void *stream, *last_stream, *order_event;  /* the vendor's calls are ordered also where they change streams */
    int last_stream_set, engine_bound;
    size_t chunk_bytes;                /* equal on all ranks */
    hx_peer *peers;                    /* by rank; the collective link */
    hx_transport transports[HX_TRANSPORTS];
    int32_t n_transports;
    hx_board *board;
    uint32_t meets, turns;
    int32_t turn_before;               /* the rank whose process is taken before mine, -1: none */
    int32_t ordered;                   /* HETCCL_ORDER=island: calls that only enqueue are taken in turn, too */
    /* scratch, grown between works */
    hx_sum sums[HX_SUMS];
    void *sum_stream;
    char *device_scratch, *host_scratch, *staged_in, *staged_out;
    size_t device_cap, host_cap, staged_in_cap, staged_out_cap;
    _Atomic(struct hx_aside *) aside;  /* outgrown, not given back yet */
    int spinning;                      /* kernels of it that wait for words: memory.c */
    /* queue */
    pthread_mutex_t lock;              /* queue, free list, p2p lists */
    pthread_mutex_t driver;
    hx_work *head, *tail, *free_works;
    hx_work *streamed_head, *streamed_tail;
    _Atomic uint32_t pending;          /* works in the queue, streamed works and point-to-point works */
    _Atomic uint32_t n_streamed;
    uint32_t sequence;
    _Atomic uint32_t failed;           /* hetccl_status once the communicator is dead */
    char fail_text[HX_TEXT];
    int32_t fail_ranks[8], n_fail_ranks;
    _Atomic uint32_t aborted;
    int32_t island_aborted;            /* a mate aborted the vendor's call: hx_comm_check finds out why */
    uint64_t aborted_ns, drain_since, lane_since;
    void *drain_event;
    int hangs;                         /* at the end somebody was inside, or the device had not done: all stays for good */
    uint64_t moves, moves_seen, progress_ns, looked_ns; /* driver lock */
    int kick_fd;                       /* eventfd: wakes whoever sleeps on this communicator */
    _Atomic uint32_t sleeping;
    /* lane thread for blocking vendor calls */
    pthread_t lane_thread;
    int lane_started, lane_stop;
    _Atomic uint32_t lane_word;        /* 0 idle, 1 posted, 2 done */
    hx_work *lane_work;
    const hx_step *lane_step;
    int64_t lane_segment;
    int lane_status;
    _Atomic uint32_t lane_abandoned;
    _Atomic uint32_t in_call;          /* a BLOCKING vendor call runs on the driving thread, which cannot look at anything */
    _Atomic uint64_t call_deadline_ns;
    struct hx_p2p *p2p;
    struct hx_direct *direct;          /* the direct path of its flows (direct.h), or NULL */
    hx_trace *trace;                   /* NULL: nobody wants to know */
    /* counters */
    _Atomic uint64_t n_ops[16], vendor_calls[8], group_calls, border_sent, staged_bytes, device_sums, past_bytes;
    struct hx_comm *engine_next;
    int in_engine;
} hx_comm;

/* ---- comm.c */
hx_comm *hx_comm_new(int rank, int size);
void hx_comm_free(hx_comm *c);
hx_work *hx_work_get(hx_comm *c, const hx_plan *p);      /* from the free list; NULL if memory is out */
void hx_work_put(hx_comm *c, hx_work *w);
void hx_number(hx_comm *c, hx_work *w);                  /* its place among all collectives; comm lock held */
/* Queues a work. HETCCL_OK, or the status that killed the communicator. */
int hx_submit(hx_comm *c, hx_work *w);
/* Drives until the work is final (its status), or slice_ns have passed (HETCCL_IN_PROGRESS). Blocks that long at most, plus
 * one vendor call where the library is BLOCKING. */
int hx_drive(hx_comm *c, hx_work *w, uint64_t slice_ns);
int hx_comm_progress(hx_comm *c, int inline_calls);      /* driver lock held; returns whether something moved */
int hx_comm_quiesce(hx_comm *c, uint64_t ns);            /* HETCCL_TIMED_OUT: somebody does not come out */
void hx_comm_check(hx_comm *c);                          /* deadlines, losses, aborts; driver lock held */
void hx_fail(hx_comm *c, int status, const char *text);
void hx_kick(hx_comm *c);
int hx_comm_sleep(hx_comm *c, uint64_t ns);              /* arm, poll, disarm */
void hx_finish(hx_work *w, int status);                  /* final; publish follows */
void hx_publish(hx_work *w);                             /* wakes waiters; w may be gone afterwards */

/* ---- executor.c */
void hx_work_bind(hx_work *w);
int hx_work_progress(hx_work *w, int inline_calls);      /* returns whether something moved */
void hx_work_waiting(hx_work *w, int32_t *ranks, int32_t *n, int32_t max, const char **phase);
int hx_combining(const hx_plan *p);
char *hx_address(hx_work *w, const hx_slice *s, int64_t segment, size_t *n);

int hx_work_enqueue(hx_work *w);                         /* the whole island lane of a plan that never waits */

/* ---- memory.c */
/* At least `want` bytes; what they held is lost. Driver lock held. `pinned`: host memory */
int hx_grow(hx_comm *c, char **buffer, size_t *room, size_t want, int pinned);
/* The same for any thread; gives nothing back. */
int hx_grow_aside(hx_comm *c, char **buffer, size_t *room, size_t want, int pinned);
void hx_aside_free(hx_comm *c);
void hx_spinning(hx_comm *c, int more);     /* so many more kernels wait for words; driver lock held */

/* ---- island_calls.c */
int hx_vendor_call(hx_comm *c, hx_work *w, const hx_step *s, int64_t segment);
int hx_async_error(hx_comm *c);                          /* of the island's communicators: the first that has one */
void hx_abort_calls(hx_comm *c);                         /* where the library can; never blocks */

/* ---- device_sum.c */
/* Copies n contributions to the device, combines them there in this order, divides, and copies the result to dst, all on a
 * stream of its own. HETCCL_OK: under way as *place. HETCCL_IN_PROGRESS: every place is taken. */
int hx_sum_begin(hx_comm *c, hx_work *w, const void *const *src, int n, void *dst, size_t count, double divisor, int *place);
int hx_sum_test(hx_comm *c, int place);                  /* HETCCL_OK: the result lies at dst, and the place is free */
int hx_sums_busy(hx_comm *c);                            /* after a failure: whether the device may still touch any memory */
void hx_sums_free(hx_comm *c);

/* ---- identity.c */
/* Fills memory with what leaves the other side of an operator as it is: -0.0 for sum, 1 for prod, the extremes for min and
 * max, and so on. HETCCL_UNSUPPORTED where there is none. */
int hx_identity(void *dst, size_t count, int dtype, int redop);

/* ---- streamed.c */
/* Enqueues a whole collective from the caller's thread, without a hop to another one, and returns HETCCL_OK; later the work ends
 * by itself. HETCCL_IN_PROGRESS: it cannot be done so (other islands take part, say): hx_mark_caller and hx_submit it.
 * Blocks for the short moment in which another thread drives the communicator. */
int hx_begin(hx_comm *c, hx_work *w, int asynchronous);  /* hx_enqueue, or else hx_mark_caller and hx_submit */
int hx_wait_on_stream(hx_work *w, void *stream);         /* a stream waits for the end of a streamed work */
int hx_enqueue(hx_comm *c, hx_work *w, int asynchronous);
int hx_mark_caller(hx_comm *c, hx_work *w);              /* the work shall start behind what the caller's stream holds now */
int hx_order_streams(hx_comm *c, hx_work *w);            /* behind the last vendor call, whatever stream it went to */
int hx_streamed_progress(hx_comm *c);                    /* driver lock held; returns whether something ended */
void hx_streamed_fail(hx_comm *c, int status);
hx_work *hx_streamed_first(hx_comm *c);

/* Next step of a lane, or NULL at its end. */
const hx_step *hx_lane_next(const hx_work *w, int lane, int64_t *segment, int *index);

/* ---- trace.c */
/* Writes a step or flow down, with the addresses that it uses. */
void hx_trace_place(hx_work *w, int what, int index, int64_t segment, const hx_slice *src, const char *from,
                    const hx_slice *dst, const char *to, size_t n);

/* ---- flows.c */
void hx_flows_begin(hx_work *w, const hx_step *s, int64_t segment);
int hx_flow_blocked(const hx_work *w, const hx_flow *f);            /* one that goes before it has not ended */
int hx_flows_progress(hx_work *w, const hx_step *s, int *moved);   /* HETCCL_OK when all are done */

/* ---- turns.c */
/* Whether this communicator's calls are taken in turn. */
static inline int hx_in_turn(const hx_comm *c)
{
    return c->board && c->n_island_local > 1 && (c->streaming ? c->ordered : (c->ccl->caps & HETCCL_CCL_ONE_AT_A_TIME) != 0);
}
/* Takes this process for a call, after a meeting. Blocks until the ranks before have theirs and no other call runs here, at
 * most up to the work's deadline; *who: for whom it waited, -1: for another call. Give is called only after a good take; where
 * the call only enqueues, it blocks until all ranks have taken theirs. */
int hx_turn_take(hx_comm *c, const hx_work *w, int *who);
int hx_turn_give(hx_comm *c, const hx_work *w, int *who);
void hx_turns_after_fork(void);

/* ---- lane.c */
int hx_lane_post(hx_comm *c, hx_work *w, const hx_step *s, int64_t segment);
int hx_lane_test(hx_comm *c);                            /* HETCCL_IN_PROGRESS, or the call's status */
void hx_lane_stop(hx_comm *c);

/* ---- progress.c */
void hx_engine_add(hx_comm *c);                          /* the progress thread serves c while works are pending */
void hx_engine_remove(hx_comm *c);
void hx_engine_kick(void);
void hx_engine_stop(void);
void hx_completed_push(hx_work *w);
hx_work *hx_completed_pop(uint64_t timeout_ns);          /* blocks up to timeout_ns */
void hx_engine_after_fork(void);

/* ---- p2p.c */
int hx_p2p_init(hx_comm *c);
void hx_p2p_free(hx_comm *c);
int hx_p2p_add_link(hx_comm *c, int peer, int outgoing, const hetccl_transport_ops *ops, void *ctx, void *ep);
int hx_p2p_has_link(hx_comm *c, int peer);
int hx_p2p_stage(hx_comm *c, hx_work *w);                /* device memory travels through pinned memory of its own */
void hx_p2p_submit(hx_comm *c, hx_work *w);              /* comm lock held */
int hx_p2p_progress(hx_comm *c);                         /* driver lock held; returns whether something moved */
void hx_p2p_fail_all(hx_comm *c, int status);            /* driver lock held */
uint64_t hx_p2p_deadline(hx_comm *c, int32_t *peer);     /* earliest deadline of a waiting work, and whom it waits for */
#endif
