/* SPDX-License-Identifier: Apache-2.0
 * Conditions: what disturbs a pretend device on purpose, so that tests meet what real devices may do. All zero: nothing.
 */
#ifndef HETCCL_SIM_CONDITIONS_H
#define HETCCL_SIM_CONDITIONS_H
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct hetccl_sim_device;

typedef struct hetccl_sim_conditions {
    uint64_t seed;
    uint64_t delay_ns;                         /* longest random delay before each piece of queued work */
    uint64_t rate;                             /* bytes a second that a rank's link in the island carries, each way */
    uint32_t adversarial;                      /* one stream at a time is favoured and the others are held back */
    uint32_t poison;                           /* fresh memory and freed memory hold NaNs */
    uint32_t one_at_a_time;                    /* a collective runs alone on its device */
} hetccl_sim_conditions;

typedef struct hetccl_sim_disorder {           /* what changes under the conditions of one device */
    _Atomic uint64_t drawn;                    /* state of the random numbers */
    _Atomic uintptr_t favourite;               /* the stream that goes first; compared, never followed */
    _Atomic uint32_t favours;                  /* operations for which it stays so */
    _Atomic uint32_t busy;                     /* 1: a collective runs alone; a futex */
    _Atomic uint64_t out_free_ns, in_free_ns;  /* when the link will have carried what it was given */
} hetccl_sim_disorder;

/* Draws again from the seed, mixed with what tells this device from others. */
void hetccl_sim_conditions_seed(struct hetccl_sim_device *d, uint64_t salt);

/* Before each piece of work of `stream`. Blocks up to delay_ns, and up to 2 ms where another stream is favoured. */
void hetccl_sim_disturb(struct hetccl_sim_device *d, const void *stream);
/* `stream` has nothing to do: others need not wait for it. */
void hetccl_sim_idle(struct hetccl_sim_device *d, const void *stream);

/* Makes `nbytes` of memory NaNs in every floating-point type of two bytes or more: 0xFFF5 fresh, 0xFFFA freed. */
void hetccl_sim_poison(const struct hetccl_sim_device *d, void *at, size_t nbytes, int freed);

/* One at a time: waits until no other collective runs on the device. Blocks until then, the device stops, its deadline
 * passes or *given_up is not 0. HETCCL_OK also when given up; the caller looks. Leave only after HETCCL_OK. */
int hetccl_sim_enter(struct hetccl_sim_device *d, const _Atomic int *given_up);
void hetccl_sim_leave(struct hetccl_sim_device *d);

/* Blocks until the link could have carried `out` and `in` bytes from since_ns on, beside what it carries already, the
 * device stops or *given_up is not 0. */
void hetccl_sim_carry(struct hetccl_sim_device *d, uint64_t since_ns, uint64_t out, uint64_t in,
                      const _Atomic int *given_up);
#endif
