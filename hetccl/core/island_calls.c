/* SPDX-License-Identifier: Apache-2.0
 * Calls of the vendor's library, on the island's communicator or on that of a group of its ranks.
 */
#include "executor.h"
#include <stdio.h>

int hx_vendor_call(hx_comm *c, hx_work *w, const hx_step *s, int64_t segment)
{
    size_t n, unused;
    hetccl_ccl_args a = {.size = sizeof a, .dtype = w->plan->dtype, .redop = w->plan->redop, .peer = s->root,
                         .comm = c->ccl_comm, .stream = w->stream};
    hx_address(w, &s->len, segment, &n);
    a.send = s->src.buffer >= 0 ? hx_address(w, &s->src, segment, &unused) : NULL;
    a.recv = s->dst.buffer >= 0 ? hx_address(w, &s->dst, segment, &unused) : NULL;
    hx_trace_place(w, HX_DID_STEP, (int)(s - w->plan->steps), segment, &s->src, a.send, &s->dst, a.recv, n);
    if (n == 0)
        return HETCCL_OK;                   /* the same on every rank of the island */
    a.count = n;
    w->touched = 1;
    if (a.redop != HETCCL_AVG || w->plan->divisor != 0.0)
        a.redop = hx_combining(w->plan);    /* hetccl scales; divisor 0 says that the library averages itself */
    if (s->as_bytes) {
        a.count = n * hetccl_dtype_size(a.dtype);
        a.dtype = HETCCL_UINT8;
    }
    int in_turn = hx_in_turn(c), who = -1;
    if (in_turn || (!c->streaming && c->check && c->board && c->n_island_local > 1)) {
        hx_call call = {w->plan->op, w->plan->dtype, w->plan->redop, w->plan->root, w->count, w->sequence, w->fingerprint};
        int rc = hx_board_meet(c->board, c->rank, c->island_ranks, c->n_island_local, ++c->meets, &call, c->pauses,
                               w->deadline_ns, &c->aborted, &who);
        if (rc == HETCCL_OK && in_turn)
            rc = hx_turn_take(c, w, &who);
        if (rc != HETCCL_OK) {
            c->fail_ranks[0] = who;
            c->n_fail_ranks = who >= 0;
            snprintf(w->text, sizeof w->text, "island");
            return rc;
        }
    }
    int (*const call_of[])(void *, const hetccl_ccl_args *) = {
        [HX_ALL_REDUCE] = c->ccl->all_reduce, [HX_REDUCE_SCATTER] = c->ccl->reduce_scatter,
        [HX_ALL_GATHER] = c->ccl->all_gather, [HX_BROADCAST] = c->ccl->broadcast, [HX_REDUCE] = c->ccl->reduce,
        [HX_ALL_TO_ALL] = c->ccl->all_to_all, [HX_TRANSFER] = c->island_rank == s->root ? c->ccl->send : c->ccl->recv};
    int takes_part = s->kind != HX_TRANSFER || c->island_rank == s->root || c->island_rank == s->to;
    if (s->kind == HX_TRANSFER && c->island_rank == s->root)
        a.peer = s->to;
    if (s->group) {
        const hx_group *g = &c->groups[s->group - 1];
        takes_part = g->comm != NULL;
        a.comm = g->comm;
        a.peer -= g->first;
        atomic_fetch_add_explicit(&c->group_calls, (uint64_t)takes_part, memory_order_relaxed);
    }
    int rc = takes_part ? call_of[s->kind](c->ccl_ctx, &a) : HETCCL_OK;
    if (in_turn) {
        int given = hx_turn_give(c, w, &who);
        if (rc == HETCCL_OK && given != HETCCL_OK) {
            c->fail_ranks[0] = who;
            c->n_fail_ranks = who >= 0;
            snprintf(w->text, sizeof w->text, "island");
            return given;
        }
    }
    atomic_fetch_add_explicit(&c->vendor_calls[s->kind], (uint64_t)takes_part, memory_order_relaxed);
    if (rc != HETCCL_OK)
        snprintf(w->text, sizeof w->text, "%s", c->ccl->last_error(c->ccl_ctx));
    return rc;
}

int hx_async_error(hx_comm *c)
{
    int rc = c->ccl_comm ? c->ccl->async_error(c->ccl_ctx, c->ccl_comm) : HETCCL_OK;
    for (int i = 0; i < c->n_groups && (rc <= HETCCL_IN_PROGRESS || rc == HETCCL_UNSUPPORTED); i++)
        if (c->groups[i].comm)
            rc = c->ccl->async_error(c->ccl_ctx, c->groups[i].comm);
    return rc;
}

void hx_abort_calls(hx_comm *c)
{
    if (!c->ccl || !(c->ccl->caps & HETCCL_CCL_ABORT))
        return;
    if (c->ccl_comm)
        c->ccl->abort(c->ccl_ctx, c->ccl_comm);
    for (int i = 0; i < c->n_groups; i++)
        if (c->groups[i].comm)
            c->ccl->abort(c->ccl_ctx, c->groups[i].comm);
}
