/* SPDX-License-Identifier: Apache-2.0
 * Launches the kernels that wait for words in host memory (cuda_spin.py).
 */
#include "cuda_device.h"
#include <string.h>

typedef hetccl_cuda_device device;

/* The dtype whose kernel does it, complex numbers as twice as many reals; -1: none does. */
static int kernel_dtype(const device *d, int dtype, int redop, uint64_t *count, double scale)
{
    if (d->elsewhere || (unsigned)dtype >= HETCCL_DTYPE_COUNT || (unsigned)redop >= HETCCL_REDOP_COUNT)
        return -1;
    if (dtype == HETCCL_COMPLEX64 || dtype == HETCCL_COMPLEX128) {
        if (redop != HETCCL_SUM)
            return -1;
        dtype = dtype == HETCCL_COMPLEX64 ? HETCCL_FLOAT32 : HETCCL_FLOAT64;
        *count *= 2;
    }
    return d->kernel[dtype][redop] && d->resident[dtype] && d->words[dtype] && (dtype != HETCCL_BOOL || scale == 1.0) ? dtype : -1;
}

int hetccl_cuda_resident(void *ctx, const hetccl_resident_args *a)
{
    device *d = ctx;
    hetccl_cuda_resident_args k = {.room = {0}};
    if (a->size < sizeof *a || a->n_src < 2 || a->n_src > HETCCL_SPIN_SOURCES || !a->chunk || !a->slots ||
        a->slots > HETCCL_SPIN_SLOTS || !a->blocks)
        return hetccl_cuda_explain(HETCCL_INVALID, "resident kernel: arguments of another version, or out of their bounds");
    uint64_t count = a->count;
    int dtype = kernel_dtype(d, a->dtype, a->redop, &count, a->scale);
    if (dtype < 0 || a->n_src != 2 || a->redop != HETCCL_SUM)
        return hetccl_cuda_explain(HETCCL_UNSUPPORTED, "there is no resident kernel for this dtype and operator here");
    k.dst = a->dst;
    k.count = count;
    k.chunk = a->chunk * (count / (a->count ? a->count : 1));
    k.divisor = a->scale;
    k.divides = a->scale != 1.0;
    memcpy(k.src, a->src, sizeof k.src);
    memcpy(k.ring, a->ring, sizeof k.ring);
    memcpy(k.first, a->first, sizeof k.first);
    k.n_src = a->n_src;
    k.op = (uint32_t)a->redop;
    k.base = a->base;
    k.slots = a->slots;
    k.slot_bytes = a->slot_bytes;
    k.timeout_ns = a->timeout_ns;
    k.arrive = a->arrive;
    k.freed = a->freed;
    k.stop = a->stop;
    k.scratch = a->scratch;
    return hetccl_cuda_launch(d, d->resident[dtype], a->blocks, 512, &k, a->stream, "resident kernel");
}

int hetccl_cuda_words(void *ctx, const hetccl_exchange_args *a)
{
    device *d = ctx;
    hetccl_cuda_words_args k = {.room = {0}};
    if (a->size < sizeof *a || !a->flag || a->count > (1u << 28))
        return hetccl_cuda_explain(HETCCL_INVALID, "exchange of words: arguments of another version, no flag, or too many elements");
    uint64_t count = a->count;
    int dtype = kernel_dtype(d, a->dtype, a->redop, &count, a->scale);
    if (dtype < 0)
        return hetccl_cuda_explain(HETCCL_UNSUPPORTED, "there is no kernel that exchanges this dtype with this operator here");
    static const uint8_t bytes[HETCCL_DTYPE_COUNT] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 2, 2, 1, 8, 16, 1, 1, 1, 1};
    uint64_t words = (count * bytes[dtype] + 7) / 8;
    /* Blocks of one warp get in beside the blocks of others; many words want more threads than that. */
    unsigned threads = words <= 8192 ? 32 : 512;
    uint64_t blocks = (words + threads - 1) / threads, most = words <= 8192 ? 132 : 128;
    k.dst = a->dst;
    k.src = a->src;
    k.count = count;
    k.divisor = a->scale;
    k.divides = a->scale != 1.0;
    k.out = a->out;
    k.in = a->in;
    k.done = a->done;
    k.stop = a->stop;
    k.scratch = a->scratch;
    k.timeout_ns = a->timeout_ns;
    k.flag = a->flag;
    k.op = (uint32_t)a->redop;
    k.position = a->position;
    return hetccl_cuda_launch(d, d->words[dtype], (unsigned)(blocks < most ? blocks ? blocks : 1 : most), threads, &k, a->stream,
                              "exchange of words");
}
