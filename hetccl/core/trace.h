/* SPDX-License-Identifier: Apache-2.0
 * What the executor did, event by event, for the checker (core/tracing.py): memory of a fixed size, none when tracing is off.
 * Where the executor works it knows which step, which flow and which addresses it takes; these are written down as they are
 * used, not as the plan says.
 */
#ifndef HETCCL_TRACE_H
#define HETCCL_TRACE_H
#include <pthread.h>
#include <stdint.h>

enum {
    HX_DID_BEGIN,           /* index: the plan's number; a: in - out, n: count, m: chunk, all in elements */
    HX_DID_STEP,            /* index: step; a, b, n: where src and dst begin in their buffers, and elements (of len for calls) */
    HX_DID_DONE,            /* index: step, done for one more segment */
    HX_DID_FLOW,            /* index: flow; a, b, n: as of a step */
    HX_DID_SEND,            /* index: flow, peer: number among its peers; a: first element, n: elements */
    HX_DID_GET,             /* index: flow; a, n: received or combined */
    HX_DID_END              /* n: 1 if the rest is left to a stream */
};

#define HX_NOWHERE INT64_MIN

typedef struct hx_event {
    uint32_t sequence;      /* of the work */
    int32_t what, index, peer;
    int64_t segment, a, b, n, m;
} hx_event;

typedef struct hx_trace {
    pthread_mutex_t lock;
    uint64_t capacity, used, lost;
    hx_event *events;
} hx_trace;

static inline void hx_trace_put(hx_trace *t, hx_event e)
{
    pthread_mutex_lock(&t->lock);
    if (t->used < t->capacity)
        t->events[t->used++] = e;
    else
        t->lost++;
    pthread_mutex_unlock(&t->lock);
}

/* One event of a work, if somebody wants it. */
#define HX_TRACE(w, ...)                                                                                  \
    do {                                                                                                  \
        if (__builtin_expect((w)->comm->trace != NULL, 0))                                                \
            hx_trace_put((w)->comm->trace, (hx_event){.sequence = (w)->sequence, __VA_ARGS__});           \
    } while (0)
#endif
