/* SPDX-License-Identifier: Apache-2.0
 * Device and pinned memory that grows. To give such memory back is to wait for all kernels on the device (measured: cudaFree,
 * cudaFreeHost, cudaHostUnregister; to allocate is not), and a kernel there may itself wait for a word from the thread that would
 * wait, or for a rank that waits for this one. So memory that is outgrown is set aside.
 */
#include "executor.h"
#include <stdlib.h>

typedef struct hx_aside {
    struct hx_aside *next;
    void *memory;
    int pinned;
} hx_aside;

static _Atomic int spinning;                /* kernels of this process that wait for words */

void hx_spinning(hx_comm *c, int more)
{
    c->spinning += more;
    atomic_fetch_add_explicit(&spinning, more, memory_order_seq_cst);
}

static void give_back(hx_comm *c, void *memory, int pinned)
{
    if (pinned)
        c->dev->host_free(c->dev_ctx, memory);
    else
        c->dev->free(c->dev_ctx, memory);
}

/* Any thread may set aside; whoever takes the list has it alone. */
void hx_aside_free(hx_comm *c)
{
    for (hx_aside *a = atomic_exchange(&c->aside, NULL), *next; a; a = next) {
        next = a->next;
        give_back(c, a->memory, a->pinned);
        free(a);
    }
}

static int set_aside(hx_comm *c, void *memory, int pinned)
{
    hx_aside *a = malloc(sizeof *a);
    if (!a)
        return HETCCL_NO_MEMORY;
    *a = (hx_aside){atomic_load(&c->aside), memory, pinned};
    while (!atomic_compare_exchange_weak(&c->aside, &a->next, a))
        ;
    return HETCCL_OK;
}

int hx_grow_aside(hx_comm *c, char **buffer, size_t *room, size_t want, int pinned)
{
    if (want <= *room)
        return HETCCL_OK;
    int rc = *buffer ? set_aside(c, *buffer, pinned) : HETCCL_OK;
    if (rc != HETCCL_OK)
        return rc;
    *buffer = NULL;
    *room = 0;
    rc = pinned ? c->dev->host_alloc(c->dev_ctx, want, (void **)buffer) : c->dev->alloc(c->dev_ctx, want, (void **)buffer);
    if (rc == HETCCL_OK)
        *room = want;
    return rc;
}

int hx_grow(hx_comm *c, char **buffer, size_t *room, size_t want, int pinned)
{
    if (want > *room && atomic_load_explicit(&spinning, memory_order_seq_cst) == 0)
        hx_aside_free(c);                   /* of earlier times: nobody uses that any more */
    return hx_grow_aside(c, buffer, room, want, pinned);
}
