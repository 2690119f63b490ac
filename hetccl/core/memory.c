/* SPDX-License-Identifier: Apache-2.0
 * Device and pinned memory that grows. To give such memory back is to wait for all that the device does, and a kernel there may
 * itself be waiting for a word from the thread that would wait. While there is such a kernel in the process, memory that is
 * outgrown is set aside.
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

void hx_aside_free(hx_comm *c)
{
    for (hx_aside *a = c->aside, *next; a; a = next) {
        next = a->next;
        give_back(c, a->memory, a->pinned);
        free(a);
    }
    c->aside = NULL;
}

static int set_aside(hx_comm *c, void *memory, int pinned)
{
    hx_aside *a = malloc(sizeof *a);
    if (!a)
        return HETCCL_NO_MEMORY;
    *a = (hx_aside){c->aside, memory, pinned};
    c->aside = a;
    return HETCCL_OK;
}

int hx_grow(hx_comm *c, char **buffer, size_t *room, size_t want, int pinned)
{
    if (want <= *room)
        return HETCCL_OK;
    int rc = *buffer ? set_aside(c, *buffer, pinned) : HETCCL_OK;
    if (rc != HETCCL_OK)
        return rc;
    *buffer = NULL;
    *room = 0;
    if (atomic_load_explicit(&spinning, memory_order_seq_cst) == 0)
        hx_aside_free(c);
    rc = pinned ? c->dev->host_alloc(c->dev_ctx, want, (void **)buffer) : c->dev->alloc(c->dev_ctx, want, (void **)buffer);
    if (rc == HETCCL_OK)
        *room = want;
    return rc;
}
