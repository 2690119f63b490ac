/* SPDX-License-Identifier: Apache-2.0
 * Where a step or a flow worked, for the trace.
 */
#include "executor.h"

/* Elements from the beginning of the buffer of a slice, as an address was really taken. */
static int64_t offset(const hx_work *w, const hx_slice *s, const char *at)
{
    const char *base[] = {w->in, w->out, w->comm->device_scratch, w->comm->host_scratch};
    return s->buffer < 0 || !at ? HX_NOWHERE : (int64_t)(at - base[s->buffer]) / (int64_t)hetccl_dtype_size(w->plan->dtype);
}

void hx_trace_place(hx_work *w, int what, int index, int64_t segment, const hx_slice *src, const char *from,
                    const hx_slice *dst, const char *to, size_t n)
{
    HX_TRACE(w, what, index, -1, segment, offset(w, src, from), offset(w, dst, to), (int64_t)n, 0);
}
