/* SPDX-License-Identifier: Apache-2.0
 * Stand-in for libcudart and libamdhip64 on host memory. Streams are deferred: work runs only when something waits or asks, and
 * streams that nothing orders run in an order that a seed decides. So a missing event shows as wrong data.
 * Compiled with -DHIP for the second. Variables: STANDIN_SEED, STANDIN_DEVICES, STANDIN_BUSY (answers "not ready" so often),
 * STANDIN_FAIL="cudaMemcpyAsync:3:999" (the third call answers 999), STANDIN_ELSEWHERE (kernels see registered memory so many
 * bytes further on), STANDIN_LATE_BLOCK (kernels.h).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#ifdef HIP
#define N(name) hip##name
#define PREFIX "hip"
#else
#define N(name) cuda##name
#define PREFIX "cuda"
#endif
enum { HOST_TYPE = 1, DEVICE_TYPE = 2 };
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, BAD_DEVICE = 101, BAD_HANDLE = 400, NOT_READY = 600 };
enum { STREAM = 0x57e4, EVENT = 0xe7e7 };

/* One step of deferred work: 1 done, 0 not yet. */
typedef int (*step_fn)(void *);
/* For a graph: another copy of its argument, for one replay. */
typedef void *(*again_fn)(void *);
typedef struct op { step_fn fn; void *arg; again_fn again; struct op *next; } op;
typedef struct stream { int magic, device; op *head, *tail; uint64_t enqueued, done; struct graph *into; int apart, asked; struct stream *next; } stream;
typedef struct event { int magic, asked; stream *on; uint64_t at; struct graph *into; } event;
typedef struct block { char *p; size_t n; int type, device; struct block *next; } block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream null_streams[8], *streams;
static block *blocks;
static _Thread_local int current, last;
static uint64_t seed;

static int env(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
static int devices(void) { return env("STANDIN_DEVICES", 8) > 8 ? 8 : env("STANDIN_DEVICES", 8); }

static uint64_t draw(void)
{
    if (!seed)
        seed = (uint64_t)env("STANDIN_SEED", 1) * 0x9E3779B97F4A7C15u | 1;
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static int answer(int code) { if (code) last = code; return code; }

/* The fault switch: the code for this call, or 0. */
static int fault(const char *name)
{
    static int calls;
    const char *wanted = getenv("STANDIN_FAIL");
    size_t n = strlen(name);
    if (!wanted || strncmp(wanted, name, n) || wanted[n] != ':')
        return 0;
    char *rest;
    long k = strtol(wanted + n + 1, &rest, 10);
    return ++calls == k && *rest == ':' ? atoi(rest + 1) : 0;
}
#define ENTER(name) do { int f = fault(PREFIX name); if (f) return answer(f); } while (0)

static stream *of(void *handle)
{
    if (handle)
        return ((stream *)handle)->magic == STREAM ? handle : NULL;
    stream *s = &null_streams[current];
    if (!s->magic) {
        s->magic = STREAM;
        s->device = current;
        s->next = streams;
        streams = s;
    }
    return s;
}

static int run(stream *s, uint64_t upto)
{
    while (s->done < upto && s->head) {
        op *o = s->head;
        if (!o->fn(o->arg))
            return 0;
        if (!(s->head = o->next))
            s->tail = NULL;
        s->done++;
        free(o);
    }
    return s->done >= upto;
}

/* Lets other streams go first, some of the time, one step or all they have. */
static void others(stream *s)
{
    for (stream *o = streams; o; o = o->next)
        if (o != s && o->head && draw() & 1)
            run(o, draw() & 1 ? o->enqueued : o->done + 1);
}

static void finish(stream *s, uint64_t upto)
{
    pthread_mutex_lock(&lock);
    others(s);
    while (!run(s, upto)) {
        for (stream *o = streams; o; o = o->next)
            run(o, o->enqueued);
        pthread_mutex_unlock(&lock);
        sched_yield();
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
}

#include "graph.h"

static int enqueue(void *handle, step_fn fn, void *arg, again_fn again)
{
    pthread_mutex_lock(&lock);
    stream *s = of(handle);
    op *o = s ? malloc(sizeof *o) : NULL;
    if (o && s->into) {
        *o = (op){fn, arg, again, NULL};
        keep(s, o);
    } else if (o) {
        *o = (op){fn, arg, NULL, NULL};
        if (s->tail)
            s->tail->next = o;
        else
            s->head = o;
        s->tail = o;
        s->enqueued++;
    }
    pthread_mutex_unlock(&lock);
    return o ? OK : BAD_HANDLE;
}

/* For the stand-ins of the collective libraries and of the driver. */
API int standin_enqueue(void *handle, step_fn fn, void *arg, again_fn again) { return enqueue(handle, fn, arg, again); }

static block *find(const void *p)
{
    for (block *b = blocks; b; b = b->next)
        if ((const char *)p >= b->p && (const char *)p < b->p + b->n)
            return b;
    return NULL;
}

/* The device that owns the range, or -1. */
API int standin_device_of(const void *p, size_t n)
{
    pthread_mutex_lock(&lock);
    block *b = find(p);
    int device = b && b->type == DEVICE_TYPE && (const char *)p + n <= b->p + b->n ? b->device : -1;
    pthread_mutex_unlock(&lock);
    return device;
}
API int standin_current_device(void) { return current; }

API int N(GetDeviceCount)(int *n) { ENTER("GetDeviceCount"); *n = devices(); return *n ? OK : answer(NO_DEVICE); }
API int N(SetDevice)(int d) { ENTER("SetDevice"); if (d < 0 || d >= devices()) return answer(BAD_DEVICE); current = d; return OK; }
API int N(GetDevice)(int *d) { *d = current; return OK; }
API int N(GetLastError)(void) { int l = last; last = OK; return l; }
API int N(RuntimeGetVersion)(int *v)
{
#ifdef HIP
    *v = env("STANDIN_RUNTIME", 70051831);
#else
    *v = env("STANDIN_RUNTIME", 13000);
#endif
    return OK;
}
API const char *N(GetErrorString)(int code)
{
    switch (code) {
    case OK: return "no error";
    case INVALID: return "invalid argument";
    case NO_MEMORY: return "out of memory";
    case NO_DEVICE: return "no device is detected";
    case BAD_DEVICE: return "invalid device ordinal";
    case BAD_HANDLE: return "invalid resource handle";
    case NOT_READY: return "device not ready";
    default: return "stand-in: an error that a test asked for";
    }
}
API int N(DeviceGetAttribute)(int *v, int number, int d)
{
    if (d < 0 || d >= devices())
        return answer(BAD_DEVICE);
    *v = number == 75 ? 9 : 0;
    return OK;
}
API int N(DeviceGetPCIBusId)(char *text, int n, int d) { snprintf(text, (size_t)n, "0000:%02X:00.0", d + 1); return OK; }

static int allocate(void **p, size_t n, int type)
{
    block *b = malloc(sizeof *b);
    if (!b || n > (size_t)1 << 40 || posix_memalign(p, 512, n + 1))
        return answer(NO_MEMORY);
    memset(*p, 0xa5, n);
    *b = (block){*p, n, type, current, NULL};
    pthread_mutex_lock(&lock);
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Waits for everything, as the real ones do, then forgets the block. */
static int release(void *p, int type)
{
    if (!p)
        return OK;
    for (stream *s = streams; s; s = s->next)
        finish(s, s->enqueued);
    pthread_mutex_lock(&lock);
    block **at = &blocks, *b;
    while ((b = *at) && b->p != p)
        at = &b->next;
    int found = b && b->type == type;
    if (found) {
        *at = b->next;
        memset(p, 0x5a, b->n);
        free(p);
        free(b);
    }
    pthread_mutex_unlock(&lock);
    return found ? OK : answer(INVALID);
}

API int N(Malloc)(void **p, size_t n) { ENTER("Malloc"); UNSAFE(); return allocate(p, n, DEVICE_TYPE); }
API int N(Free)(void *p) { if (p) UNSAFE(); return release(p, DEVICE_TYPE); }
static int host_alloc(void **p, size_t n, unsigned flags) { UNSAFE(); return flags > 7 ? answer(INVALID) : allocate(p, n, HOST_TYPE); }
#ifdef HIP
API int hipHostMalloc(void **p, size_t n, unsigned flags) { return host_alloc(p, n, flags); }
API int hipHostFree(void *p) { return release(p, HOST_TYPE); }
#else
API int cudaHostAlloc(void **p, size_t n, unsigned flags) { return host_alloc(p, n, flags); }
API int cudaFreeHost(void *p) { return release(p, HOST_TYPE); }
#endif
API int N(HostRegister)(void *p, size_t n, unsigned flags) { ENTER("HostRegister"); return p && n && flags <= 15 ? OK : answer(INVALID); }
API int N(HostGetDevicePointer)(void **seen, void *p, unsigned flags) { *seen = (char *)p + env("STANDIN_ELSEWHERE", 0); return p && !flags ? OK : answer(INVALID); }
API int N(HostUnregister)(void *p) { return p ? OK : answer(INVALID); }

API int N(PointerGetAttributes)(void *attributes, const void *p)
{
    struct { int type, device; const void *mine, *host; } *a = attributes;
    pthread_mutex_lock(&lock);
    block *b = find(p);
    a->type = b ? b->type : 0;
    a->device = b ? b->device : -1;
    pthread_mutex_unlock(&lock);
#ifdef HIP
    if (!b)
        return answer(INVALID);
#endif
    return OK;
}

typedef struct copy { void *dst; const void *src; size_t n; int byte; } copy;
static void *again_copy(void *arg) { copy *c = malloc(sizeof *c); *c = *(copy *)arg; return c; }
static int do_copy(void *arg) { copy *c = arg; memmove(c->dst, c->src, c->n); free(c); return 1; }
static int do_fill(void *arg) { copy *c = arg; memset(c->dst, c->byte, c->n); free(c); return 1; }

API int N(MemcpyAsync)(void *dst, const void *src, size_t n, int kind, void *s)
{
    ENTER("MemcpyAsync");
    copy *c = kind >= 0 && kind <= 4 && dst && src ? malloc(sizeof *c) : NULL;
    if (!c)
        return answer(INVALID);
    *c = (copy){dst, src, n, 0};
    return answer(enqueue(s, do_copy, c, again_copy));
}
API int N(MemsetAsync)(void *dst, int byte, size_t n, void *s)
{
    ENTER("MemsetAsync");
    copy *c = malloc(sizeof *c);
    if (!c || !dst || standin_device_of(dst, n) < 0)
        return answer(INVALID);
    *c = (copy){dst, NULL, n, byte};
    return answer(enqueue(s, do_fill, c, again_copy));
}

API int N(StreamCreateWithFlags)(void **out, unsigned flags)
{
    stream *s = flags <= 1 ? calloc(1, sizeof *s) : NULL;
    if (!s)
        return answer(INVALID);
    s->magic = STREAM;
    s->device = current;
    pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    *out = s;
    return OK;
}
API int N(StreamSynchronize)(void *handle)
{
    ENTER("StreamSynchronize");
    pthread_mutex_lock(&lock);
    stream *s = of(handle);
    pthread_mutex_unlock(&lock);
    if (!s)
        return answer(BAD_HANDLE);
    if (s->into)
        return answer(spoil(UNSUPPORTED_IN_CAPTURE));
    while (env("STANDIN_HANGS", 0))
        sched_yield();
    finish(s, s->enqueued);
    return OK;
}
API int N(StreamQuery)(void *handle)
{
    ENTER("StreamQuery");
    pthread_mutex_lock(&lock);
    stream *s = of(handle);
    int done = 0;
    if (s && !s->into && !(done = s->done >= s->enqueued) && s->asked++ >= env("STANDIN_BUSY", 1)) {
        others(s);
        done = run(s, s->enqueued);
        s->asked = 0;
    }
    pthread_mutex_unlock(&lock);
    if (!s)
        return answer(BAD_HANDLE);
    if (s->into)
        return answer(spoil(UNSUPPORTED_IN_CAPTURE));
    return done ? OK : answer(NOT_READY);
}
API int N(StreamDestroy)(void *handle)          /* its memory stays: events may still name it */
{
    stream *s = handle;
    if (!s || s->magic != STREAM)
        return answer(BAD_HANDLE);
    finish(s, s->enqueued);
    s->magic = 0;
    return OK;
}
API int N(EventCreateWithFlags)(void **out, unsigned flags)
{
    event *e = flags == 2 ? calloc(1, sizeof *e) : NULL;
    if (!e)
        return answer(INVALID);
    e->magic = EVENT;
    *out = e;
    return OK;
}
API int N(EventDestroy)(void *handle) { event *e = handle; if (!e || e->magic != EVENT) return answer(BAD_HANDLE); e->magic = 0; free(e); return OK; }
API int N(EventRecord)(void *handle, void *on)
{
    ENTER("EventRecord");
    event *e = handle;
    pthread_mutex_lock(&lock);
    stream *s = of(on);
    int good = e && e->magic == EVENT && s;
    if (good) {
        e->on = s;
        e->at = s->enqueued;
        e->asked = 0;
        e->into = s->into;
    }
    pthread_mutex_unlock(&lock);
    return good ? OK : answer(BAD_HANDLE);
}
API int N(EventQuery)(void *handle)
{
    ENTER("EventQuery");
    event *e = handle;
    if (!e || e->magic != EVENT)
        return answer(BAD_HANDLE);
    UNSAFE();
    if (e->into)
        return answer(CAPTURED_EVENT);
    if (env("STANDIN_HANGS", 0))
        return answer(NOT_READY);
    pthread_mutex_lock(&lock);
    int done = 1;
    if (e->on && e->on->done < e->at) {
        if (e->asked++ < env("STANDIN_BUSY", 1))
            done = 0;
        else {
            others(e->on);
            done = run(e->on, e->at);
        }
    }
    pthread_mutex_unlock(&lock);
    return done ? OK : answer(NOT_READY);
}
API int N(EventSynchronize)(void *handle)
{
    event *e = handle;
    if (!e || e->magic != EVENT)
        return answer(BAD_HANDLE);
    UNSAFE();
    if (e->into)
        return answer(CAPTURED_EVENT);
    if (e->on)
        finish(e->on, e->at);
    return OK;
}

typedef struct wait { stream *on; uint64_t at; } wait;
static int do_wait(void *arg)
{
    wait *w = arg;
    if (!run(w->on, w->at))
        return 0;
    free(w);
    return 1;
}
API int N(StreamWaitEvent)(void *handle, void *what, unsigned flags)
{
    event *e = what;
    if (!e || e->magic != EVENT || flags > 1)
        return answer(BAD_HANDLE);
    int joined = join(handle, e);
    if (joined >= 0)
        return answer(joined);
    if (!e->on)
        return OK;
    wait *w = malloc(sizeof *w);
    *w = (wait){e->on, e->at};
    return answer(enqueue(handle, do_wait, w, NULL));
}

#include "kernels.h"
