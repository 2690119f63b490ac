/* SPDX-License-Identifier: Apache-2.0
 * A compiled plan: what one rank does in one class of operation, closed over the count.
 *
 * A plan is the period of a loop over segments. A segment of L elements is measured in units: u = floor(L / units), rounded
 * down to a multiple of 16 elements where L is large enough, and t = L - units * u elements of tail. Every slice is affine in
 * u and t, so that one plan serves every count, and both ends of a message compute the same length from shared numbers.
 */
#ifndef HETCCL_PLAN_H
#define HETCCL_PLAN_H
#include <stdint.h>
#include <stddef.h>

#define HX_FAN 8                    /* islands at most: own contribution and 7 others */
#define HX_UNIT_ALIGN 16u           /* elements */

/* Named buffers. IN and OUT are the caller's (memory of the rank's device); the scratch buffers belong to the communicator. */
enum { HX_IN = 0, HX_OUT = 1, HX_DEVICE_SCRATCH = 2, HX_HOST_SCRATCH = 3 };

/* Elements [a*u + at*t, b*u + bt*t) of block `block` of a buffer. Blocks of IN and OUT are `count` elements apart, blocks of
 * scratch one segment apart. */
typedef struct hx_slice {
    int32_t buffer;
    int64_t block;
    int64_t a, at, b, bt;               /* 64 bits: the v forms count elements here */
} hx_slice;

enum {
    HX_ALL_REDUCE, HX_REDUCE_SCATTER, HX_ALL_GATHER, HX_BROADCAST, HX_REDUCE,   /* vendor calls; count = length of `len` */
    HX_ALL_TO_ALL,                  /* `len` is one pair's block */
    HX_TRANSFER,                    /* island rank `root` sends src, island rank `to` receives dst, the others only pass by */
    HX_COPY,                        /* dst = src, lengths equal to `len` */
    HX_COMBINE,                     /* dst = op over n_src blocks of src, host memory */
    HX_SCALE,                       /* dst = src / divisor, or src * the work's factor */
    HX_FLOWS,                       /* border messages: flows [first_flow, first_flow + n_flows) side by side */
    HX_FILL,                        /* dst = what leaves the operator's other side as it is, host memory */
    HX_STEP_KINDS
};

enum { HX_LANE_ISLAND = 0, HX_LANE_BORDER = 1, HX_LANES = 2 };

typedef struct hx_step {
    int32_t kind, lane;
    int32_t shift;                  /* runs for segment iteration + shift: lets island calls of later segments go first */
    int32_t wait_step;              /* index of a step of the other lane that must be done for the same segment, or -1 */
    int32_t signal;                 /* some step waits for this one */
    int32_t root, to;               /* island ranks: of broadcast and reduce; ends of a transfer */
    int32_t n_src;                  /* combine */
    int64_t stride;                 /* combine: blocks from one source to the next */
    int32_t as_bytes;               /* vendor call moves the elements as bytes */
    int32_t group;                  /* vendor call of a part of the island, see topology.py; the others only pass by */
    int32_t first_flow, n_flows;
    hx_slice src, dst, len;
} hx_step;

enum {
    HX_FLOW_SEND,                   /* src to peer[0] */
    HX_FLOW_RECV,                   /* dst from peer[0] */
    HX_FLOW_FORWARD,                /* dst from peer[0], and on to all others */
    HX_FLOW_OWN,                    /* dst = op over src and the peers' contributions in island order; `give_back`: to all peers */
    HX_FLOW_PASS,                   /* like OWN, and the result goes on, as a contribution, to the last of the peers */
    HX_FLOW_EXCHANGE                /* src to all peers, dst = op over all in island order; everybody does the same */
};

typedef struct hx_flow {
    int32_t kind, channel, n_peers;
    int32_t position;               /* of the own contribution among all, in island order */
    int32_t give_back;
    int32_t finish;                 /* divide by the plan's divisor after combining */
    int32_t peer[HX_FAN];           /* ranks, in island order */
    int32_t n_after;
    int32_t after[2 * HX_FAN];      /* earlier flows of the step that use the same channel of a peer the same way: they go first */
    hx_slice src, dst;
} hx_flow;

typedef struct hx_plan {
    int32_t op, dtype, redop, root;
    int32_t n_steps, n_flows;
    hx_step *steps;
    hx_flow *flows;
    int32_t units;
    int32_t lane_len[HX_LANES];
    int32_t *lane_steps[HX_LANES];  /* indices into steps, in order */
    int32_t max_shift;
    uint64_t segment;               /* elements, a multiple of units * HX_UNIT_ALIGN; 0: one segment whatever the count */
    int64_t in_blocks, out_blocks;  /* how many times `count` the caller's buffers hold */
    int64_t device_blocks, host_blocks; /* scratch, in segments */
    double divisor;                 /* of avg, else 1 */
    double scale_divisor;           /* of HX_SCALE; 0: multiply by the work's factor (premul_sum) */
    int32_t n_calls;                /* steps that call the vendor's library */
    int32_t device_sums;            /* the device's own kernel combines what comes over the border, not the host */
    int32_t reads_out;              /* OUT is not written as a whole: what it holds must be kept */
    int32_t crosses;                /* several islands take part: on some rank the host has to do something */
    int32_t number;                     /* for the trace: which of the communicator's plans it is */
    uint32_t digest;                /* of what ranks share beside the count: lengths of blocks */
} hx_plan;
#endif
