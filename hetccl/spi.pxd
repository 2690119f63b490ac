# SPDX-License-Identifier: Apache-2.0
# Cython's view of include/hetccl/spi.h. Add what a module uses.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

cdef extern from "hetccl/spi.h" nogil:
    enum:
        HETCCL_SPI_VERSION
        HETCCL_UNIQUE_ID_MAX
        HETCCL_CHANNELS
        HETCCL_WAIT_WRITABLE
        HETCCL_DTYPE_COUNT
    ctypedef enum hetccl_status:
        HETCCL_OK
        HETCCL_IN_PROGRESS
        HETCCL_UNSUPPORTED
        HETCCL_INVALID
        HETCCL_PEER_LOST
        HETCCL_TIMED_OUT
        HETCCL_ABORTED
        HETCCL_MISMATCH
        HETCCL_NO_MEMORY
        HETCCL_SYSTEM
        HETCCL_VENDOR
    enum:
        HETCCL_DEVICE_HOST_MEMORY
        HETCCL_DEVICE_FLAGS
        HETCCL_DEVICE_KERNELS
        HETCCL_DEVICE_DMABUF
        HETCCL_DEVICE_IPC
        HETCCL_DEVICE_CAPTURE
        HETCCL_DEVICE_REGISTER
        HETCCL_CCL_BLOCKING
        HETCCL_CCL_ABORT
        HETCCL_CCL_STREAM_ORDERED
        HETCCL_CCL_NAN_PROPAGATES
        HETCCL_CCL_MULTI_COMM
        HETCCL_CCL_GROUP
        HETCCL_CCL_IN_PLACE
        HETCCL_CCL_ONE_AT_A_TIME
        HETCCL_TRANSPORT_HOST_MEMORY
        HETCCL_TRANSPORT_DEVICE_MEMORY
        HETCCL_TRANSPORT_DMABUF
        HETCCL_TRANSPORT_ONE_SIDED
        HETCCL_TRANSPORT_SAME_HOST
        HETCCL_TRANSPORT_ENCRYPTED
        HETCCL_TRANSPORT_SLOTS
        HETCCL_TRANSPORT_ANSWER
        HETCCL_TRANSPORT_WINDOW
        HETCCL_TRANSPORT_PUT
    const char *HETCCL_DEVICE_CAPSULE
    const char *HETCCL_CCL_CAPSULE
    const char *HETCCL_TRANSPORT_CAPSULE

    ctypedef struct hetccl_table:
        const void *ops
        void *ctx

    ctypedef struct hetccl_reduce_args:
        uint32_t size
        int32_t dtype
        int32_t redop
        uint32_t n_src
        void *dst
        const void *const *src
        size_t count
        double scale
        void *stream

    ctypedef struct hetccl_device_ops:
        uint32_t version
        uint32_t size
        uint64_t caps
        int (*bind_thread)(void *) noexcept nogil
        const char *(*last_error)(void *) noexcept nogil
        int (*alloc)(void *, size_t, void **) noexcept nogil
        int (*free)(void *, void *) noexcept nogil
        int (*owns)(void *, const void *, size_t) noexcept nogil
        int (*host_alloc)(void *, size_t, void **) noexcept nogil
        int (*host_free)(void *, void *) noexcept nogil
        int (*host_register)(void *, void *, size_t) noexcept nogil
        int (*host_unregister)(void *, void *) noexcept nogil
        int (*copy_async)(void *, void *, const void *, size_t, void *) noexcept nogil
        int (*memset_async)(void *, void *, int, size_t, void *) noexcept nogil
        int (*stream_create)(void *, void **) noexcept nogil
        int (*stream_destroy)(void *, void *) noexcept nogil
        int (*stream_wait_event)(void *, void *, void *) noexcept nogil
        int (*stream_sync)(void *, void *) noexcept nogil
        int (*event_create)(void *, void **) noexcept nogil
        int (*event_destroy)(void *, void *) noexcept nogil
        int (*event_record)(void *, void *, void *) noexcept nogil
        int (*event_query)(void *, void *) noexcept nogil
        int (*event_sync)(void *, void *) noexcept nogil
        int (*flag_alloc)(void *, void **) noexcept nogil
        int (*flag_free)(void *, void *) noexcept nogil
        int (*flag_set)(void *, void *, uint32_t, void *) noexcept nogil
        int (*stream_wait_flag)(void *, void *, uint32_t, void *) noexcept nogil
        int (*reduce_async)(void *, const hetccl_reduce_args *) noexcept nogil
        int (*scale_async)(void *, const hetccl_reduce_args *) noexcept nogil
        int (*dmabuf_export)(void *, void *, size_t, int *) noexcept nogil
        int (*ipc_export)(void *, void *, void *) noexcept nogil
        int (*ipc_open)(void *, const void *, void **) noexcept nogil
        int (*ipc_close)(void *, void *) noexcept nogil
        int (*is_capturing)(void *, void *) noexcept nogil
        int (*stream_query)(void *, void *) noexcept nogil

    ctypedef struct hetccl_ccl_init_args:
        uint32_t size
        int32_t rank
        int32_t n_ranks
        uint32_t id_len
        const void *id
        double timeout_s

    ctypedef struct hetccl_ccl_args:
        uint32_t size
        int32_t dtype
        int32_t redop
        int32_t peer
        const void *send
        void *recv
        size_t count
        void *comm
        void *stream

    ctypedef struct hetccl_ccl_ops:
        uint32_t version
        uint32_t size
        uint64_t caps
        uint32_t reduce_mask[32]
        uint64_t move_mask
        const char *(*last_error)(void *) noexcept nogil
        int (*unique_id)(void *, void *, uint32_t *) noexcept nogil
        int (*init_post)(void *, const hetccl_ccl_init_args *, void **) noexcept nogil
        int (*init_test)(void *, void *) noexcept nogil
        int (*all_reduce)(void *, const hetccl_ccl_args *) noexcept nogil
        int (*reduce_scatter)(void *, const hetccl_ccl_args *) noexcept nogil
        int (*all_gather)(void *, const hetccl_ccl_args *) noexcept nogil
        int (*broadcast)(void *, const hetccl_ccl_args *) noexcept nogil
        int (*reduce)(void *, const hetccl_ccl_args *) noexcept nogil
        int (*all_to_all)(void *, const hetccl_ccl_args *) noexcept nogil
        int (*send)(void *, const hetccl_ccl_args *) noexcept nogil
        int (*recv)(void *, const hetccl_ccl_args *) noexcept nogil
        int (*group_start)(void *) noexcept nogil
        int (*group_end)(void *) noexcept nogil
        int (*async_error)(void *, void *) noexcept nogil
        int (*abort)(void *, void *) noexcept nogil
        int (*destroy)(void *, void *) noexcept nogil

    ctypedef struct hetccl_message:
        uint32_t size
        uint32_t fingerprint
        int32_t channel
        uint32_t flags
        void *ptr
        size_t nbytes

    ctypedef struct hetccl_put_args:
        uint32_t size
        uint32_t notify
        void *ep
        void *local_region
        void *remote_region
        uint64_t local_offset
        uint64_t remote_offset
        uint64_t nbytes
        void *request

    ctypedef struct hetccl_region_args:
        uint32_t size
        int32_t dmabuf_fd
        void *ptr
        size_t nbytes
        uint8_t key[64]
        uint32_t key_len

    ctypedef struct hetccl_transport_counters:
        uint32_t size
        uint32_t pad
        uint64_t bytes_sent
        uint64_t bytes_received
        uint64_t messages_sent
        uint64_t messages_received
        uint64_t put_threads
        uint64_t put_send_ns
        uint64_t put_receive_ns
        uint64_t put_idle_ns

    ctypedef struct hetccl_window_args:
        uint32_t size
        int32_t side
        size_t nbytes
        void *ptr
        uint32_t copies

    ctypedef struct hetccl_window_word:
        uint64_t at
        uint64_t value

    ctypedef struct hetccl_window_put:
        uint32_t size
        uint32_t n_words
        uint64_t at
        uint64_t nbytes
        hetccl_window_word word[2]

    ctypedef struct hetccl_transport_ops:
        uint32_t version
        uint32_t size
        uint64_t caps
        size_t max_message
        const char *(*last_error)(void *) noexcept nogil
        int (*send)(void *, void *, hetccl_message *) noexcept nogil
        int (*recv)(void *, void *, hetccl_message *) noexcept nogil
        int (*reserve)(void *, void *, hetccl_message *) noexcept nogil
        int (*commit)(void *, void *, hetccl_message *) noexcept nogil
        int (*peek)(void *, void *, hetccl_message *, uint32_t) noexcept nogil
        int (*release)(void *, void *, int32_t) noexcept nogil
        int (*progress)(void *, void *) noexcept nogil
        int (*wait_fds)(void *, int *, uint32_t, uint32_t *) noexcept nogil
        int (*arm)(void *) noexcept nogil
        int (*disarm)(void *) noexcept nogil
        int (*counters)(void *, void *, hetccl_transport_counters *) noexcept nogil
        int (*ep_error)(void *, void *) noexcept nogil
        int (*ep_close)(void *, void *) noexcept nogil
        int (*region_register)(void *, hetccl_region_args *, void **) noexcept nogil
        int (*region_unregister)(void *, void *) noexcept nogil
        int (*region_import)(void *, void *, const hetccl_region_args *, void **) noexcept nogil
        int (*post_send)(void *, hetccl_put_args *) noexcept nogil
        int (*post_recv)(void *, hetccl_put_args *) noexcept nogil
        int (*put_notify)(void *, hetccl_put_args *) noexcept nogil
        int (*test)(void *, void *) noexcept nogil
        int (*cancel)(void *, void *) noexcept
        int (*answer)(void *, void *, hetccl_message *) noexcept nogil
        int (*window)(void *, void *, hetccl_window_args *) noexcept nogil
        int (*window_put)(void *, void *, const hetccl_window_put *) noexcept nogil
        int (*window_test)(void *, void *) noexcept nogil
