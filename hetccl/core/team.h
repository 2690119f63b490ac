/* SPDX-License-Identifier: Apache-2.0
 * Helpers of the driving thread where a link needs more than one core: large copies and sums of a CPU rank beside a device.
 *
 * Each thread has a queue, first in, first out, and one that has nothing to do takes from the others. A job says where its data
 * lies, and the same place is always the same thread's: whichever came first had one thread write into a slot that another
 * one's caches held, and copies of two or four threads took a third longer. A job is one chunk and one thread's: threads that
 * worked within one chunk slowed each other down (9.4 against 16.4 GB/s). Only the driving thread calls these functions.
 */
#ifndef HETCCL_TEAM_H
#define HETCCL_TEAM_H
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hx_team hx_team;
typedef void (*hx_job_fn)(void *job);

hx_team *hx_team_new(int threads);          /* the caller is one of them; NULL for one thread */
void hx_team_free(hx_team *t);              /* joins them; what nobody has begun is dropped */
/* Calls run(job) sometime, on any thread, if possible on the one that has `place`; *left is 1 until that has ended. Without a team
 * (NULL), and where the queue is full, at once. `job` and `left` stay until *left is 0. */
void hx_team_push(hx_team *t, uint32_t place, hx_job_fn run, void *job, _Atomic uint32_t *left);
int hx_team_help(hx_team *t);               /* does one job that nobody has begun; 0 if there is none. t may be NULL */
/* Drops what nobody has begun. 1 once nothing runs any more: then no job touches any memory. t may be NULL. */
int hx_team_drained(hx_team *t);
#endif
