/* SPDX-License-Identifier: Apache-2.0
 * Makes a plug-in's table safe to call: a copy in which every function exists.
 *
 * A table of an older plug-in is shorter than ours, and any table may hold NULL. Both become stubs that answer
 * HETCCL_UNSUPPORTED, so that no caller ever asks whether a function is there.
 */
#ifndef HETCCL_NORMALIZE_H
#define HETCCL_NORMALIZE_H
#include <string.h>

#include "hetccl/spi.h"

/* Each fills *out from *in and returns HETCCL_OK; HETCCL_MISMATCH if the table is of a newer major version (or of none),
 * HETCCL_INVALID if it does not even cover its own head. */
static inline int hetccl_normalize_device(hetccl_device_ops *out, const hetccl_device_ops *in);
static inline int hetccl_normalize_ccl(hetccl_ccl_ops *out, const hetccl_ccl_ops *in);
static inline int hetccl_normalize_transport(hetccl_transport_ops *out, const hetccl_transport_ops *in);

/* One stub a signature: calling through a pointer of another type would be undefined. */
#define HETCCL_STUB(name, ...) \
    static inline int hetccl_stub_##name(__VA_ARGS__) { return HETCCL_UNSUPPORTED; }
HETCCL_STUB(v, void *c)
HETCCL_STUB(vp, void *c, void *a)
HETCCL_STUB(vpp, void *c, void **a)
HETCCL_STUB(vzpp, void *c, size_t n, void **a)
HETCCL_STUB(vkz, void *c, const void *a, size_t n)
HETCCL_STUB(vpz, void *c, void *a, size_t n)
HETCCL_STUB(vpkzp, void *c, void *d, const void *s, size_t n, void *st)
HETCCL_STUB(vpizp, void *c, void *d, int b, size_t n, void *st)
HETCCL_STUB(vp_p, void *c, void *a, void *b)
HETCCL_STUB(vpup, void *c, void *a, uint32_t v, void *st)
HETCCL_STUB(vreduce, void *c, const hetccl_reduce_args *a)
HETCCL_STUB(vresident, void *c, const hetccl_resident_args *a)
HETCCL_STUB(vwords, void *c, const hetccl_exchange_args *a)
HETCCL_STUB(vwindow, void *c, void *ep, hetccl_window_args *a)
HETCCL_STUB(vwput, void *c, void *ep, const hetccl_window_put *p)
HETCCL_STUB(vpzi, void *c, void *a, size_t n, int *fd)
HETCCL_STUB(vkpp, void *c, const void *a, void **b)
HETCCL_STUB(vpu_p, void *c, void *a, uint32_t *n)
HETCCL_STUB(vinit, void *c, const hetccl_ccl_init_args *a, void **comm)
HETCCL_STUB(vccl, void *c, const hetccl_ccl_args *a)
HETCCL_STUB(vmsg, void *c, void *ep, hetccl_message *m)
HETCCL_STUB(vpeek, void *c, void *ep, hetccl_message *m, uint32_t i)
HETCCL_STUB(vpi, void *c, void *ep, int32_t channel)
HETCCL_STUB(vfds, void *c, int *fds, uint32_t max, uint32_t *n)
HETCCL_STUB(vcount, void *c, void *ep, hetccl_transport_counters *out)
HETCCL_STUB(vregion, void *c, hetccl_region_args *a, void **region)
HETCCL_STUB(vimport, void *c, void *ep, const hetccl_region_args *a, void **region)
HETCCL_STUB(vput, void *c, hetccl_put_args *a)
#undef HETCCL_STUB

static inline const char *hetccl_stub_text(void *c)
{
    return "";
}

#define HETCCL_COPY_HEAD(out, in)                                              \
    memset((out), 0, sizeof *(out));                                           \
    if ((in)->version == 0 || (in)->version > HETCCL_SPI_VERSION)              \
        return HETCCL_MISMATCH;                                                \
    if (!HETCCL_HAS(in, last_error))                                           \
        return HETCCL_INVALID;                                                 \
    memcpy((out), (in), (in)->size < sizeof *(out) ? (in)->size : sizeof *(out)); \
    (out)->size = sizeof *(out)

/* `size` may end in the middle of a field: that field is not there. */
#define HETCCL_FIX(field, stub)                                                \
    if (!HETCCL_HAS(in, field) || !in->field)                                  \
        out->field = hetccl_stub_##stub

static inline int hetccl_normalize_device(hetccl_device_ops *out, const hetccl_device_ops *in)
{
    HETCCL_COPY_HEAD(out, in);
    HETCCL_FIX(bind_thread, v);
    HETCCL_FIX(last_error, text);
    HETCCL_FIX(alloc, vzpp);
    HETCCL_FIX(free, vp);
    HETCCL_FIX(owns, vkz);
    HETCCL_FIX(host_alloc, vzpp);
    HETCCL_FIX(host_free, vp);
    HETCCL_FIX(host_register, vpz);
    HETCCL_FIX(host_unregister, vp);
    HETCCL_FIX(copy_async, vpkzp);
    HETCCL_FIX(memset_async, vpizp);
    HETCCL_FIX(stream_create, vpp);
    HETCCL_FIX(stream_destroy, vp);
    HETCCL_FIX(stream_wait_event, vp_p);
    HETCCL_FIX(stream_sync, vp);
    HETCCL_FIX(event_create, vpp);
    HETCCL_FIX(event_destroy, vp);
    HETCCL_FIX(event_record, vp_p);
    HETCCL_FIX(event_query, vp);
    HETCCL_FIX(event_sync, vp);
    HETCCL_FIX(flag_alloc, vpp);
    HETCCL_FIX(flag_free, vp);
    HETCCL_FIX(flag_set, vpup);
    HETCCL_FIX(stream_wait_flag, vpup);
    HETCCL_FIX(reduce_async, vreduce);
    HETCCL_FIX(scale_async, vreduce);
    HETCCL_FIX(dmabuf_export, vpzi);
    HETCCL_FIX(ipc_export, vp_p);
    HETCCL_FIX(ipc_open, vkpp);
    HETCCL_FIX(ipc_close, vp);
    HETCCL_FIX(is_capturing, vp);
    HETCCL_FIX(reduce_resident, vresident);
    HETCCL_FIX(exchange_words, vwords);
    HETCCL_FIX(stream_query, vp);
    return HETCCL_OK;
}

static inline int hetccl_normalize_ccl(hetccl_ccl_ops *out, const hetccl_ccl_ops *in)
{
    HETCCL_COPY_HEAD(out, in);
    HETCCL_FIX(last_error, text);
    HETCCL_FIX(unique_id, vpu_p);
    HETCCL_FIX(init_post, vinit);
    HETCCL_FIX(init_test, vp);
    HETCCL_FIX(all_reduce, vccl);
    HETCCL_FIX(reduce_scatter, vccl);
    HETCCL_FIX(all_gather, vccl);
    HETCCL_FIX(broadcast, vccl);
    HETCCL_FIX(reduce, vccl);
    HETCCL_FIX(all_to_all, vccl);
    HETCCL_FIX(send, vccl);
    HETCCL_FIX(recv, vccl);
    HETCCL_FIX(group_start, v);
    HETCCL_FIX(group_end, v);
    HETCCL_FIX(async_error, vp);
    HETCCL_FIX(abort, vp);
    HETCCL_FIX(destroy, vp);
    return HETCCL_OK;
}

static inline int hetccl_normalize_transport(hetccl_transport_ops *out, const hetccl_transport_ops *in)
{
    HETCCL_COPY_HEAD(out, in);
    HETCCL_FIX(last_error, text);
    HETCCL_FIX(send, vmsg);
    HETCCL_FIX(recv, vmsg);
    HETCCL_FIX(reserve, vmsg);
    HETCCL_FIX(commit, vmsg);
    HETCCL_FIX(peek, vpeek);
    HETCCL_FIX(release, vpi);
    HETCCL_FIX(progress, vp);
    HETCCL_FIX(wait_fds, vfds);
    HETCCL_FIX(arm, v);
    HETCCL_FIX(disarm, v);
    HETCCL_FIX(counters, vcount);
    HETCCL_FIX(ep_error, vp);
    HETCCL_FIX(ep_close, vp);
    HETCCL_FIX(region_register, vregion);
    HETCCL_FIX(region_unregister, vp);
    HETCCL_FIX(region_import, vimport);
    HETCCL_FIX(post_send, vput);
    HETCCL_FIX(post_recv, vput);
    HETCCL_FIX(put_notify, vput);
    HETCCL_FIX(test, vp);
    HETCCL_FIX(cancel, vp);
    HETCCL_FIX(answer, vmsg);
    HETCCL_FIX(window, vwindow);
    HETCCL_FIX(window_put, vwput);
    HETCCL_FIX(window_test, vp);
    return HETCCL_OK;
}
#undef HETCCL_COPY_HEAD
#undef HETCCL_FIX
#endif
