/* SPDX-License-Identifier: Apache-2.0
 * Leaving a vendor's communicator. The library may wait there until the other ranks leave it as well (NCCL does, for those of the
 * host), and they may have something else to do, or be leaving another one, in which they wait for us. So it has a thread of its
 * own, and whoever closes waits for that as long as it likes.
 */
#include "threads.h"
#include "wait.h"
#include "parting.h"
#include <stdlib.h>

struct hx_parting {
    int (*destroy)(void *, void *);
    int (*bind)(void *);
    void *ccl_ctx, *dev_ctx, *comm;
    _Atomic uint32_t ended, holders;        /* the thread, and who waits: the last one frees */
};

void hx_part_drop(hx_parting *p)
{
    if (p && atomic_fetch_sub_explicit(&p->holders, 1, memory_order_acq_rel) == 1)
        free(p);
}

static void *part(void *arg)
{
    hx_parting *p = arg;
    if (p->bind(p->dev_ctx) == HETCCL_OK)
        p->destroy(p->ccl_ctx, p->comm);    /* what it complains of is of no interest any more */
    atomic_store_explicit(&p->ended, 1, memory_order_release);
    hetccl_futex_wake(&p->ended);
    hx_part_drop(p);
    return NULL;
}

hx_parting *hx_part_begin(const hetccl_ccl_ops *ccl, void *ccl_ctx, const hetccl_device_ops *dev, void *dev_ctx, void *comm)
{
    hx_parting *p = malloc(sizeof *p);
    if (!p)
        return NULL;
    *p = (hx_parting){ccl->destroy, dev->bind_thread, ccl_ctx, dev_ctx, comm, 0, 2};
    pthread_t thread;
    if (hetccl_thread_start(&thread, NULL, part, p) != 0) {
        free(p);
        return NULL;
    }
    pthread_detach(thread);
    return p;
}

int hx_part_wait(hx_parting *p, uint64_t ns)
{
    uint64_t until = hetccl_now_ns() + ns;
    while (!atomic_load_explicit(&p->ended, memory_order_acquire)) {
        uint64_t now = hetccl_now_ns();
        if (now >= until)
            return HETCCL_IN_PROGRESS;
        hetccl_futex_wait(&p->ended, 0, until - now);
    }
    return HETCCL_OK;
}
