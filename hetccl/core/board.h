/* SPDX-License-Identifier: Apache-2.0
 * The arrival board: one shared region a host and communicator. Each rank of the host has an entry: what it calls, where it
 * is, whether it lives. Losses and aborts, also of ranks on other hosts, are written here by the control plane (control.py)
 * and read by every waiting thread of the host.
 */
#ifndef HETCCL_BOARD_H
#define HETCCL_BOARD_H
#include "wait.h"
#include <stddef.h>
#include <stdint.h>

enum { HX_ALIVE = 0, HX_LEFT = 1, HX_LOST = 2 };

/* The part of an operation that must be equal on all ranks. */
typedef struct hx_call {
    int32_t op, dtype, redop, root;
    uint64_t count;
    uint32_t sequence, fingerprint;
} hx_call;

typedef struct hx_entry {
    _Atomic uint32_t meets;            /* how many meetings this rank has arrived at; futex word */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t turns;            /* vendor calls for which this rank's process was taken; futex word; see turns.c */
    _Atomic uint32_t state;            /* HX_ALIVE ...; written for every rank of the communicator */
    _Atomic uint32_t phase;            /* index into the names in control.py */
    hx_call call[2];                   /* of this meeting and of the one before */
    hx_call now;                       /* operation begun last */
    _Atomic uint64_t heartbeat_ns;
    _Atomic uint64_t decided;          /* of the first rank of those that meet: the meeting decided last, and whether they go */
    int32_t pid;
    _Atomic uint32_t direct;           /* whether this rank can take the direct path: see core/direct.py */
} __attribute__((aligned(128))) hx_entry;

typedef struct hx_board {
    _Atomic uint32_t generation;       /* bumped when anything below changes: waiters compare one word */
    _Atomic uint32_t aborted_by;       /* rank + 1 */
    uint32_t size, pad;
    hx_entry entry[];
} hx_board;

static inline size_t hx_board_bytes(int size) { return sizeof(hx_board) + (size_t)size * sizeof(hx_entry); }

/* Marks a rank lost or left, wakes everybody who meets. Any thread. */
void hx_board_mark(hx_board *b, int rank, uint32_t state);
void hx_board_abort(hx_board *b, int rank);
/* HETCCL_OK; HETCCL_ABORTED; HETCCL_PEER_LOST with *who: a rank was lost, or `rank` (-1: none) has left. */
int hx_board_gone(const hx_board *b, int rank, const _Atomic uint32_t *stop, int *who);
/* Whether a count on the board has come to n; counts wrap. */
static inline int hx_board_reached(const _Atomic uint32_t *word, uint32_t n)
{
    return (int32_t)(atomic_load_explicit((_Atomic uint32_t *)word, memory_order_acquire) - n) >= 0;
}
/* Whether a rank of the communicator was lost; *who says which. */
int hx_board_lost(const hx_board *b, int *who);
/* Arrives at meeting number `meet` with `call` and waits until all `ranks` have. Blocks up to deadline_ns (monotonic).
 * HETCCL_OK; HETCCL_MISMATCH, HETCCL_PEER_LOST, HETCCL_TIMED_OUT with *who set; HETCCL_ABORTED. Either all ranks that live
 * get HETCCL_OK, or none: nobody makes a call that another one, which has given up meanwhile, will not make. */
int hx_board_meet(hx_board *b, int me, const int32_t *ranks, int n, uint32_t meet, const hx_call *call, int pauses,
                  uint64_t deadline_ns, const _Atomic uint32_t *stop, int *who);
#endif
