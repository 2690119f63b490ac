# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int8_t, int32_t, uint8_t, uint32_t

from hetccl.spi cimport hetccl_ccl_ops, hetccl_table


cdef extern from "nccl_state.h" nogil:
    enum:
        HETCCL_NCCL_ID_MAX
        HETCCL_NCCL_CONFIG_MAX
        HETCCL_NCCL_CODES
        HETCCL_NCCL_JOINING
        HETCCL_NCCL_READY
        HETCCL_NCCL_FAILED
        HETCCL_NCCL_LEFT
    ctypedef int atomic_int
    int atomic_load(atomic_int *)
    void atomic_store(atomic_int *, int)
    int atomic_exchange(atomic_int *, int)
    bint atomic_compare_exchange_strong(atomic_int *, int *, int)

    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_unlock(pthread_mutex_t *)

    ctypedef int (*hetccl_nccl_reduce_fn)(const void *, void *, size_t, int, int, void *, void *) noexcept
    ctypedef int (*hetccl_nccl_root_reduce_fn)(const void *, void *, size_t, int, int, int, void *, void *) noexcept
    ctypedef int (*hetccl_nccl_move_fn)(const void *, void *, size_t, int, void *, void *) noexcept
    ctypedef int (*hetccl_nccl_root_fn)(const void *, void *, size_t, int, int, void *, void *) noexcept
    ctypedef int (*hetccl_nccl_send_fn)(const void *, size_t, int, int, void *, void *) noexcept
    ctypedef int (*hetccl_nccl_recv_fn)(void *, size_t, int, int, void *, void *) noexcept
    ctypedef int (*hetccl_nccl_comm_fn)(void *) noexcept
    ctypedef int (*hetccl_nccl_plain_fn)() noexcept
    ctypedef int (*hetccl_nccl_id_fn)(void *) noexcept
    ctypedef int (*hetccl_nccl_async_fn)(void *, int *) noexcept
    ctypedef int (*hetccl_nccl_version_fn)(int *) noexcept
    ctypedef const char *(*hetccl_nccl_code_text_fn)(int) noexcept
    ctypedef const char *(*hetccl_nccl_last_text_fn)(void *) noexcept

    ctypedef struct hetccl_nccl_library:
        hetccl_ccl_ops ops
        hetccl_table table
        hetccl_nccl_reduce_fn all_reduce
        hetccl_nccl_reduce_fn reduce_scatter
        hetccl_nccl_root_reduce_fn reduce
        hetccl_nccl_move_fn all_gather
        hetccl_nccl_move_fn all_to_all
        hetccl_nccl_root_fn broadcast
        hetccl_nccl_send_fn send
        hetccl_nccl_recv_fn recv
        hetccl_nccl_plain_fn group_start
        hetccl_nccl_plain_fn group_end
        hetccl_nccl_comm_fn finalize
        hetccl_nccl_comm_fn destroy
        hetccl_nccl_comm_fn abort
        hetccl_nccl_id_fn unique_id
        hetccl_nccl_async_fn async_error
        hetccl_nccl_version_fn version
        hetccl_nccl_code_text_fn code_text
        hetccl_nccl_last_text_fn last_text
        void *init
        uint32_t id_len
        uint32_t config_len
        int id_by_pointer
        int ranks_are_size_t
        int init_in_thread
        int streams
        int recv_on_all_ranks
        int one_at_a_time
        int8_t dtype_of[32]
        int8_t redop_of[16]
        uint8_t elements_of[32]
        uint8_t item_bytes[32]
        int32_t status_of[32]
        char name_of[32][32]
        char prefix[32]
        unsigned char config[512]
        int (*bind)(void *) noexcept nogil
        void *bind_ctx
        pthread_mutex_t lock

    ctypedef struct hetccl_nccl_comm:
        void *handle
        hetccl_nccl_library *library
        int32_t rank
        int32_t n_ranks
        int pid
        atomic_int state
        atomic_int aborting
        atomic_int polling
        double timeout_s
        void *scratch
        size_t scratch_bytes
        int code
        unsigned char id[4096]

    int hetccl_nccl_init(hetccl_nccl_library *, hetccl_nccl_comm *)
    int hetccl_nccl_lock(hetccl_nccl_library *, double)
    int hetccl_nccl_thread(void *(*)(void *) noexcept nogil, void *)
    void hetccl_nccl_abort(hetccl_nccl_comm *)
    void hetccl_nccl_await_abort(hetccl_nccl_comm *)


cdef int nccl_fill_table(hetccl_nccl_library *l) except -1
