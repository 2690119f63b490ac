/* SPDX-License-Identifier: Apache-2.0
 * The collective library of the pretend accelerator: stream-ordered calls over the blocking ones of native/island.h.
 */
#ifndef HETCCL_SIM_CCL_H
#define HETCCL_SIM_CCL_H
#include "device.h"
#include "island.h"

typedef struct hetccl_sim_ccl {                /* ctx of the ccl table; one a device */
    hetccl_sim_device *device;
    hetccl_ccl_ops ops;
} hetccl_sim_ccl;

/* Fills the table. Bit `op` of masks[dtype]: the library claims that pair; only those that can be computed are kept. */
void hetccl_sim_ccl_init(hetccl_sim_ccl *c, hetccl_sim_device *d, const uint32_t *masks);

/* Takes over a joined island; NULL if memory is out. */
hetccl_sim_comm *hetccl_sim_comm_new(hetccl_sim_device *d, hetccl_island *island, int32_t rank, int32_t size);

/* Aborts every communicator that has calls running or queued, before the device stops. Never blocks. */
void hetccl_sim_abort_all(hetccl_sim_device *d);
#endif
