/* SPDX-License-Identifier: Apache-2.0
 * Helpers of the driving thread where a link needs more than one core: large copies and sums of a CPU rank beside a device.
 */
#ifndef HETCCL_TEAM_H
#define HETCCL_TEAM_H

typedef struct hx_team hx_team;
typedef void (*hx_share_fn)(void *job, int part, int parts);

hx_team *hx_team_new(int threads);          /* the caller is one of them; NULL for one thread, or if none can be started */
void hx_team_free(hx_team *t);              /* joins them */
/* Calls share(job, part, parts) for every part at once, one part a thread. Returns when all have. One caller at a time. */
void hx_team_run(hx_team *t, hx_share_fn share, void *job);
#endif
