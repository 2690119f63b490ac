/* SPDX-License-Identifier: Apache-2.0
 * How to wait: a few pauses, then sched_yield, then sleep. A long pause loop is the one wrong choice: beside a busy
 * process every pause is time taken from the peer (docs/design/waiting.md has the figures).
 */
#ifndef HETCCL_WAIT_H
#define HETCCL_WAIT_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HETCCL_WAIT_PAUSES 25      /* about 1 us; 0 when the ranks of this host outnumber its cores */
#define HETCCL_WAIT_YIELDS 1000

static inline uint64_t hetccl_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void hetccl_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleeps while *word == expected, at most timeout_ns. The word may lie in memory shared between processes. */
static inline void hetccl_futex_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns)
{
    struct timespec t = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, NULL, 0);
}

static inline void hetccl_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Number of pauses that a waiter should spend: `local_ranks` processes share the caller's cores. */
static inline int hetccl_wait_pauses(int local_ranks)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 0;
    return local_ranks > CPU_COUNT(&set) ? 0 : HETCCL_WAIT_PAUSES;
}

/* One turn of a polling loop: pause, then yield. Returns 0 while polling is still cheap, 1 when it is time to sleep. */
static inline int hetccl_wait_turn(uint32_t *turn, int pauses)
{
    uint32_t t = (*turn)++;
    if (t < (uint32_t)pauses) {
        hetccl_pause();
        return 0;
    }
    if (t < (uint32_t)pauses + HETCCL_WAIT_YIELDS) {
        sched_yield();
        return 0;
    }
    return 1;
}
#endif
