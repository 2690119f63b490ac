/* SPDX-License-Identifier: Apache-2.0
 * The pretend accelerator: memory that the host cannot touch, and streams that are really asynchronous.
 *
 * Users hold addresses of pages without any permission; a stray host access faults, as it would with a real device
 * pointer. The same pages are mapped a second time, readable and writable: the alias, which only stream threads use.
 * Calls translate pointers to aliases when they enqueue, and hold a reference on the block until the work is done.
 *
 * A process has one registry of all blocks of all sim devices, so that one device refuses another one's memory.
 * The default stream is an ordinary stream of its own: unlike CUDA's it does not synchronise with the others.
 */
#ifndef HETCCL_SIM_DEVICE_H
#define HETCCL_SIM_DEVICE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "conditions.h"
#include "hetccl/spi.h"

#define HETCCL_SIM_NAME_MAX 64
#define HETCCL_SIM_TEXT_MAX 320
#define HETCCL_SIM_QUEUE_MAX 4096u             /* operations that a stream holds before enqueuing blocks */
#define HETCCL_SIM_SLICE_NS 100000000u         /* a sleeping thread looks for `stop` this often */

typedef struct hetccl_sim_registry hetccl_sim_registry;
typedef struct hetccl_sim_stream hetccl_sim_stream;
typedef struct hetccl_sim_comm hetccl_sim_comm;

typedef struct hetccl_sim_device {
    char name[HETCCL_SIM_NAME_MAX];            /* the vendor's full name, "sim-a" */
    int32_t index;
    pid_t pid;                                 /* a forked child has no stream threads and is refused */
    hetccl_sim_registry *registry;
    _Atomic uint64_t deadline_ns;              /* how long any wait of this device may last */
    _Atomic uint32_t stop;                     /* 1: stream threads abandon their work and leave */
    _Atomic int error;                         /* first failure of a stream thread (not of a collective); stays */
    pthread_mutex_t lock;                      /* guards what follows; taken before a stream's own lock */
    pthread_cond_t idle;                       /* n_threads became 0 */
    char error_text[HETCCL_SIM_TEXT_MAX];
    hetccl_sim_stream *default_stream, *streams;
    hetccl_sim_comm *comms;
    uint32_t n_threads;
    hetccl_sim_conditions conditions;          /* set before the first stream is made */
    hetccl_sim_disorder disorder;
} hetccl_sim_device;

/* ---- memory.c */

typedef struct hetccl_sim_block {              /* one allocation */
    char *user, *alias;
    size_t nbytes, mapped, reserved;           /* as asked for; of the alias, whole pages; of user, one page more */
    hetccl_sim_device *device;
    _Atomic uint32_t refs;
} hetccl_sim_block;

typedef struct hetccl_sim_span {               /* a pointer of a call, as its stream thread sees it */
    char *at;
    hetccl_sim_block *block;                   /* NULL: host memory, or no bytes at all */
} hetccl_sim_span;

hetccl_sim_registry *hetccl_sim_registry_new(void);
int hetccl_sim_alloc(hetccl_sim_device *d, size_t nbytes, void **ptr);
int hetccl_sim_free(hetccl_sim_device *d, void *ptr);
int hetccl_sim_owns(hetccl_sim_device *d, const void *ptr, size_t nbytes);

/* Translates `nbytes` at `ptr`. HETCCL_INVALID for another device's memory, a range that leaves its allocation, and host
 * memory unless host_too. `what` names the argument in the error text. End it with hetccl_sim_span_release. */
int hetccl_sim_resolve(hetccl_sim_device *d, const void *ptr, size_t nbytes, int host_too, const char *what,
                       hetccl_sim_span *out);
void hetccl_sim_span_release(hetccl_sim_span *span);

/* ---- stream.c */

typedef struct hetccl_sim_op {                 /* one piece of queued work; kinds embed it as their first member */
    struct hetccl_sim_op *next;
    /* Does the work in the stream's thread. A failure becomes the device's error. */
    int (*run)(struct hetccl_sim_op *op, hetccl_sim_device *d);
    /* Always called last, once: after run with HETCCL_OK or its failure, or without it with HETCCL_ABORTED. Frees op. */
    void (*end)(struct hetccl_sim_op *op, int status);
} hetccl_sim_op;

/* A point in a stream that has been passed or not. Waits and events hold references; it outlives both. */
typedef struct hetccl_sim_mark {
    _Atomic uint32_t state;                    /* HETCCL_IN_PROGRESS, HETCCL_OK, or why it will never be passed */
    _Atomic uint32_t refs;
} hetccl_sim_mark;

int hetccl_sim_stream_new(hetccl_sim_device *d, hetccl_sim_stream **out);
/* Takes no new work; the thread finishes what is queued and then frees the stream. */
int hetccl_sim_stream_close(hetccl_sim_device *d, hetccl_sim_stream *s);
/* Hands `op` to stream `s` (NULL: the default one). Blocks only while the queue is full. On failure op has been ended. */
int hetccl_sim_enqueue(hetccl_sim_device *d, void *s, hetccl_sim_op *op);
/* Makes the stream threads leave. Blocks until they have, at most wait_ns; HETCCL_TIMED_OUT if one has not. */
int hetccl_sim_stop(hetccl_sim_device *d, uint64_t wait_ns);

hetccl_sim_mark *hetccl_sim_mark_new(void);
hetccl_sim_mark *hetccl_sim_mark_ref(hetccl_sim_mark *m);
void hetccl_sim_mark_unref(hetccl_sim_mark *m);
/* Enqueues the passing of `m`; takes a reference of its own. */
int hetccl_sim_mark_record(hetccl_sim_device *d, hetccl_sim_mark *m, void *stream);
/* Blocks until the mark is passed or abandoned, the device stops, or its deadline is over. */
int hetccl_sim_mark_wait(hetccl_sim_device *d, hetccl_sim_mark *m);

/* ---- work.c and event.c: entries of the device table, see spi.h */

int hetccl_sim_copy_async(void *ctx, void *dst, const void *src, size_t nbytes, void *stream);
int hetccl_sim_memset_async(void *ctx, void *dst, int byte, size_t nbytes, void *stream);
int hetccl_sim_reduce_async(void *ctx, const hetccl_reduce_args *args);
int hetccl_sim_scale_async(void *ctx, const hetccl_reduce_args *args);
int hetccl_sim_stream_sync(void *ctx, void *stream);
int hetccl_sim_stream_wait_event(void *ctx, void *stream, void *event);
int hetccl_sim_event_create(void *ctx, void **event);
int hetccl_sim_event_destroy(void *ctx, void *event);
int hetccl_sim_event_record(void *ctx, void *event, void *stream);
int hetccl_sim_event_query(void *ctx, void *event);
int hetccl_sim_event_sync(void *ctx, void *event);
int hetccl_sim_flag_alloc(void *ctx, void **flag);
int hetccl_sim_flag_free(void *ctx, void *flag);
int hetccl_sim_flag_set(void *ctx, void *flag, uint32_t value, void *stream);
int hetccl_sim_stream_wait_flag(void *ctx, void *flag, uint32_t at_least, void *stream);

/* ---- device.c */

extern const hetccl_device_ops hetccl_sim_device_ops;

hetccl_sim_device *hetccl_sim_device_new(hetccl_sim_registry *r, const char *name, int32_t index);
/* First line of every call: HETCCL_OK, or why this device cannot be used here (fork, stopped, earlier failure). */
int hetccl_sim_check(hetccl_sim_device *d);
/* The same, of fork only: for calls that give something back. */
int hetccl_sim_check_process(hetccl_sim_device *d);
/* Sets the calling thread's error text and returns `status`. */
int hetccl_sim_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
int hetccl_sim_no_memory(const hetccl_sim_device *d);
const char *hetccl_sim_last_error(void *ctx);
/* Puts the device into its error state, with the calling thread's error text, unless it is in one. */
void hetccl_sim_break(hetccl_sim_device *d, int status);
#endif
