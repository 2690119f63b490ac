/* SPDX-License-Identifier: Apache-2.0
 * The device table of the pretend accelerator: what each call checks, and the work that it queues.
 */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DEADLINE_NS 600000000000u              /* ten minutes: only a hang is that long */

static _Thread_local char failure[HETCCL_SIM_TEXT_MAX];   /* last_error speaks of the calling thread */

int hetccl_sim_no_memory(const hetccl_sim_device *d)
{
    return hetccl_sim_fail(HETCCL_NO_MEMORY, "%s: out of memory", d->name);
}

hetccl_sim_device *hetccl_sim_device_new(hetccl_sim_registry *r, const char *name, int32_t index)
{
    hetccl_sim_device *d = calloc(1, sizeof *d);
    if (d == NULL)
        return NULL;
    snprintf(d->name, sizeof d->name, "%s", name);
    d->index = index;
    d->pid = getpid();
    d->registry = r;
    atomic_init(&d->deadline_ns, DEADLINE_NS);
    pthread_mutex_init(&d->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&d->idle, &clock);
    pthread_condattr_destroy(&clock);
    return d;
}

int hetccl_sim_check_process(hetccl_sim_device *d)
{
    pid_t here = getpid();
    if (here != d->pid)
        return hetccl_sim_fail(HETCCL_INVALID, "%s was opened by process %d and cannot be used in its forked child %d; "
                               "open it there, or start processes by spawn", d->name, (int)d->pid, (int)here);
    return HETCCL_OK;
}

int hetccl_sim_check(hetccl_sim_device *d)
{
    int status = hetccl_sim_check_process(d);
    if (status != HETCCL_OK)
        return status;
    if (atomic_load_explicit(&d->stop, memory_order_acquire))
        return hetccl_sim_fail(HETCCL_ABORTED, "%s: the device has been stopped", d->name);
    status = atomic_load_explicit(&d->error, memory_order_acquire);
    if (status != HETCCL_OK)                   /* error_text was written before `error`, once */
        return hetccl_sim_fail(status, "%s failed earlier: %s", d->name, d->error_text);
    return HETCCL_OK;
}

int hetccl_sim_fail(int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(failure, sizeof failure, format, args);
    va_end(args);
    return status;
}

const char *hetccl_sim_last_error(void *ctx)
{
    return failure;
}

void hetccl_sim_break(hetccl_sim_device *d, int status)
{
    pthread_mutex_lock(&d->lock);
    if (atomic_load_explicit(&d->error, memory_order_relaxed) == HETCCL_OK) {
        memcpy(d->error_text, failure, sizeof d->error_text);
        atomic_store_explicit(&d->error, status, memory_order_release);
    }
    pthread_mutex_unlock(&d->lock);
}

/* ---- memory */

static int sim_bind_thread(void *ctx)
{
    return hetccl_sim_check(ctx);
}

static int sim_alloc(void *ctx, size_t nbytes, void **ptr)
{
    int status = hetccl_sim_check(ctx);
    return status != HETCCL_OK ? status : hetccl_sim_alloc(ctx, nbytes, ptr);
}

static int sim_free(void *ctx, void *ptr)
{
    int status = hetccl_sim_check_process(ctx);
    return status != HETCCL_OK ? status : hetccl_sim_free(ctx, ptr);
}

static int sim_owns(void *ctx, const void *ptr, size_t nbytes)
{
    int status = hetccl_sim_check_process(ctx);
    return status != HETCCL_OK ? status : hetccl_sim_owns(ctx, ptr, nbytes);
}

static int sim_host_alloc(void *ctx, size_t nbytes, void **ptr)
{
    int status = hetccl_sim_check(ctx);
    if (status != HETCCL_OK)
        return status;
    if (posix_memalign(ptr, (size_t)sysconf(_SC_PAGESIZE), nbytes ? nbytes : 1) != 0)
        return hetccl_sim_fail(HETCCL_NO_MEMORY, "no %zu bytes of host memory", nbytes);
    hetccl_sim_poison(ctx, *ptr, nbytes, 0);
    return HETCCL_OK;
}

static int sim_host_free(void *ctx, void *ptr)
{
    if (ptr != NULL)
        hetccl_sim_poison(ctx, ptr, malloc_usable_size(ptr), 1);
    free(ptr);
    return HETCCL_OK;
}

static int sim_host_register(void *ctx, void *ptr, size_t nbytes)
{
    return hetccl_sim_fail(HETCCL_UNSUPPORTED, "all host memory is alike to a pretend device: nothing to register");
}

static int sim_host_unregister(void *ctx, void *ptr)
{
    return sim_host_register(ctx, ptr, 0);
}

/* ---- streams */

static int sim_stream_create(void *ctx, void **stream)
{
    int status = hetccl_sim_check(ctx);
    return status != HETCCL_OK ? status : hetccl_sim_stream_new(ctx, (hetccl_sim_stream **)stream);
}

static int sim_stream_destroy(void *ctx, void *stream)
{
    int status = hetccl_sim_check_process(ctx);
    if (status != HETCCL_OK || stream == NULL)
        return status;
    return hetccl_sim_stream_close(ctx, stream);
}

/* ---- what there is none of */

static int sim_dmabuf_export(void *ctx, void *ptr, size_t nbytes, int *fd)
{
    return hetccl_sim_fail(HETCCL_UNSUPPORTED, "a pretend device exports no dma-buf");
}

static int sim_ipc_export(void *ctx, void *ptr, void *handle64)
{
    return hetccl_sim_fail(HETCCL_UNSUPPORTED, "a pretend device has no IPC handles");
}

static int sim_ipc_open(void *ctx, const void *handle64, void **ptr)
{
    return sim_ipc_export(ctx, NULL, NULL);
}

static int sim_ipc_close(void *ctx, void *ptr)
{
    return sim_ipc_export(ctx, NULL, NULL);
}

static int sim_is_capturing(void *ctx, void *stream)
{
    return HETCCL_OK;
}

const hetccl_device_ops hetccl_sim_device_ops = {
    .version = HETCCL_SPI_VERSION,
    .size = sizeof(hetccl_device_ops),
    .caps = HETCCL_DEVICE_FLAGS | HETCCL_DEVICE_KERNELS | HETCCL_DEVICE_CAPTURE,
    .bind_thread = sim_bind_thread,
    .last_error = hetccl_sim_last_error,
    .alloc = sim_alloc,
    .free = sim_free,
    .owns = sim_owns,
    .host_alloc = sim_host_alloc,
    .host_free = sim_host_free,
    .host_register = sim_host_register,
    .host_unregister = sim_host_unregister,
    .copy_async = hetccl_sim_copy_async,
    .memset_async = hetccl_sim_memset_async,
    .stream_create = sim_stream_create,
    .stream_destroy = sim_stream_destroy,
    .stream_wait_event = hetccl_sim_stream_wait_event,
    .stream_sync = hetccl_sim_stream_sync,
    .event_create = hetccl_sim_event_create,
    .event_destroy = hetccl_sim_event_destroy,
    .event_record = hetccl_sim_event_record,
    .event_query = hetccl_sim_event_query,
    .event_sync = hetccl_sim_event_sync,
    .flag_alloc = hetccl_sim_flag_alloc,
    .flag_free = hetccl_sim_flag_free,
    .flag_set = hetccl_sim_flag_set,
    .stream_wait_flag = hetccl_sim_stream_wait_flag,
    .reduce_async = hetccl_sim_reduce_async,
    .scale_async = hetccl_sim_scale_async,
    .dmabuf_export = sim_dmabuf_export,
    .ipc_export = sim_ipc_export,
    .ipc_open = sim_ipc_open,
    .ipc_close = sim_ipc_close,
    .is_capturing = sim_is_capturing,
};
