/* SPDX-License-Identifier: Apache-2.0
 * Delays, order, poison, speed: see conditions.h. Nothing of this runs where no condition is set.
 */
#include "device.h"

#include <string.h>
#include <time.h>

#include "wait.h"

#define HOLD_NS 2000000u                       /* how long a stream is held back for the favoured one */
#define NAP_NS 10000000u                       /* a sleeper looks for the end of its device this often */
#define FRESH 0xFFF5u                          /* NaN in float16, bfloat16, and, repeated, in float32 and float64 */
#define FREED 0xFFFAu

static uint64_t draw(hetccl_sim_device *d);
static int over(hetccl_sim_device *d, const _Atomic int *given_up);
static void sleep_until(hetccl_sim_device *d, uint64_t until_ns, const _Atomic int *given_up);

void hetccl_sim_conditions_seed(hetccl_sim_device *d, uint64_t salt)
{
    uint64_t start = d->conditions.seed + (salt << 32) + (uint64_t)d->index;
    for (const char *c = d->name; *c; c++)
        start = (start ^ (uint64_t)(unsigned char)*c) * UINT64_C(0x100000001B3);
    atomic_store_explicit(&d->disorder.drawn, start, memory_order_relaxed);
}

void hetccl_sim_disturb(hetccl_sim_device *d, const void *stream)
{
    const hetccl_sim_conditions *k = &d->conditions;
    hetccl_sim_disorder *x = &d->disorder;
    if (k->delay_ns) {
        uint64_t r = draw(d);
        if (r & 3)                             /* a quarter runs at once */
            sleep_until(d, hetccl_now_ns() + (r >> 2) % (k->delay_ns + 1), NULL);
    }
    if (!k->adversarial)
        return;
    uintptr_t me = (uintptr_t)stream;
    uint64_t r = draw(d);
    if (r % 4 == 0) {
        atomic_store_explicit(&x->favours, 1 + (uint32_t)(r >> 8) % 16, memory_order_relaxed);
        atomic_store_explicit(&x->favourite, me, memory_order_relaxed);
    }
    if (atomic_load_explicit(&x->favourite, memory_order_relaxed) == me) {
        if (atomic_fetch_sub_explicit(&x->favours, 1, memory_order_relaxed) == 1)
            hetccl_sim_idle(d, stream);
        return;
    }
    if (r % 4 == 1)                            /* lets others come that are not there yet */
        sleep_until(d, hetccl_now_ns() + (r >> 8) % (HOLD_NS / 2), NULL);
    uint64_t until = hetccl_now_ns() + HOLD_NS;
    const struct timespec nap = {0, 20000};
    for (;;) {
        uintptr_t first = atomic_load_explicit(&x->favourite, memory_order_relaxed);
        if (first == 0 || first == me || hetccl_now_ns() >= until || over(d, NULL))
            return;
        nanosleep(&nap, NULL);
    }
}

void hetccl_sim_idle(hetccl_sim_device *d, const void *stream)
{
    uintptr_t me = (uintptr_t)stream;
    atomic_compare_exchange_strong_explicit(&d->disorder.favourite, &me, 0, memory_order_relaxed, memory_order_relaxed);
}

void hetccl_sim_poison(const hetccl_sim_device *d, void *at, size_t nbytes, int freed)
{
    if (!d->conditions.poison)
        return;
    uint16_t two = freed ? FREED : FRESH;
    char *to = at;
    for (size_t i = 0; i < nbytes / 2; i++)
        memcpy(to + 2 * i, &two, sizeof two);
    if (nbytes % 2)
        memcpy(to + nbytes - 1, &two, 1);
}

int hetccl_sim_enter(hetccl_sim_device *d, const _Atomic int *given_up)
{
    if (!d->conditions.one_at_a_time)
        return HETCCL_OK;
    uint64_t limit = atomic_load_explicit(&d->deadline_ns, memory_order_relaxed), begin = hetccl_now_ns();
    for (;;) {
        uint32_t idle = 0;
        if (atomic_compare_exchange_strong_explicit(&d->disorder.busy, &idle, 1, memory_order_acquire,
                                                    memory_order_relaxed))
            return HETCCL_OK;
        if (atomic_load_explicit(given_up, memory_order_acquire))
            return HETCCL_ABORTED;
        if (over(d, NULL))
            return hetccl_sim_fail(HETCCL_ABORTED, "%s: the device has been stopped", d->name);
        if (hetccl_now_ns() - begin >= limit)
            return hetccl_sim_fail(HETCCL_TIMED_OUT, "%s: a collective of another communicator has kept the device for "
                                   "%.1f s", d->name, (double)limit * 1e-9);
        hetccl_futex_wait(&d->disorder.busy, 1, NAP_NS);
    }
}

void hetccl_sim_leave(hetccl_sim_device *d)
{
    if (!d->conditions.one_at_a_time)
        return;
    atomic_store_explicit(&d->disorder.busy, 0, memory_order_release);
    hetccl_futex_wake(&d->disorder.busy);
}

/* Takes the link for `nbytes`; returns when they will have passed. */
static uint64_t take(_Atomic uint64_t *free_ns, uint64_t since_ns, uint64_t nbytes, uint64_t rate)
{
    if (nbytes == 0)
        return since_ns;
    uint64_t lasts = (uint64_t)((double)nbytes * 1e9 / (double)rate), end;
    uint64_t before = atomic_load_explicit(free_ns, memory_order_relaxed);
    do {
        end = (before > since_ns ? before : since_ns) + lasts;
    } while (!atomic_compare_exchange_weak_explicit(free_ns, &before, end, memory_order_relaxed, memory_order_relaxed));
    return end;
}

void hetccl_sim_carry(hetccl_sim_device *d, uint64_t since_ns, uint64_t out, uint64_t in, const _Atomic int *given_up)
{
    uint64_t rate = d->conditions.rate;
    if (!rate)
        return;
    uint64_t sent = take(&d->disorder.out_free_ns, since_ns, out, rate);
    uint64_t received = take(&d->disorder.in_free_ns, since_ns, in, rate);
    sleep_until(d, sent > received ? sent : received, given_up);
}

/* A well-mixed number (Steele's SplitMix). */
static uint64_t draw(hetccl_sim_device *d)
{
    uint64_t z = atomic_fetch_add_explicit(&d->disorder.drawn, UINT64_C(0x9E3779B97F4A7C15), memory_order_relaxed);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

static int over(hetccl_sim_device *d, const _Atomic int *given_up)
{
    return atomic_load_explicit(&d->stop, memory_order_acquire) != 0 ||
           (given_up != NULL && atomic_load_explicit(given_up, memory_order_acquire) != 0);
}

static void sleep_until(hetccl_sim_device *d, uint64_t until_ns, const _Atomic int *given_up)
{
    for (uint64_t now; !over(d, given_up) && (now = hetccl_now_ns()) < until_ns;) {
        uint64_t to = until_ns - now > NAP_NS ? now + NAP_NS : until_ns;
        struct timespec t = {(time_t)(to / 1000000000u), (long)(to % 1000000000u)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    }
}
