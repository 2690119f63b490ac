# SPDX-License-Identifier: Apache-2.0
# Cython's view of plan.h, executor.h and board.h: what _engine.pyx uses.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from hetccl.spi cimport hetccl_ccl_ops, hetccl_device_ops, hetccl_transport_ops


cdef extern from "plan.h" nogil:
    enum:
        HX_FAN
    ctypedef struct hx_slice:
        int32_t buffer
        int64_t block
        int64_t a
        int64_t at
        int64_t b
        int64_t bt
    ctypedef struct hx_step:
        int32_t kind
        int32_t lane
        int32_t shift
        int32_t wait_step
        int32_t signal
        int32_t root
        int32_t to
        int32_t n_src
        int64_t stride
        int32_t as_bytes
        int32_t group
        int32_t first_flow
        int32_t n_flows
        hx_slice src
        hx_slice dst
        hx_slice len
    ctypedef struct hx_flow:
        int32_t kind
        int32_t channel
        int32_t n_peers
        int32_t position
        int32_t give_back
        int32_t finish
        int32_t peer[8]
        int32_t n_after
        int32_t after[16]
        hx_slice src
        hx_slice dst
    ctypedef struct hx_plan:
        int32_t op
        int32_t dtype
        int32_t redop
        int32_t root
        int32_t n_steps
        int32_t n_flows
        hx_step *steps
        hx_flow *flows
        int32_t units
        int32_t lane_len[2]
        int32_t *lane_steps[2]
        int32_t max_shift
        uint64_t segment
        int64_t in_blocks
        int64_t out_blocks
        int64_t device_blocks
        int64_t host_blocks
        double divisor
        double scale_divisor
        int32_t n_calls
        int32_t device_sums
        int32_t reads_out
        int32_t crosses
        int32_t number
        uint32_t digest


cdef extern from "board.h" nogil:
    ctypedef struct hx_call:
        int32_t op
        int32_t dtype
        int32_t redop
        int32_t root
        uint64_t count
        uint32_t sequence
        uint32_t fingerprint
    ctypedef struct hx_entry:
        uint32_t meets
        uint32_t state
        uint32_t phase
        hx_call now
        uint64_t heartbeat_ns
        int32_t pid
        uint32_t direct
    ctypedef struct hx_board:
        uint32_t generation
        uint32_t aborted_by
        uint32_t size
        hx_entry entry[1]
    size_t hx_board_bytes(int size)
    void hx_board_mark(hx_board *b, int rank, uint32_t state)
    void hx_board_abort(hx_board *b, int rank)


cdef extern from "trace.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct hx_event:
        uint32_t sequence
        int32_t what
        int32_t index
        int32_t peer
        int64_t segment
        int64_t a
        int64_t b
        int64_t n
        int64_t m
    ctypedef struct hx_trace:
        pthread_mutex_t lock
        uint64_t capacity
        uint64_t used
        uint64_t lost
        hx_event *events


cdef extern from "executor.h" nogil:
    ctypedef struct hx_transport:
        const hetccl_transport_ops *ops
        void *ctx
    ctypedef struct hx_peer:
        const hetccl_transport_ops *ops
        void *ctx
        void *ep
        size_t max_message
        int slots
        int answers
    ctypedef struct hx_group:
        void *comm
        int32_t first
        int32_t size
    ctypedef struct hx_work:
        const hx_plan *plan
        char *inp "in"
        char *out
        char *user_in
        char *user_out
        uint64_t count
        double factor
        uint64_t deadline_ns
        int32_t sending
        int32_t peer
        int32_t tag
        size_t nbytes
        char *p2p_ptr
        int32_t p2p_staged
        int32_t p2p_device
        void *events[16]
        int32_t n_events
        uint32_t finished
        int32_t status
        int32_t asynchronous
        int32_t source
        void *owner
        void *caller
        int32_t has_caller
        int32_t streamed
        void *stream
        void *edge[2]
        char text[512]
    ctypedef struct hx_comm:
        int32_t rank
        int32_t size
        int32_t pauses, local_ranks
        int32_t check
        hx_trace *trace
        const hetccl_device_ops *dev
        void *dev_ctx
        const hetccl_ccl_ops *ccl
        void *ccl_ctx
        void *ccl_comm
        int32_t island_rank
        hx_group *groups
        int32_t n_groups
        int32_t *island_ranks
        int32_t n_island_local
        int32_t turn_before
        int32_t ordered
        int host_memory
        int streaming
        void *stream
        size_t chunk_bytes
        hx_peer *peers
        hx_transport transports[4]
        int32_t n_transports
        hx_board *board
        uint32_t pending
        uint32_t failed
        uint32_t aborted
        uint32_t lane_abandoned
        uint32_t in_call
        uint64_t call_deadline_ns
        char fail_text[512]
        int32_t fail_ranks[8]
        int32_t n_fail_ranks
        uint64_t n_ops[16]
        uint64_t vendor_calls[8]
        uint64_t group_calls
        uint64_t device_sums
        uint64_t border_sent
        uint64_t staged_bytes
        uint64_t past_bytes
    hx_comm *hx_comm_new(int rank, int size)
    int hx_identity(void *dst, size_t count, int dtype, int redop)
    int hx_comm_quiesce(hx_comm *c, uint64_t ns)
    void hx_comm_free(hx_comm *c)
    hx_work *hx_work_get(hx_comm *c, const hx_plan *p)
    void hx_work_put(hx_comm *c, hx_work *w)
    int hx_begin(hx_comm *c, hx_work *w, int asynchronous)
    int hx_wait_on_stream(hx_work *w, void *stream)
    int hx_p2p_stage(hx_comm *c, hx_work *w)
    int hx_drive(hx_comm *c, hx_work *w, uint64_t slice_ns)
    void hx_fail(hx_comm *c, int status, const char *text)
    void hx_kick(hx_comm *c)
    void hx_engine_add(hx_comm *c)
    void hx_engine_remove(hx_comm *c)
    void hx_engine_kick()
    void hx_engine_stop()
    void hx_engine_after_fork()
    hx_work *hx_completed_pop(uint64_t timeout_ns)
    int hx_p2p_add_link(hx_comm *c, int peer, int outgoing, const hetccl_transport_ops *ops, void *ctx, void *ep)
    int hx_p2p_has_link(hx_comm *c, int peer)


cdef extern from "direct.h" nogil:
    ctypedef struct hx_direct_options:
        int how
        int may_spin
        int hosts
        int threads
    int hx_direct_open(hx_comm *c, const hx_direct_options *options, char *text, size_t room)
    void hx_direct_agree(hx_comm *c, const uint8_t *spinning)
    int hx_direct_spins(const hx_comm *c)
    uint64_t hx_direct_sent(const hx_comm *c, int peer)
    int hx_direct_waits(const hx_comm *c, int peer, uint64_t *ns)
    void hx_direct_close(hx_comm *c)


cdef extern from "wait.h" nogil:
    uint64_t hetccl_now_ns()
    int hetccl_wait_pauses(int local_ranks)
