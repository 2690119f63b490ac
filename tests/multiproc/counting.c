/* SPDX-License-Identifier: Apache-2.0
 * Preloaded by a test: counts the allocations of each thread and of the process, then lets the C library make them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static __thread uint64_t mine __attribute__((tls_model("initial-exec")));
static _Atomic uint64_t all;

static void count(void)
{
    mine++;
    atomic_fetch_add_explicit(&all, 1, memory_order_relaxed);
}

uint64_t counting_mine(void) { return mine; }
uint64_t counting_all(void) { return all; }

void *malloc(size_t n)
{
    count();
    return __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    count();
    return __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    count();
    return __libc_realloc(p, n);
}

void *memalign(size_t align, size_t n)
{
    count();
    return __libc_memalign(align, n);
}

void *aligned_alloc(size_t align, size_t n) { return memalign(align, n); }

int posix_memalign(void **p, size_t align, size_t n)
{
    *p = memalign(align, n);
    return *p ? 0 : 12;
}
