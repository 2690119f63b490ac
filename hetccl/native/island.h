/* SPDX-License-Identifier: Apache-2.0
 * Collectives of the n ranks of one host over one shared memory region that all have mapped.
 *
 * Every call blocks until this rank's part is done, the deadline passes (HETCCL_TIMED_OUT) or some rank aborts
 * (HETCCL_ABORTED). After either the island is dead on every rank: a rank that times out aborts it for the others.
 * All ranks call the same operations with the same arguments in the same order, from one thread at a time; only
 * abort, error and waiting_for may be called beside a running call. Nothing here takes the GIL.
 *
 * Pointers may be unaligned and overlap in NCCL's in-place forms only. `count` follows NCCL: elements of the buffer for
 * all_reduce, broadcast, reduce; elements sent by each rank for all_gather; elements received by each rank for
 * reduce_scatter; elements a pair for all_to_all. dtype and redop are those of spi.h; what hetccl_can_combine refuses is
 * HETCCL_UNSUPPORTED. avg divides the sum by n once (in float32 for the small floats).
 *
 * All ranks get the same bits: one rank (the owner) combines an element in rank order and the others copy its bytes, or,
 * for small messages, all combine the same inputs with the same code in the same order.
 */
#ifndef HETCCL_ISLAND_H
#define HETCCL_ISLAND_H
#include <stddef.h>
#include <stdint.h>

#include "hetccl/spi.h"

#define HETCCL_ISLAND_RANKS_MAX 256

typedef struct hetccl_island hetccl_island;

/* Bytes of the region for n ranks; 0 if n is out of range. Pages that are not used take no memory. */
size_t hetccl_island_region_bytes(int n);

/* Maps the region behind `fd` (zero-filled when its creator has sized it; the descriptor may be closed afterwards) and
 * makes this rank's handle. `local_ranks`: processes that share the cores, n or more. timeout_ns: longest wait without
 * progress. HETCCL_INVALID: bad rank, n or file size. */
int hetccl_island_open(int fd, int rank, int n, int local_ranks, uint64_t timeout_ns, hetccl_island **out);

/* Unmaps; the handle is gone. Not beside a running call. In a forked child: there only. Says nothing to the peers. */
void hetccl_island_destroy(hetccl_island *island);

int hetccl_island_all_reduce(hetccl_island *island, const void *send, void *recv, size_t count, int dtype, int redop);
int hetccl_island_reduce_scatter(hetccl_island *island, const void *send, void *recv, size_t count, int dtype,
                                 int redop);
int hetccl_island_all_gather(hetccl_island *island, const void *send, void *recv, size_t count, int dtype);
int hetccl_island_broadcast(hetccl_island *island, const void *send, void *recv, size_t count, int dtype, int root);
int hetccl_island_reduce(hetccl_island *island, const void *send, void *recv, size_t count, int dtype, int redop,
                         int root);
int hetccl_island_all_to_all(hetccl_island *island, const void *send, void *recv, size_t count, int dtype);
int hetccl_island_barrier(hetccl_island *island);

/* Ordered for each pair and direction. send returns when the message is in the ring (64 KiB a pair; 16 KiB from 17 ranks on); what does not fit
 * waits for the receiver. HETCCL_MISMATCH: the peer sent another length; nothing more can be received from it. */
int hetccl_island_send(hetccl_island *island, const void *send, size_t count, int dtype, int peer);
int hetccl_island_recv(hetccl_island *island, void *recv, size_t count, int dtype, int peer);

/* Ends this island on all ranks; running calls return HETCCL_ABORTED. Any thread; never blocks. */
void hetccl_island_abort(hetccl_island *island);

/* HETCCL_OK, or why the island is dead: HETCCL_ABORTED, HETCCL_TIMED_OUT (on this rank), HETCCL_INVALID in a forked
 * child. Any thread. */
int hetccl_island_error(const hetccl_island *island);

/* Rank that a running call waits for, or that the last failed one waited for; -1: none. Any thread. */
int hetccl_island_waiting_for(const hetccl_island *island);

/* Rank that aborted the island first; -1: none. */
int hetccl_island_aborted_by(const hetccl_island *island);

int hetccl_island_rank(const hetccl_island *island);
int hetccl_island_size(const hetccl_island *island);
/* Threads, 1 to 64, that carry this rank's part of a large operation; before the first one. Ranks may differ. */
void hetccl_island_set_threads(hetccl_island *island, int threads);
void hetccl_island_set_timeout(hetccl_island *island, uint64_t timeout_ns);
#endif
