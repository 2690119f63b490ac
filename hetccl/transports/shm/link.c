/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ring_private.h"

#define MAGIC 0x6d687368u
#define LAYOUT_VERSION 2u
#define LINE 128u                              /* two cache lines: the prefetcher fetches them in pairs */
#define PAGE 4096u

typedef struct region_head {
    uint32_t magic, version, slots, slot_bytes, dialer, acceptor;
} region_head;

/* ---------------------------------------------------------------------------------------- layout, life cycle */

/* The p2p channel has half the slots: it carries rendezvous chunks, not the collectives' stream. */
static uint32_t channel_slots(uint32_t slots, int channel)
{
    return channel == HETCCL_CHANNEL_P2P && slots > HETCCL_SHM_MIN_SLOTS ? slots / 2 : slots;
}

static size_t all_slots(uint32_t slots)
{
    size_t sum = 0;
    for (int c = 0; c < HETCCL_CHANNELS; c++)
        sum += channel_slots(slots, c);
    return sum;
}

/* Head, 2 state words, 2 * HETCCL_CHANNELS counters, then slot headers, then data from the next page on. */
#define STATE_AT LINE
#define RELEASED_AT (STATE_AT + 2 * LINE)
#define HEADERS_AT (RELEASED_AT + 2 * HETCCL_CHANNELS * LINE)

static size_t data_at(uint32_t slots)
{
    size_t end = HEADERS_AT + 2 * all_slots(slots) * sizeof(slot_header);
    return (end + PAGE - 1) & ~(size_t)(PAGE - 1);
}

static size_t ring_bytes(uint32_t slots, uint32_t slot_bytes)
{
    return data_at(slots) + 2 * all_slots(slots) * slot_bytes;
}

size_t hetccl_shm_region_bytes(uint32_t slots, uint32_t slot_bytes)
{
    return ring_bytes(slots, slot_bytes) + HETCCL_SHM_WINDOW;
}

static int power_of_two_within(uint64_t x, uint64_t low, uint64_t high)
{
    return x >= low && x <= high && !(x & (x - 1));
}

int hetccl_shm_valid(uint64_t slots, uint64_t slot_bytes)
{
    return power_of_two_within(slots, HETCCL_SHM_MIN_SLOTS, HETCCL_SHM_MAX_SLOTS) &&
           power_of_two_within(slot_bytes, HETCCL_SHM_MIN_SLOT, HETCCL_SHM_MAX_SLOT);
}

hetccl_shm *hetccl_shm_new(uint32_t rank, uint32_t slots, uint32_t slot_bytes, int doorbell)
{
    hetccl_shm *shm = calloc(1, sizeof *shm);
    if (!shm)
        return NULL;
    *shm = (hetccl_shm){
        .ops = hetccl_shm_ops(slot_bytes),
        .rank = rank, .slots = slots, .slot_bytes = slot_bytes, .doorbell = doorbell, .pid = getpid(),
    };
    shm->table = (hetccl_table){.ops = &shm->ops, .ctx = shm};
    return shm;
}

const hetccl_table *hetccl_shm_table(hetccl_shm *shm)
{
    return &shm->table;
}

static int check_region(hetccl_shm *shm, const hetccl_shm_link *link, size_t nbytes)
{
    struct stat st;
    int seals = fcntl(link->region_fd, F_GET_SEALS);
    if (fstat(link->region_fd, &st) != 0 || seals < 0)
        return hetccl_shm_fail(shm, HETCCL_SYSTEM, "the shared region is no sealable memory file: errno %d", errno);
    if (!(seals & F_SEAL_SHRINK))
        return hetccl_shm_fail(shm, HETCCL_INVALID, "the shared region is not sealed against shrinking");
    if ((uint64_t)st.st_size < nbytes)
        return hetccl_shm_fail(shm, HETCCL_INVALID, "the shared region has %lld bytes, %zu are needed",
                               (long long)st.st_size, nbytes);
    return HETCCL_OK;
}

/* Points the rings into the region. `side` is 0 for the dialer: direction 0 flows from the dialer to the acceptor. */
static void bind_rings(hetccl_shm_ep *ep, uint32_t slots, int side)
{
    uint8_t *base = ep->region, *data = base + data_at(slots);
    slot_header *headers = (slot_header *)(base + HEADERS_AT);
    uint32_t *sizes = ep->sizes;
    ep->mine = (_Atomic uint32_t *)(base + STATE_AT + (size_t)side * LINE);
    ep->theirs = (_Atomic uint32_t *)(base + STATE_AT + (size_t)!side * LINE);
    for (int direction = 0; direction < 2; direction++)
        for (int c = 0; c < HETCCL_CHANNELS; c++) {
            uint32_t n = channel_slots(slots, c);
            void *released = base + RELEASED_AT + (size_t)(direction * HETCCL_CHANNELS + c) * LINE;
            if (direction == side) {
                ep->out[c] = (out_ring){.headers = headers, .data = data, .released = released, .sizes = sizes,
                                          .slots = n};
                sizes += n;
            } else {
                ep->in[c] = (in_ring){.headers = headers, .data = data, .released = released, .slots = n};
            }
            headers += n;
            data += (size_t)n * ep->slot_bytes;
        }
    ep->out[HETCCL_CHANNEL_CONTRIBUTE].lent = (uint8_t *)sizes;
}

int hetccl_shm_attach(hetccl_shm *shm, const hetccl_shm_link *link, hetccl_shm_ep **out)
{
    size_t nbytes = ring_bytes(shm->slots, shm->slot_bytes);
    region_head expected = {MAGIC, LAYOUT_VERSION, shm->slots, shm->slot_bytes, link->dialer, link->acceptor};
    int status = check_region(shm, link, nbytes + HETCCL_SHM_WINDOW);
    if (status != HETCCL_OK)
        return status;
    hetccl_shm_ep *ep = calloc(1, sizeof *ep);
    uint32_t *sizes = calloc(all_slots(shm->slots) + (shm->slots + 3) / 4, sizeof *sizes);
    void *region = MAP_FAILED, *window = MAP_FAILED;
    if (ep && sizes)                           /* MAP_POPULATE: the first collective does not pay for page faults */
        region = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, link->region_fd, 0);
    if (region != MAP_FAILED)                  /* no page of it exists before it is touched */
        window = mmap(NULL, HETCCL_SHM_WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, link->region_fd, (off_t)nbytes);
    if (window == MAP_FAILED) {
        status = hetccl_shm_fail(shm, HETCCL_NO_MEMORY, "mapping %zu bytes of shared memory failed: errno %d",
                                 nbytes, errno);
        goto undo;
    }
    madvise(window, HETCCL_SHM_WINDOW, MADV_DONTFORK);
    madvise(region, nbytes, MADV_DONTFORK);    /* a forked child cannot scribble on its parent's rings */
    if (link->create)
        memcpy(region, &expected, sizeof expected);
    else if (memcmp(region, &expected, sizeof expected) != 0) {
        status = hetccl_shm_fail(shm, HETCCL_INVALID, "the shared region of rank %u is laid out differently; the "
                                 "ranks run different versions of hetccl", link->dialer);
        goto undo;
    }
    *ep = (hetccl_shm_ep){
        .shm = shm, .peer = link->create ? link->acceptor : link->dialer, .slot_bytes = shm->slot_bytes,
        .region = region, .region_bytes = nbytes, .window = window, .side = !link->create,
        .peer_doorbell = link->peer_doorbell, .sizes = sizes,
    };
    bind_rings(ep, shm->slots, link->create ? 0 : 1);
    ep->next = atomic_load_explicit(&shm->first, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&shm->first, &ep->next, ep, memory_order_seq_cst,
                                                  memory_order_relaxed))
        ;
    if (atomic_load_explicit(&shm->armed, memory_order_seq_cst)) { /* asleep, and not on this link */
        uint64_t one = 1;
        hetccl_shm_lie_down(ep);
        if (write(shm->doorbell, &one, sizeof one) < 0 && errno != EAGAIN)
            hetccl_shm_fail(shm, HETCCL_SYSTEM, "ringing the own doorbell failed: errno %d", errno);
    }
    *out = ep;
    return HETCCL_OK;
undo:
    if (window != MAP_FAILED)
        munmap(window, HETCCL_SHM_WINDOW);
    if (region != MAP_FAILED)
        munmap(region, nbytes);
    free(sizes);
    free(ep);
    return status;
}

int hetccl_shm_window(void *ctx, void *handle, hetccl_window_args *args)
{
    hetccl_shm_ep *ep = handle;
    if (ep->error || args->size < sizeof *args || args->nbytes > HETCCL_SHM_WINDOW)
        return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "a window of %zu bytes was asked for; an open link has %zu", args->nbytes,
                               HETCCL_SHM_WINDOW);
    args->ptr = ep->window;
    args->side = ep->side;
    return HETCCL_OK;
}

void hetccl_shm_close(hetccl_shm *shm)
{
    int forked = getpid() != shm->pid;
    for (hetccl_shm_ep *ep = atomic_load_explicit(&shm->first, memory_order_acquire); ep; ep = ep->next) {
        hetccl_shm_ep_close(ep);
        if (ep->region && !forked) {
            munmap(ep->region, ep->region_bytes);
            munmap(ep->window, HETCCL_SHM_WINDOW);
        }
        if (ep->peer_doorbell >= 0)
            close(ep->peer_doorbell);
        ep->region = NULL;
        ep->peer_doorbell = -1;
    }
    shm->doorbell = -1;                        /* its number may soon be another descriptor's */
}

void hetccl_shm_free(hetccl_shm *shm)
{
    hetccl_shm_close(shm);
    for (hetccl_shm_ep *ep = atomic_load_explicit(&shm->first, memory_order_acquire), *next; ep; ep = next) {
        next = ep->next;
        free(ep->sizes);
        free(ep);
    }
    free(shm);
}
