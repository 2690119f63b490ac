/* SPDX-License-Identifier: Apache-2.0
 * Memory of the pretend accelerator: every block is one memfd mapped twice, and a sorted table finds it by address.
 */
#include "device.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <errno.h>

struct hetccl_sim_registry {
    pthread_rwlock_t lock;
    hetccl_sim_block **blocks;                 /* by rising user address; they never overlap */
    size_t n, room;
};

static size_t place_of(const hetccl_sim_registry *r, const char *ptr);
static hetccl_sim_block *find(const hetccl_sim_registry *r, const char *ptr, size_t nbytes);
static int classify(const hetccl_sim_device *d, const hetccl_sim_block *b, const char *ptr, size_t nbytes,
                    const char *what);
static int insert(hetccl_sim_registry *r, hetccl_sim_block *b);
static void block_unref(hetccl_sim_block *b);

hetccl_sim_registry *hetccl_sim_registry_new(void)
{
    hetccl_sim_registry *r = calloc(1, sizeof *r);
    if (r != NULL)
        pthread_rwlock_init(&r->lock, NULL);
    return r;
}

int hetccl_sim_alloc(hetccl_sim_device *d, size_t nbytes, void **ptr)
{
    *ptr = NULL;
    if (nbytes == 0)
        return HETCCL_OK;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (nbytes > SIZE_MAX / 4)
        return hetccl_sim_fail(HETCCL_NO_MEMORY, "%s: %zu bytes are more than any device has", d->name, nbytes);
    hetccl_sim_block *b = calloc(1, sizeof *b);
    if (b == NULL)
        return hetccl_sim_fail(HETCCL_NO_MEMORY, "%s: out of memory", d->name);
    b->nbytes = nbytes;
    b->mapped = (nbytes + page - 1) / page * page;
    b->reserved = b->mapped + page;            /* a pointer just past the end never belongs to the next block */
    b->device = d;
    atomic_init(&b->refs, 1);
    b->user = b->alias = MAP_FAILED;

    int fd = memfd_create("hetccl-sim", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)b->mapped) == 0) {
        b->user = mmap(NULL, b->reserved, PROT_NONE, MAP_SHARED, fd, 0);
        b->alias = mmap(NULL, b->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    int reason = errno;
    if (fd >= 0)
        close(fd);
    int mapped = b->user != MAP_FAILED && b->alias != MAP_FAILED;
    if (mapped) {
        madvise(b->alias, b->mapped, MADV_DONTFORK);
        mapped = insert(d->registry, b) == 0;
        reason = ENOMEM;
    }
    if (!mapped) {
        block_unref(b);
        return hetccl_sim_fail(HETCCL_NO_MEMORY, "%s: cannot allocate %zu bytes: %s", d->name, nbytes,
                               strerror(reason));
    }
    hetccl_sim_poison(d, b->alias, b->mapped, 0);
    *ptr = b->user;
    return HETCCL_OK;
}

/* Never waits for queued work: operations hold references, and the pages go when the last one has ended. Poison shows who
 * counts on that: a real allocator may have handed the memory to somebody else by then. */
int hetccl_sim_free(hetccl_sim_device *d, void *ptr)
{
    if (ptr == NULL)
        return HETCCL_OK;
    hetccl_sim_registry *r = d->registry;
    pthread_rwlock_wrlock(&r->lock);
    size_t i = place_of(r, ptr);
    hetccl_sim_block *b = i > 0 && r->blocks[i - 1]->user == (char *)ptr ? r->blocks[i - 1] : NULL;
    int mine = b != NULL && b->device == d;
    if (mine) {
        memmove(&r->blocks[i - 1], &r->blocks[i], (r->n - i) * sizeof(r->blocks[0]));
        r->n--;
        munmap(b->user, b->reserved);  /* under the lock: nobody may get this address yet */
        b->user = MAP_FAILED;
    }
    pthread_rwlock_unlock(&r->lock);
    if (!mine)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: free(%p): not the start of one of its allocations", d->name, ptr);
    hetccl_sim_poison(d, b->alias, b->mapped, 1);
    block_unref(b);
    return HETCCL_OK;
}

int hetccl_sim_owns(hetccl_sim_device *d, const void *ptr, size_t nbytes)
{
    hetccl_sim_registry *r = d->registry;
    pthread_rwlock_rdlock(&r->lock);
    int status = classify(d, find(r, ptr, nbytes), ptr, nbytes, "owns");
    pthread_rwlock_unlock(&r->lock);
    return status;
}

int hetccl_sim_resolve(hetccl_sim_device *d, const void *ptr, size_t nbytes, int host_too, const char *what,
                       hetccl_sim_span *out)
{
    out->at = (char *)(uintptr_t)ptr;
    out->block = NULL;
    if (nbytes == 0)
        return HETCCL_OK;
    hetccl_sim_registry *r = d->registry;
    pthread_rwlock_rdlock(&r->lock);
    hetccl_sim_block *b = find(r, ptr, nbytes);
    int status = classify(d, b, ptr, nbytes, what);
    if (status == HETCCL_OK) {
        atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed);
        out->block = b;
        out->at = b->alias + ((const char *)ptr - b->user);
    }
    pthread_rwlock_unlock(&r->lock);
    if (status != HETCCL_UNSUPPORTED)
        return status;
    if (ptr == NULL)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %s is NULL for %zu bytes", d->name, what, nbytes);
    if (!host_too)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %s %p is host memory; this call takes memory of %s only", d->name,
                               what, ptr, d->name);
    return HETCCL_OK;
}

void hetccl_sim_span_release(hetccl_sim_span *span)
{
    if (span->block != NULL)
        block_unref(span->block);
    span->block = NULL;
}

/* Number of blocks that begin at or before `ptr`. */
static size_t place_of(const hetccl_sim_registry *r, const char *ptr)
{
    size_t low = 0, high = r->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (r->blocks[middle]->user <= ptr)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The first block that `ptr`..`ptr+nbytes` touches, the page behind its end included, or NULL. */
static hetccl_sim_block *find(const hetccl_sim_registry *r, const char *ptr, size_t nbytes)
{
    size_t i = place_of(r, ptr);
    if (i > 0 && ptr < r->blocks[i - 1]->user + r->blocks[i - 1]->reserved)
        return r->blocks[i - 1];
    if (i < r->n && nbytes > (size_t)(r->blocks[i]->user - ptr))
        return r->blocks[i];
    return NULL;
}

static int classify(const hetccl_sim_device *d, const hetccl_sim_block *b, const char *ptr, size_t nbytes,
                    const char *what)
{
    if (b == NULL)
        return HETCCL_UNSUPPORTED;
    if (b->device != d)
        return hetccl_sim_fail(HETCCL_INVALID, "%s:%d: %s %p is memory of %s:%d", d->name, d->index, what,
                               (const void *)ptr, b->device->name, b->device->index);
    size_t offset = (size_t)(ptr - b->user);
    if (ptr < b->user || offset > b->nbytes || nbytes > b->nbytes - offset)
        return hetccl_sim_fail(HETCCL_INVALID, "%s: %s %p: %zu bytes leave the allocation of %zu bytes at %p", d->name,
                               what, (const void *)ptr, nbytes, b->nbytes, (void *)b->user);
    return HETCCL_OK;
}

static int insert(hetccl_sim_registry *r, hetccl_sim_block *b)
{
    pthread_rwlock_wrlock(&r->lock);
    int ok = 1;
    if (r->n == r->room) {
        size_t room = r->room ? 2 * r->room : 64;
        hetccl_sim_block **blocks = realloc(r->blocks, room * sizeof(blocks[0]));
        ok = blocks != NULL;
        if (ok) {
            r->blocks = blocks;
            r->room = room;
        }
    }
    if (ok) {
        size_t i = place_of(r, b->user);
        memmove(&r->blocks[i + 1], &r->blocks[i], (r->n - i) * sizeof(r->blocks[0]));
        r->blocks[i] = b;
        r->n++;
    }
    pthread_rwlock_unlock(&r->lock);
    return ok ? 0 : -1;
}

static void block_unref(hetccl_sim_block *b)
{
    if (atomic_fetch_sub_explicit(&b->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (b->user != MAP_FAILED)
        munmap(b->user, b->reserved);
    if (b->alias != MAP_FAILED)
        munmap(b->alias, b->mapped);
    free(b);
}
