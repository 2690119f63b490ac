/* SPDX-License-Identifier: Apache-2.0 */
#ifndef HETCCL_CORE_PARTING_H
#define HETCCL_CORE_PARTING_H
#include "hetccl/spi.h"

typedef struct hx_parting hx_parting;

/* Begins to destroy `comm`. NULL: there is no memory or no thread for it, and it stays as it is. */
hx_parting *hx_part_begin(const hetccl_ccl_ops *ccl, void *ccl_ctx, const hetccl_device_ops *dev, void *dev_ctx, void *comm);
/* Blocks at most ns; HETCCL_IN_PROGRESS: it has not ended by then, and goes on. Also with 0, as a question. */
int hx_part_wait(hx_parting *p, uint64_t ns);
/* Nobody will ask again. */
void hx_part_drop(hx_parting *p);
#endif
