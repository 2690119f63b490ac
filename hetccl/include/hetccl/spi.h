/* SPDX-License-Identifier: Apache-2.0
 *
 * The plug-in boundary of hetccl: three tables of functions, one each for a device, a vendor's collective
 * library (ccl) and a transport.
 *
 * Rules that keep old and new plug-ins working together:
 *  - Every table begins with `version` (major) and `size` (sizeof as the plug-in's compiler saw it).
 *  - Fields are only appended. The core reads a field only if `size` covers it (HETCCL_HAS).
 *  - A function with more than four arguments takes one sized struct.
 *  - `caps` says what exists. A function that is absent is either a stub that answers HETCCL_UNSUPPORTED or NULL;
 *    spi_normalize() of the core replaces NULL and uncovered fields by such stubs before the first call.
 *  - `ctx` is the plug-in's own; the core passes it back untouched as the first argument of every call.
 *  - A function returns an hetccl_status; after a failure `last_error` gives the text (thread that failed).
 *
 * Set-up that happens once a communicator or once a pair (probing, dialling, the authenticated handshake, passing
 * descriptors) is Python: see vendors/base.py and transports/base.py. These tables hold what runs a step or a chunk.
 *
 * "Any thread" below means: any thread, but never two at once for the same object. No function may take the GIL
 * unless its comment says so. No function may block unless its comment says on what.
 */
#ifndef HETCCL_SPI_H
#define HETCCL_SPI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HETCCL_SPI_VERSION 1u                 /* major; a plug-in of a newer major version is refused by name */

/* True if table `t` covers field `f`. */
#define HETCCL_HAS(t, f) ((t)->size >= offsetof(__typeof__(*(t)), f) + sizeof((t)->f))

typedef enum hetccl_status {
    HETCCL_OK = 0,
    HETCCL_IN_PROGRESS = 1,                   /* not an error: call again */
    HETCCL_UNSUPPORTED = 2,
    HETCCL_INVALID = 3,                       /* bad argument, foreign pointer, wrong state */
    HETCCL_PEER_LOST = 4,
    HETCCL_TIMED_OUT = 5,
    HETCCL_ABORTED = 6,
    HETCCL_MISMATCH = 7,                      /* ranks called different operations */
    HETCCL_NO_MEMORY = 8,
    HETCCL_SYSTEM = 9,                        /* errno-like failure of the operating system */
    HETCCL_VENDOR = 10                        /* failure reported by a vendor's library; text in last_error */
} hetccl_status;

/* Element types. 0 to 9 are the numbers that NCCL, RCCL and oneCCL share. fp8 formats are types of their own. */
typedef enum hetccl_dtype {
    HETCCL_INT8 = 0, HETCCL_UINT8 = 1, HETCCL_INT32 = 2, HETCCL_UINT32 = 3, HETCCL_INT64 = 4, HETCCL_UINT64 = 5,
    HETCCL_FLOAT16 = 6, HETCCL_FLOAT32 = 7, HETCCL_FLOAT64 = 8, HETCCL_BFLOAT16 = 9,
    HETCCL_INT16 = 10, HETCCL_UINT16 = 11, HETCCL_BOOL = 12, HETCCL_COMPLEX64 = 13, HETCCL_COMPLEX128 = 14,
    HETCCL_FLOAT8_E4M3FN = 15, HETCCL_FLOAT8_E5M2 = 16, HETCCL_FLOAT8_E4M3FNUZ = 17, HETCCL_FLOAT8_E5M2FNUZ = 18,
    HETCCL_DTYPE_COUNT = 19
} hetccl_dtype;

typedef enum hetccl_redop {
    HETCCL_SUM = 0, HETCCL_PROD = 1, HETCCL_MAX = 2, HETCCL_MIN = 3, HETCCL_AVG = 4,
    HETCCL_PREMUL_SUM = 5, HETCCL_BAND = 6, HETCCL_BOR = 7, HETCCL_BXOR = 8,
    HETCCL_REDOP_COUNT = 9
} hetccl_redop;

/* ------------------------------------------------------------------------------------------------ device_ops
 * Memory, streams and events of one device. Handles are opaque pointers; NULL as a stream is the default stream.
 */
enum {
    HETCCL_DEVICE_HOST_MEMORY = 1u << 0,      /* its memory is ordinary host memory: no copies are needed to read it */
    HETCCL_DEVICE_FLAGS       = 1u << 1,      /* flag_alloc, flag_free, flag_set, stream_wait_flag */
    HETCCL_DEVICE_KERNELS     = 1u << 2,      /* reduce_async, scale_async */
    HETCCL_DEVICE_DMABUF      = 1u << 3,      /* dmabuf_export */
    HETCCL_DEVICE_IPC         = 1u << 4,      /* ipc_export, ipc_open, ipc_close */
    HETCCL_DEVICE_CAPTURE     = 1u << 5,      /* is_capturing tells the truth */
    HETCCL_DEVICE_REGISTER    = 1u << 6,      /* host_register, host_unregister do something */
    HETCCL_DEVICE_SPINS       = 1u << 7       /* reduce_resident, exchange_words: kernels that wait for a word in host memory */
};

typedef struct hetccl_reduce_args {
    uint32_t size;
    int32_t dtype, redop;
    uint32_t n_src;
    void *dst;
    const void *const *src;                   /* n_src pointers, combined in this order */
    size_t count;                             /* elements */
    double scale;                             /* result is divided by this if it is not 1 (avg) */
    void *stream;
} hetccl_reduce_args;

#define HETCCL_SPIN_SOURCES 8
#define HETCCL_SPIN_SCRATCH 256
#define HETCCL_SPIN_SLOTS 32

/* A kernel that stays and combines chunk after chunk of dst as they are announced. Chunk t (of `chunk` elements, the last one
 * of what is left) may be combined once *arrive has come to base + t + 1, and is done when *freed has; counts wrap. *arrive is
 * never more than `slots` ahead of *freed. The words lie in registered or pinned host memory. A source is either as long as
 * dst, or a ring of `slots` slots of `slot_bytes` bytes, where chunk t lies in slot (first[k] + t) % slots. The kernel leaves
 * early when *stop is not 0 or timeout_ns are over. */
typedef struct hetccl_resident_args {
    uint32_t size;
    int32_t dtype, redop;
    uint32_t n_src;                           /* at most HETCCL_SPIN_SOURCES, combined in this order */
    void *dst;
    const void *src[HETCCL_SPIN_SOURCES];
    uint32_t ring[HETCCL_SPIN_SOURCES], first[HETCCL_SPIN_SOURCES];  /* ring: this source is one */
    uint32_t slots, base;                     /* slots: at most HETCCL_SPIN_SLOTS */
    size_t slot_bytes, count, chunk;          /* count, chunk: elements; chunk bytes are a multiple of 16 */
    double scale;                             /* as in hetccl_reduce_args */
    uint32_t *arrive, *freed, *stop;
    uint32_t blocks, pad;
    void *scratch;                            /* HETCCL_SPIN_SCRATCH bytes of device memory, zero at first; one kernel at a time */
    uint64_t timeout_ns;
    void *stream;
} hetccl_resident_args;

/* A kernel that exchanges `src` with one other rank and combines both into dst, through host memory that both have registered.
 * A word of 16 bytes carries 8 of data and `flag` twice; each rank stores its words to `out`, which is the other's `in`, with
 * the same flag, which is no flag that these words hold already. *done becomes `flag` when dst is complete. */
typedef struct hetccl_exchange_args {
    uint32_t size;
    int32_t dtype, redop;
    uint32_t position;                        /* 0: the own elements are the left operand; 1: the right one */
    void *dst;
    const void *src;
    size_t count;                             /* elements; words: count * element bytes / 8, rounded up */
    double scale;
    void *out;
    const void *in;
    uint32_t flag, pad;
    uint32_t *done, *stop;
    void *scratch;                            /* as above */
    uint64_t timeout_ns;
    void *stream;
} hetccl_exchange_args;

typedef struct hetccl_device_ops {
    uint32_t version, size;
    uint64_t caps;
    /* Makes the device current for the calling thread. Any thread. */
    int (*bind_thread)(void *ctx);
    const char *(*last_error)(void *ctx);
    /* Device memory. May synchronise the device; never called per step. */
    int (*alloc)(void *ctx, size_t nbytes, void **ptr);
    int (*free)(void *ctx, void *ptr);
    /* HETCCL_OK if `ptr`..`ptr+nbytes` is memory of this device, HETCCL_UNSUPPORTED if it is ordinary host memory,
     * HETCCL_INVALID if it belongs to another device or vendor. Under 200 ns. */
    int (*owns)(void *ctx, const void *ptr, size_t nbytes);
    /* Page-locked host memory that the device copies to and from at full speed. */
    int (*host_alloc)(void *ctx, size_t nbytes, void **ptr);
    int (*host_free)(void *ctx, void *ptr);
    int (*host_register)(void *ctx, void *ptr, size_t nbytes);
    int (*host_unregister)(void *ctx, void *ptr);
    /* Enqueue; return at once. Either side may be host or device memory. */
    int (*copy_async)(void *ctx, void *dst, const void *src, size_t nbytes, void *stream);
    int (*memset_async)(void *ctx, void *dst, int byte, size_t nbytes, void *stream);
    int (*stream_create)(void *ctx, void **stream);
    int (*stream_destroy)(void *ctx, void *stream);
    int (*stream_wait_event)(void *ctx, void *stream, void *event);
    int (*stream_sync)(void *ctx, void *stream);             /* blocks until the stream is empty */
    int (*event_create)(void *ctx, void **event);
    int (*event_destroy)(void *ctx, void *event);
    int (*event_record)(void *ctx, void *event, void *stream);
    int (*event_query)(void *ctx, void *event);              /* HETCCL_OK when reached, else HETCCL_IN_PROGRESS */
    int (*event_sync)(void *ctx, void *event);               /* blocks until the event is reached */
    /* Optional (caps). */
    int (*flag_alloc)(void *ctx, void **flag);               /* a 32-bit word that host and device see */
    int (*flag_free)(void *ctx, void *flag);
    int (*flag_set)(void *ctx, void *flag, uint32_t value, void *stream);
    int (*stream_wait_flag)(void *ctx, void *flag, uint32_t at_least, void *stream);
    int (*reduce_async)(void *ctx, const hetccl_reduce_args *args);
    int (*scale_async)(void *ctx, const hetccl_reduce_args *args);  /* dst = src[0] / scale */
    int (*dmabuf_export)(void *ctx, void *ptr, size_t nbytes, int *fd);
    int (*ipc_export)(void *ctx, void *ptr, void *handle64);
    int (*ipc_open)(void *ctx, const void *handle64, void **ptr);
    int (*ipc_close)(void *ctx, void *ptr);
    int (*is_capturing)(void *ctx, void *stream);            /* HETCCL_OK: no. HETCCL_IN_PROGRESS: capturing. */
    /* Never where two ranks share the device: their kernels would wait for each other in turns of the device's scheduler.
     * UNSUPPORTED for what they cannot do (the caller then copies and reduces step by step), before anything is enqueued. */
    int (*reduce_resident)(void *ctx, const hetccl_resident_args *args);
    int (*exchange_words)(void *ctx, const hetccl_exchange_args *args);
    /* HETCCL_OK: all that the stream held has ended, as after stream_sync. HETCCL_IN_PROGRESS: not yet. Not during a capture.
     * HETCCL_UNSUPPORTED: it cannot tell. Any thread; does not block. */
    int (*stream_query)(void *ctx, void *stream);
} hetccl_device_ops;

/* --------------------------------------------------------------------------------------------------- ccl_ops
 * A vendor's collective library inside one island. Buffers are memory of the island's device.
 */
enum {
    HETCCL_CCL_BLOCKING        = 1u << 0,     /* calls return only when the result is there; stream is ignored */
    HETCCL_CCL_ABORT           = 1u << 1,     /* abort() makes a running call of another thread return */
    HETCCL_CCL_STREAM_ORDERED  = 1u << 2,     /* calls enqueue on the stream and return */
    HETCCL_CCL_NAN_PROPAGATES  = 1u << 3,     /* min and max propagate NaN */
    HETCCL_CCL_MULTI_COMM      = 1u << 4,     /* several communicators a process */
    HETCCL_CCL_GROUP           = 1u << 5,     /* group_start, group_end */
    HETCCL_CCL_IN_PLACE        = 1u << 6,     /* NCCL's in-place forms work for every operation */
    HETCCL_CCL_ONE_AT_A_TIME   = 1u << 7      /* calls on all communicators of a process must come one after another, in
                                                 one order on all ranks: one lane a process, not one a communicator */
};

#define HETCCL_UNIQUE_ID_MAX 8192u

typedef struct hetccl_ccl_init_args {
    uint32_t size;
    int32_t rank, n_ranks;                    /* within the island */
    uint32_t id_len;
    const void *id;
    double timeout_s;
} hetccl_ccl_init_args;

/* One collective. `count` follows NCCL: elements of the buffer for all_reduce, broadcast, reduce; elements sent by each
 * rank for all_gather; elements received by each rank for reduce_scatter; elements a pair for all_to_all. */
typedef struct hetccl_ccl_args {
    uint32_t size;
    int32_t dtype, redop, peer;               /* peer: root, or the other rank of send and recv */
    const void *send;
    void *recv;
    size_t count;
    void *comm, *stream;
} hetccl_ccl_args;

typedef struct hetccl_ccl_ops {
    uint32_t version, size;
    uint64_t caps;
    /* Bit `op` of reduce_mask[dtype]: the library reduces that dtype with that operator. */
    uint32_t reduce_mask[32];
    uint64_t move_mask;                       /* bit dtype: moved by broadcast, all_gather, send, recv, all_to_all */
    const char *(*last_error)(void *ctx);
    /* Fills `id` (at most HETCCL_UNIQUE_ID_MAX bytes) on one rank of the island; hetccl carries it to the others. */
    int (*unique_id)(void *ctx, void *id, uint32_t *id_len);
    /* Post and test. Either may block up to timeout_s in a BLOCKING library. Handle valid after test says OK. */
    int (*init_post)(void *ctx, const hetccl_ccl_init_args *args, void **comm);
    int (*init_test)(void *ctx, void *comm);
    /* Collectives. BLOCKING: may block until all ranks of the island have called. Otherwise enqueue only. */
    int (*all_reduce)(void *ctx, const hetccl_ccl_args *args);
    int (*reduce_scatter)(void *ctx, const hetccl_ccl_args *args);
    int (*all_gather)(void *ctx, const hetccl_ccl_args *args);
    int (*broadcast)(void *ctx, const hetccl_ccl_args *args);
    int (*reduce)(void *ctx, const hetccl_ccl_args *args);
    int (*all_to_all)(void *ctx, const hetccl_ccl_args *args);
    int (*send)(void *ctx, const hetccl_ccl_args *args);
    int (*recv)(void *ctx, const hetccl_ccl_args *args);
    int (*group_start)(void *ctx);
    int (*group_end)(void *ctx);
    int (*async_error)(void *ctx, void *comm);               /* any thread, at once */
    int (*abort)(void *ctx, void *comm);                     /* any thread, also beside a running call; never blocks */
    int (*destroy)(void *ctx, void *comm);                   /* any thread, after the last call has ended; may block until the
                                                                other ranks do so, too */
} hetccl_ccl_ops;

/* --------------------------------------------------------------------------------------------- transport_ops
 * Moves messages between two ranks. An endpoint (ep) is one connected pair; it has HETCCL_CHANNELS independent ordered
 * message streams each way, so that a full stream of one kind never blocks another. A message has at most `max_message`
 * bytes and carries a 32-bit fingerprint of the operation; a receiver that expects another one gets HETCCL_MISMATCH.
 * All calls of one ep come from one thread at a time. None blocks.
 */
enum { HETCCL_CHANNEL_CONTRIBUTE = 0, HETCCL_CHANNEL_RESULT = 1, HETCCL_CHANNEL_P2P = 2, HETCCL_CHANNELS = 3 };

enum {
    HETCCL_TRANSPORT_HOST_MEMORY   = 1u << 0, /* sends from and receives into ordinary memory */
    HETCCL_TRANSPORT_DEVICE_MEMORY = 1u << 1, /* from and into registered device memory */
    HETCCL_TRANSPORT_DMABUF        = 1u << 2,
    HETCCL_TRANSPORT_ONE_SIDED     = 1u << 3, /* put_notify */
    HETCCL_TRANSPORT_SAME_HOST     = 1u << 4,
    HETCCL_TRANSPORT_ENCRYPTED     = 1u << 5,
    HETCCL_TRANSPORT_SLOTS         = 1u << 6, /* reserve/commit/peek/release work in memory that the peer sees: no copy */
    HETCCL_TRANSPORT_ANSWER        = 1u << 7, /* answer; the memory that peek gives may be written until it is released */
    HETCCL_TRANSPORT_WINDOW        = 1u << 8, /* window */
    HETCCL_TRANSPORT_PUT           = 1u << 9  /* window may answer `copies`; then window_put and window_test exist */
};

typedef struct hetccl_message {
    uint32_t size;
    uint32_t fingerprint;
    int32_t channel;
    uint32_t flags;
    void *ptr;                                /* send: data. recv: where to. reserve, peek: set by the call */
    size_t nbytes;                            /* reserve: wanted. recv: expected. peek: 0, or what is expected; set by the call */
} hetccl_message;

/* One-sided and zero-copy forms, for transports with registered memory. */
typedef struct hetccl_put_args {
    uint32_t size;
    uint32_t notify;                          /* value that the peer's notification word takes when the data is there */
    void *ep, *local_region, *remote_region;
    uint64_t local_offset, remote_offset, nbytes;
    void *request;                            /* for test */
} hetccl_put_args;

typedef struct hetccl_region_args {
    uint32_t size;
    int32_t dmabuf_fd;                        /* -1: none */
    void *ptr;
    size_t nbytes;
    uint8_t key[64];                          /* set: what the peer needs to address the region */
    uint32_t key_len;
} hetccl_region_args;

/* Plain memory that both ranks of a link share, beside its messages, or of which each has a copy that the other puts into. */
typedef struct hetccl_window_args {
    uint32_t size;
    int32_t side;                             /* set: 0 on the rank that dialled, 1 on the other */
    size_t nbytes;                            /* wanted; at most 128 MiB */
    void *ptr;                                /* set: page-aligned; zero until one of the two writes */
    uint32_t copies;                          /* set (PUT): 1 if each rank has a copy; what is written shows at the peer only
                                               * once it is put. Stays 0 where the memory is one and the same */
    uint32_t pad;
} hetccl_window_args;

/* A part of a rank's copy of the window that the peer's copy shall take, and words that it takes afterwards. */
typedef struct hetccl_window_word {
    uint64_t at, value;                       /* at: where in the window, a multiple of 8 */
} hetccl_window_word;

typedef struct hetccl_window_put {
    uint32_t size, n_words;                   /* words: 0 to 2 */
    uint64_t at, nbytes;                      /* where in the window; 0 bytes: only words */
    hetccl_window_word word[2];
} hetccl_window_put;

typedef struct hetccl_transport_counters {
    uint32_t size, pad;
    uint64_t bytes_sent, bytes_received;      /* payload, headers not counted */
    uint64_t messages_sent, messages_received;
    /* PUT: how long the threads that carry windows' bytes were busy, all together; what a window carries is not counted above */
    uint64_t put_threads, put_send_ns, put_receive_ns, put_idle_ns;    /* sending threads; idle: of those, without work */
} hetccl_transport_counters;

typedef struct hetccl_transport_ops {
    uint32_t version, size;
    uint64_t caps;
    size_t max_message;
    const char *(*last_error)(void *ctx);
    /* Whole messages. HETCCL_IN_PROGRESS: nothing, or a part, has moved: call again with the same arguments. After
     * HETCCL_OK of send the memory may be reused; after HETCCL_OK of recv the message lies at ptr. A send that was
     * begun must be finished before another send on that channel (likewise recv). recv answers HETCCL_MISMATCH if the
     * next message has another fingerprint or length (last_error says which). */
    int (*send)(void *ctx, void *ep, hetccl_message *m);
    int (*recv)(void *ctx, void *ep, hetccl_message *m);
    /* In place. reserve: m->ptr gets room for nbytes in the outgoing stream; several may be reserved before the first
     * commit; commit hands over the oldest reserved one with m->nbytes (<= reserved) and m->fingerprint.
     * peek: the `index`-th unreleased incoming message, whole, 64-byte aligned; release frees the oldest. */
    int (*reserve)(void *ctx, void *ep, hetccl_message *m);
    int (*commit)(void *ctx, void *ep, hetccl_message *m);
    int (*peek)(void *ctx, void *ep, hetccl_message *m, uint32_t index);
    int (*release)(void *ctx, void *ep, int32_t channel);
    /* Pushes pending work along (partly sent messages, completions). */
    int (*progress)(void *ctx, void *ep);
    /* Sleeping. wait_fds fills at most `max` descriptors to poll for reading (events POLLIN; POLLOUT where bit 30 of the
     * number is set) and returns how many through *n. arm says "I am about to sleep: wake me", and answers HETCCL_OK, or
     * HETCCL_IN_PROGRESS if something arrived meanwhile (then do not sleep); disarm takes that back and drains wake-ups. */
    int (*wait_fds)(void *ctx, int *fds, uint32_t max, uint32_t *n);
    int (*arm)(void *ctx);
    int (*disarm)(void *ctx);
    int (*counters)(void *ctx, void *ep, hetccl_transport_counters *out);
    int (*ep_error)(void *ctx, void *ep);                    /* HETCCL_OK, HETCCL_PEER_LOST or another error that stays */
    int (*ep_close)(void *ctx, void *ep);                    /* drops what is unsent; never blocks */
    /* Registered memory and one-sided (caps). */
    int (*region_register)(void *ctx, hetccl_region_args *args, void **region);
    int (*region_unregister)(void *ctx, void *region);
    int (*region_import)(void *ctx, void *ep, const hetccl_region_args *remote, void **region);
    int (*post_send)(void *ctx, hetccl_put_args *args);
    int (*post_recv)(void *ctx, hetccl_put_args *args);
    int (*put_notify)(void *ctx, hetccl_put_args *args);
    int (*test)(void *ctx, void *request);
    int (*cancel)(void *ctx, void *request);
    /* Optional (ANSWER): combine in place. Hands the oldest unreleased message of CONTRIBUTE back to its sender as the next
     * message on RESULT, with what the receiver has written over it, and releases it: one slot serves both ways, so no
     * second copy of the data crosses between the cores. m->nbytes (at most the message's) and m->fingerprint are those
     * of the result. HETCCL_IN_PROGRESS: no room on RESULT; call again, but do not combine again. The sender peeks or
     * receives it like any result; its contribute slot comes free when it releases that. */
    int (*answer)(void *ctx, void *ep, hetccl_message *m);
    /* Optional (WINDOW): the link's shared memory, the same at every call, mapped until the transport is closed. It costs
     * memory only where it is touched or registered. Any thread. */
    int (*window)(void *ctx, void *ep, hetccl_window_args *args);
    /* Optional (PUT). The words show at the peer, in their order and with release, after the bytes of this and of every earlier
     * put that had bytes; puts of words alone keep an order among themselves. The bytes must stay until the peer has them, which
     * only a word of its own can tell. HETCCL_IN_PROGRESS: too many bytes are under way, nothing was taken; words alone are always
     * taken. window_test moves both directions along, and answers HETCCL_OK when all that was put has left this rank. */
    int (*window_put)(void *ctx, void *ep, const hetccl_window_put *put);
    int (*window_test)(void *ctx, void *ep);
} hetccl_transport_ops;

#define HETCCL_WAIT_WRITABLE (1 << 30)

/* Names of the PyCapsules in which a driver hands its tables over, and what they point to. */
#define HETCCL_DEVICE_CAPSULE    "hetccl.device_ops"
#define HETCCL_CCL_CAPSULE       "hetccl.ccl_ops"
#define HETCCL_TRANSPORT_CAPSULE "hetccl.transport_ops"

typedef struct hetccl_table {
    const void *ops;                          /* one of the three tables above */
    void *ctx;
} hetccl_table;

#ifdef __cplusplus
}
#endif
#endif
