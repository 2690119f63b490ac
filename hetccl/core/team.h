/* SPDX-License-Identifier: Apache-2.0
 * Helpers of the driving thread where a link needs more than one core: large copies and sums of a CPU rank beside a device.
 *
 * Jobs are cut into parts that wait in one queue, first in, first out; whoever is free takes the next. So nobody waits for the
 * slowest part of a job while another job has parts left. Only the driving thread calls these functions.
 */
#ifndef HETCCL_TEAM_H
#define HETCCL_TEAM_H
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hx_team hx_team;
typedef void (*hx_share_fn)(void *job, int part, int parts);

hx_team *hx_team_new(int threads);          /* the caller is one of them; NULL for one thread, or if none can be started */
void hx_team_free(hx_team *t);              /* joins them; what nobody has begun is dropped */
/* Calls share(job, part, parts) for every part, sometime, on any thread; *left counts those that have not ended. Without a team
 * (NULL), and where the queue is full, all of them at once. `job` and `left` stay until *left is 0. */
void hx_team_push(hx_team *t, hx_share_fn share, void *job, int parts, _Atomic uint32_t *left);
int hx_team_help(hx_team *t);               /* does one part that nobody has begun; 0 if there is none. t may be NULL */
/* Drops what nobody has begun. 1 once nothing runs any more: then no part touches any memory. t may be NULL. */
int hx_team_drained(hx_team *t);
#endif
