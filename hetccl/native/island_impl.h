/* SPDX-License-Identifier: Apache-2.0
 * What the large and the small forms of an island's collectives share. Private to island_*.c.
 */
#ifndef HETCCL_ISLAND_IMPL_H
#define HETCCL_ISLAND_IMPL_H
#include "island_layout.h"

#include "combine.h"

/* A collective as it was called, already checked. */
typedef struct island_call {
    const void *send;
    void *recv;
    size_t count, size;                       /* elements; bytes of one */
    size_t stride;                            /* elements from a block to the next: count, but for a part of the operation */
    int dtype, redop, root;
    double divisor;                           /* of a sum, for avg */
} island_call;

/* Puts `mine` bytes of data where all ranks see them and waits until all have done so. `nbytes`, equal on all ranks, is the
 * most that any puts: at most ISLAND_SMALL. island_from then says where rank r's lie, until the next exchange. */
int island_exchange(hetccl_island *s, const void *data, size_t mine, size_t nbytes);

/* The largest of all ranks' values, as an exchange. */
int island_small_max(hetccl_island *s, int *value);

/* ---- island_team.c */
typedef void (*island_share)(void *job, int thread, int threads);

island_team *island_team_new(int threads);    /* the caller is one of them; NULL for one, and fewer if no more can be started */
void island_team_free(island_team *t);
/* Calls share(job, i, threads) once on every thread; returns when all have. Without a team (NULL) there is one thread. */
void island_team_run(island_team *t, island_share share, void *job);

/* For buffers whose contribution is at most ISLAND_SMALL bytes a rank, and more than one rank. */
int island_small_all_reduce(hetccl_island *s, const island_call *c);
int island_small_reduce(hetccl_island *s, const island_call *c);
int island_small_reduce_scatter(hetccl_island *s, const island_call *c);
int island_small_all_gather(hetccl_island *s, const island_call *c);
int island_small_broadcast(hetccl_island *s, const island_call *c);
int island_small_all_to_all(hetccl_island *s, const island_call *c);
#endif
