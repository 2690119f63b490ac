/* SPDX-License-Identifier: Apache-2.0
 * The C shapes of NCCL-like calls, and the state of one opened library and of one communicator.
 */
#ifndef HETCCL_NCCL_STATE_H
#define HETCCL_NCCL_STATE_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hetccl/spi.h"
#include "threads.h"
#include "wait.h"

#define HETCCL_NCCL_ID_MAX 4096
#define HETCCL_NCCL_CONFIG_MAX 512
#define HETCCL_NCCL_CODES 32

typedef int (*hetccl_nccl_reduce_fn)(const void *, void *, size_t, int, int, void *, void *);
typedef int (*hetccl_nccl_root_reduce_fn)(const void *, void *, size_t, int, int, int, void *, void *);
typedef int (*hetccl_nccl_move_fn)(const void *, void *, size_t, int, void *, void *);
typedef int (*hetccl_nccl_root_fn)(const void *, void *, size_t, int, int, void *, void *);
typedef int (*hetccl_nccl_send_fn)(const void *, size_t, int, int, void *, void *);
typedef int (*hetccl_nccl_recv_fn)(void *, size_t, int, int, void *, void *);
typedef int (*hetccl_nccl_comm_fn)(void *);
typedef int (*hetccl_nccl_plain_fn)(void);
typedef int (*hetccl_nccl_id_fn)(void *);
typedef int (*hetccl_nccl_async_fn)(void *, int *);
typedef int (*hetccl_nccl_version_fn)(int *);
typedef const char *(*hetccl_nccl_code_text_fn)(int);
typedef const char *(*hetccl_nccl_last_text_fn)(void *);

/* One opened library. Filled once, then only read, but for the lock. Never freed. */
typedef struct hetccl_nccl_library {
    hetccl_ccl_ops ops;
    hetccl_table table;
    hetccl_nccl_reduce_fn all_reduce, reduce_scatter;
    hetccl_nccl_root_reduce_fn reduce;
    hetccl_nccl_move_fn all_gather, all_to_all;
    hetccl_nccl_root_fn broadcast;
    hetccl_nccl_send_fn send;
    hetccl_nccl_recv_fn recv;
    hetccl_nccl_plain_fn group_start, group_end;
    hetccl_nccl_comm_fn finalize, destroy, abort;
    hetccl_nccl_id_fn unique_id;
    hetccl_nccl_async_fn async_error;
    hetccl_nccl_version_fn version;
    hetccl_nccl_code_text_fn code_text;
    hetccl_nccl_last_text_fn last_text;
    void *init;                                  /* CommInitRank, or CommInitRankConfig if config_len */
    uint32_t id_len, config_len;
    int id_by_pointer, ranks_are_size_t, init_in_thread, streams, recv_on_all_ranks, one_at_a_time;
    int8_t dtype_of[32], redop_of[16];           /* the library's numbers; -1: none */
    uint8_t elements_of[32];                     /* elements of dtype_of that make one of ours (complex: 2) */
    uint8_t item_bytes[32];
    int32_t status_of[HETCCL_NCCL_CODES];
    char name_of[HETCCL_NCCL_CODES][32];
    char prefix[32];
    unsigned char config[HETCCL_NCCL_CONFIG_MAX];
    int (*bind)(void *);                         /* makes the device current; NULL: the library needs none */
    void *bind_ctx;
    pthread_mutex_t lock;                        /* held by each call if one_at_a_time */
} hetccl_nccl_library;

enum { HETCCL_NCCL_JOINING = 0, HETCCL_NCCL_READY = 1, HETCCL_NCCL_FAILED = 2, HETCCL_NCCL_LEFT = 3 };

/* One communicator of one rank; what the core holds as `comm`. */
typedef struct hetccl_nccl_comm {
    void *handle;
    hetccl_nccl_library *library;
    int32_t rank, n_ranks;
    pid_t pid;                                   /* a forked child must not use its parent's communicator */
    atomic_int state;
    atomic_int aborting, polling;                /* CommAbort waits for the short moment of polling */
    _Atomic uint32_t aborted;                    /* CommAbort has returned; a futex word */
    double timeout_s;
    void *scratch;
    size_t scratch_bytes;
    int code;                                    /* of init, when it has failed */
    unsigned char id[HETCCL_NCCL_ID_MAX];
} hetccl_nccl_comm;

typedef struct { char bytes[128]; } hetccl_nccl_id128;
typedef struct { char bytes[136]; } hetccl_nccl_id136;
typedef struct { char bytes[4096]; } hetccl_nccl_id4096;

#define HETCCL_NCCL_INIT(COUNT, ID, id_value)                                                        \
    (l->config_len ? ((int (*)(void **, COUNT, ID, int, void *))l->init)(&c->handle, (COUNT)c->n_ranks, \
                                                                        id_value, c->rank, config)      \
                   : ((int (*)(void **, COUNT, ID, int))l->init)(&c->handle, (COUNT)c->n_ranks, id_value, c->rank))
#define HETCCL_NCCL_INIT_ID(ID, id_value) \
    (l->ranks_are_size_t ? HETCCL_NCCL_INIT(size_t, ID, id_value) : HETCCL_NCCL_INIT(int, ID, id_value))

/* Calls CommInitRank(Config) in the one of its sixteen shapes that the data name; returns the library's code. May block
 * until all ranks have come, as the library does. */
static inline int hetccl_nccl_init(hetccl_nccl_library *l, hetccl_nccl_comm *c)
{
    unsigned char config[HETCCL_NCCL_CONFIG_MAX] __attribute__((aligned(16)));
    memcpy(config, l->config, sizeof config);
    if (l->bind)
        l->bind(l->bind_ctx);                    /* a communicator belongs to the device that is current when it is made */
    if (l->id_by_pointer)
        return HETCCL_NCCL_INIT_ID(void *, (void *)c->id);
    if (l->id_len == 128)
        return HETCCL_NCCL_INIT_ID(hetccl_nccl_id128, *(hetccl_nccl_id128 *)c->id);
    if (l->id_len == 136)
        return HETCCL_NCCL_INIT_ID(hetccl_nccl_id136, *(hetccl_nccl_id136 *)c->id);
    return HETCCL_NCCL_INIT_ID(hetccl_nccl_id4096, *(hetccl_nccl_id4096 *)c->id);
}

/* Takes the library's lock; 0, or ETIMEDOUT after `seconds`. */
static inline int hetccl_nccl_lock(hetccl_nccl_library *l, double seconds)
{
    struct timespec until;
    if (pthread_mutex_trylock(&l->lock) == 0)
        return 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)seconds + 1;
    return pthread_mutex_clocklock(&l->lock, CLOCK_MONOTONIC, &until);
}

/* Starts a detached thread in which no signal is delivered; 0 or an errno. */
static inline int hetccl_nccl_thread(void *(*body)(void *), void *arg)
{
    pthread_t thread;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    int rc = hetccl_thread_start(&thread, &attr, body, arg);
    pthread_attr_destroy(&attr);
    return rc;
}

static void *hetccl_nccl_abort_body(void *arg)
{
    hetccl_nccl_comm *c = arg;
    while (atomic_load(&c->polling))
        sched_yield();
    if (c->library->bind)
        c->library->bind(c->library->bind_ctx);
    if (c->handle)
        c->library->abort(c->handle);            /* what it complains of is of no interest any more */
    atomic_store(&c->aborted, 1);
    hetccl_futex_wake(&c->aborted);
    return NULL;
}

/* Calls CommAbort, which may wait for other ranks, beside the caller. */
static inline void hetccl_nccl_abort(hetccl_nccl_comm *c)
{
    if (hetccl_nccl_thread(hetccl_nccl_abort_body, c) != 0)
        hetccl_nccl_abort_body(c);
}

static inline void hetccl_nccl_await_abort(hetccl_nccl_comm *c)
{
    while (!atomic_load(&c->aborted))
        hetccl_futex_wait(&c->aborted, 0, 1000000000u);
}
#endif
