/* SPDX-License-Identifier: Apache-2.0
 * The functions of the device table of CUDA-shaped runtimes. cuda_shaped.pyx fills in what they call.
 *
 * A runtime's "current device" belongs to the thread, and the program may change it at any time. So every call that depends on
 * it makes ours current and puts the old one back. Errors are cleared from the runtime's own memory of them: the program
 * must not stumble over ours.
 */
#define _GNU_SOURCE
#include "cuda_device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef hetccl_cuda_device device;

/* last_error is asked by the thread that failed. */
static _Thread_local char text[512] __attribute__((tls_model("initial-exec")));

static int failed(device *d, int code, const char *call)
{
    int status = code > 0 && code < HETCCL_CUDA_CODES ? d->status_of[code] : HETCCL_VENDOR;
    if (d->clear_error)
        d->clear_error();
    if (status == HETCCL_IN_PROGRESS)
        return status;
    const char *words = d->error_text ? d->error_text(code) : NULL;
    snprintf(text, sizeof text, "%s %s on device %d: %s (code %d)", d->name, call, d->index, words ? words : "no text", code);
    return status;
}

static int explain(int status, const char *words)
{
    snprintf(text, sizeof text, "%s", words);
    return status;
}

static inline int told(device *d, int code, const char *call) { return code == 0 ? HETCCL_OK : failed(d, code, call); }

/* Makes the device current; *before is what leave() puts back. */
static inline int enter(device *d, int *before)
{
    *before = d->index;
    int code = d->get_device(before);
    if (code == 0 && *before == d->index)
        return HETCCL_OK;
    return told(d, d->set_device(d->index), "SetDevice");
}

static inline void leave(device *d, int before)
{
    if (before != d->index)
        d->set_device(before);
}

#define WITH_DEVICE(CALL, EXPRESSION)             \
    int before, rc = enter(d, &before);           \
    if (rc == HETCCL_OK)                          \
        rc = told(d, EXPRESSION, CALL);           \
    leave(d, before);                             \
    return rc

static const char *last_error(void *ctx)
{
    (void)ctx;
    return text;
}

/* A thread that is not the program's main one may go on looking at events while the program captures a graph. */
static int bind_thread(void *ctx)
{
    device *d = ctx;
    int relaxed = 2;
    if (d->capture_mode && (pid_t)syscall(SYS_gettid) != getpid() && d->capture_mode(&relaxed) != 0 && d->clear_error)
        d->clear_error();
    return told(d, d->set_device(d->index), "SetDevice");
}

static int alloc(void *ctx, size_t nbytes, void **ptr)
{
    device *d = ctx;
    WITH_DEVICE("Malloc", d->alloc(ptr, nbytes ? nbytes : 1));
}

static int release(void *ctx, void *ptr)
{
    device *d = ctx;
    WITH_DEVICE("Free", d->free(ptr));
}

static int owns(void *ctx, const void *ptr, size_t nbytes)
{
    device *d = ctx;
    hetccl_cuda_attributes a;
    (void)nbytes;
    a.type = a.device = 0;
    int code = d->attributes(&a, ptr);
    if (code != 0) {
        if (code == 1 && d->invalid_is_host) {
            if (d->clear_error)
                d->clear_error();
            return HETCCL_UNSUPPORTED;
        }
        return failed(d, code, "PointerGetAttributes");
    }
    switch (a.type >= 0 && a.type < HETCCL_CUDA_TYPES ? d->memory_of[a.type] : -1) {
    case HETCCL_CUDA_HOST: return HETCCL_UNSUPPORTED;
    case HETCCL_CUDA_MANAGED: return HETCCL_OK;
    case HETCCL_CUDA_DEVICE:
        if (a.device == d->index)
            return HETCCL_OK;
        snprintf(text, sizeof text, "the memory at %p belongs to %s device %d; this rank uses device %d (HETCCL_DEVICE)", ptr,
                 d->name, a.device, d->index);
        return HETCCL_INVALID;
    default:
        snprintf(text, sizeof text, "%s calls the memory at %p type %d, which hetccl does not know", d->name, ptr, a.type);
        return HETCCL_INVALID;
    }
}

static int host_alloc(void *ctx, size_t nbytes, void **ptr)
{
    device *d = ctx;
    WITH_DEVICE("HostAlloc", d->host_alloc(ptr, nbytes ? nbytes : 1, 1));       /* 1: portable, for all devices */
}

static int host_free(void *ctx, void *ptr)
{
    device *d = ctx;
    WITH_DEVICE("FreeHost", d->host_free(ptr));
}

static int host_register(void *ctx, void *ptr, size_t nbytes)
{
    device *d = ctx;
    void *seen = NULL;
    int before, rc = enter(d, &before);
    if (rc == HETCCL_OK)
        rc = told(d, d->host_register(ptr, nbytes, 3), "HostRegister");         /* 1: portable, 2: mapped */
    if (rc == HETCCL_OK && (!d->device_address || d->device_address(&seen, ptr, 0) != 0 || seen != ptr))
        d->elsewhere = 1;                   /* copies work all the same */
    leave(d, before);
    return rc;
}

static int host_unregister(void *ctx, void *ptr)
{
    device *d = ctx;
    WITH_DEVICE("HostUnregister", d->host_unregister(ptr));
}

static int copy_async(void *ctx, void *dst, const void *src, size_t nbytes, void *stream)
{
    device *d = ctx;
    if (nbytes == 0)
        return HETCCL_OK;
    WITH_DEVICE("MemcpyAsync", d->copy(dst, src, nbytes, 4, stream));           /* 4: the runtime finds the direction out */
}

static int memset_async(void *ctx, void *dst, int byte, size_t nbytes, void *stream)
{
    device *d = ctx;
    if (nbytes == 0)
        return HETCCL_OK;
    WITH_DEVICE("MemsetAsync", d->fill(dst, byte, nbytes, stream));
}

static int stream_create(void *ctx, void **stream)
{
    device *d = ctx;
    /* 1: does not wait for the default stream. What others wait for goes before what only this rank computes. */
    WITH_DEVICE("StreamCreateWithFlags", d->stream_create_first ? d->stream_create_first(stream, 1, d->first_priority)
                                                                : d->stream_create(stream, 1));
}

static int stream_destroy(void *ctx, void *stream)
{
    device *d = ctx;
    WITH_DEVICE("StreamDestroy", d->stream_destroy(stream));
}

static int stream_wait_event(void *ctx, void *stream, void *event)
{
    device *d = ctx;
    WITH_DEVICE("StreamWaitEvent", d->stream_wait_event(stream, event, 0));
}

static int stream_sync(void *ctx, void *stream)
{
    device *d = ctx;
    WITH_DEVICE("StreamSynchronize", d->stream_sync(stream));
}

static int stream_query(void *ctx, void *stream)
{
    device *d = ctx;
    return told(d, d->stream_query(stream), "StreamQuery");
}

static int event_create(void *ctx, void **event)
{
    device *d = ctx;
    WITH_DEVICE("EventCreateWithFlags", d->event_create(event, 2));             /* 2: takes no time */
}

static int event_destroy(void *ctx, void *event)
{
    device *d = ctx;
    WITH_DEVICE("EventDestroy", d->event_destroy(event));
}

static int event_record(void *ctx, void *event, void *stream)
{
    device *d = ctx;
    WITH_DEVICE("EventRecord", d->event_record(event, stream));
}

static int event_query(void *ctx, void *event)
{
    device *d = ctx;
    return told(d, d->event_query(event), "EventQuery");
}

static int event_sync(void *ctx, void *event)
{
    device *d = ctx;
    return told(d, d->event_sync(event), "EventSynchronize");
}

static int is_capturing(void *ctx, void *stream)
{
    device *d = ctx;
    int now = 0, code = d->capturing(stream, &now);
    if (code != 0)
        return failed(d, code, "StreamIsCapturing");
    return now ? HETCCL_IN_PROGRESS : HETCCL_OK;
}

static int dmabuf_export(void *ctx, void *ptr, size_t nbytes, int *fd)
{
    device *d = ctx;
    *fd = -1;
    WITH_DEVICE("MemGetHandleForAddressRange", d->memory_handle(fd, ptr, nbytes, 1, 0));   /* 1: a dma-buf */
}

/* One kernel over all elements. `redop` is one that has a kernel; complex elements are two of their reals. */
static int launch(device *d, const hetccl_reduce_args *a, int redop, const char *call)
{
    int dtype = a->dtype, reals = dtype == HETCCL_COMPLEX64 || dtype == HETCCL_COMPLEX128;
    hetccl_cuda_kernel_args k = {a->dst, a->count, a->scale, a->n_src, a->scale != 1.0, {NULL}};
    if (a->size < sizeof *a || (unsigned)dtype >= HETCCL_DTYPE_COUNT || (unsigned)redop >= HETCCL_REDOP_COUNT || a->n_src < 1)
        return explain(HETCCL_INVALID, "reduce: arguments of another version, unknown dtype or operator, or no source");
    if (a->n_src > HETCCL_CUDA_SOURCES)
        return explain(HETCCL_UNSUPPORTED, "reduce: more sources than one kernel takes (32)");
    if (reals) {
        if (redop != HETCCL_SUM)
            return explain(HETCCL_UNSUPPORTED, "reduce: complex numbers are only summed");
        dtype = dtype == HETCCL_COMPLEX64 ? HETCCL_FLOAT32 : HETCCL_FLOAT64;
        k.count *= 2;
    }
    if (dtype == HETCCL_BOOL && k.divides)
        return explain(HETCCL_INVALID, "reduce: truth values cannot be divided");
    memcpy(k.src, a->src, a->n_src * sizeof *k.src);
    if (dtype == HETCCL_BOOL && a->n_src == 1) {        /* comes out as 0 or 1 */
        redop = HETCCL_BOR;
        k.src[k.n_src++] = a->src[0];
    }
    void *function = d->kernel[dtype][redop];
    if (!function)
        return explain(HETCCL_UNSUPPORTED, "reduce: there is no kernel for this dtype and operator");
    if (k.count == 0)
        return HETCCL_OK;
    uint64_t blocks = (k.count + 511) / 512;
    void *params[] = {&k};
    WITH_DEVICE(call, d->launch(function, blocks < 2048 ? (unsigned)blocks : 2048u, 1, 1, 256, 1, 1, 0, a->stream, params, NULL));
}

static int reduce_async(void *ctx, const hetccl_reduce_args *a)
{
    return launch(ctx, a, a->redop == HETCCL_AVG ? HETCCL_SUM : a->redop, "reduce kernel");
}

static int scale_async(void *ctx, const hetccl_reduce_args *a)
{
    if (a->n_src != 1)
        return explain(HETCCL_INVALID, "scale: there must be one source");
    return launch(ctx, a, HETCCL_SUM, "scale kernel");
}

int hetccl_cuda_explain(int status, const char *words) { return explain(status, words); }

int hetccl_cuda_launch(device *d, void *function, unsigned blocks, unsigned threads, void *args, void *stream, const char *call)
{
    void *params[] = {args};
    WITH_DEVICE(call, d->launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, params, NULL));
}

/* Whether kernels see registered memory where the host does. Before anybody is told that they may wait for words there. The
 * page stays registered as long as the device is open, for ever: to undo that is to wait for the kernels of others. */
static int sees_alike(device *d)
{
    void *page = aligned_alloc(4096, 4096);
    return page && host_register(d, page, 4096) == HETCCL_OK && !d->elsewhere;
}

void hetccl_cuda_fill_table(hetccl_cuda_device *d)
{
    hetccl_device_ops *o = &d->ops;
    memset(o, 0, sizeof *o);
    o->version = HETCCL_SPI_VERSION;
    o->size = sizeof *o;
    o->bind_thread = bind_thread;
    o->last_error = last_error;
    o->alloc = alloc;
    o->free = release;
    o->owns = owns;
    o->host_alloc = host_alloc;
    o->host_free = host_free;
    o->copy_async = copy_async;
    o->memset_async = memset_async;
    o->stream_create = stream_create;
    o->stream_destroy = stream_destroy;
    o->stream_wait_event = stream_wait_event;
    o->stream_sync = stream_sync;
    o->event_create = event_create;
    o->event_destroy = event_destroy;
    o->event_record = event_record;
    o->event_query = event_query;
    o->event_sync = event_sync;
    if (d->host_register && d->host_unregister) {
        o->caps |= HETCCL_DEVICE_REGISTER;
        o->host_register = host_register;
        o->host_unregister = host_unregister;
    }
    if (d->capturing) {
        o->caps |= HETCCL_DEVICE_CAPTURE;
        o->is_capturing = is_capturing;
    }
    if (d->stream_query)
        o->stream_query = stream_query;
    if (d->memory_handle) {
        o->caps |= HETCCL_DEVICE_DMABUF;
        o->dmabuf_export = dmabuf_export;
    }
    if (d->launch) {
        o->caps |= HETCCL_DEVICE_KERNELS;
        o->reduce_async = reduce_async;
        o->scale_async = scale_async;
        if (d->device_address && d->host_register && sees_alike(d)) {
            o->caps |= HETCCL_DEVICE_SPINS;
            o->reduce_resident = hetccl_cuda_resident;
            o->exchange_words = hetccl_cuda_words;
        }
    }
    d->table.ops = o;
    d->table.ctx = d;
}
