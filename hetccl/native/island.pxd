# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint64_t

cdef extern from "island.h" nogil:
    enum:
        HETCCL_ISLAND_RANKS_MAX
    ctypedef struct hetccl_island:
        pass
    size_t hetccl_island_region_bytes(int n)
    int hetccl_island_open(int fd, int rank, int n, int local_ranks, uint64_t timeout_ns, hetccl_island **out)
    void hetccl_island_destroy(hetccl_island *island)
    int hetccl_island_all_reduce(hetccl_island *island, const void *send, void *recv, size_t count, int dtype,
                                 int redop)
    int hetccl_island_reduce_scatter(hetccl_island *island, const void *send, void *recv, size_t count, int dtype,
                                     int redop)
    int hetccl_island_all_gather(hetccl_island *island, const void *send, void *recv, size_t count, int dtype)
    int hetccl_island_broadcast(hetccl_island *island, const void *send, void *recv, size_t count, int dtype, int root)
    int hetccl_island_reduce(hetccl_island *island, const void *send, void *recv, size_t count, int dtype, int redop,
                             int root)
    int hetccl_island_all_to_all(hetccl_island *island, const void *send, void *recv, size_t count, int dtype)
    int hetccl_island_barrier(hetccl_island *island)
    int hetccl_island_send(hetccl_island *island, const void *send, size_t count, int dtype, int peer)
    int hetccl_island_recv(hetccl_island *island, void *recv, size_t count, int dtype, int peer)
    void hetccl_island_abort(hetccl_island *island)
    int hetccl_island_error(const hetccl_island *island)
    int hetccl_island_waiting_for(const hetccl_island *island)
    int hetccl_island_aborted_by(const hetccl_island *island)
    int hetccl_island_rank(const hetccl_island *island)
    int hetccl_island_size(const hetccl_island *island)
    void hetccl_island_set_threads(hetccl_island *island, int threads)
    void hetccl_island_set_timeout(hetccl_island *island, uint64_t timeout_ns)
