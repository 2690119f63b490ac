/* SPDX-License-Identifier: Apache-2.0
 * A slow border for tests and experiments: a transport's table wrapped so that all messages of this process together pass
 * at a given rate, each way. The wrapped table answers HETCCL_IN_PROGRESS while the link is taken, which any caller must
 * expect anyway, and a timer among its descriptors wakes sleepers when it is free again.
 */
#ifndef HETCCL_SHAPING_H
#define HETCCL_SHAPING_H
#include <stdatomic.h>
#include <stdint.h>

#include "hetccl/spi.h"

typedef struct hx_rate {               /* the link of one rank: every communicator and transport of the process shares it */
    uint64_t bytes_s;
    struct hx_way {
        _Atomic uint64_t free_ns;      /* when it will have carried what it was given */
        _Atomic uint32_t wanted;       /* something waits for that: time that a late waker loses is made good */
    } out, in;
} hx_rate;

typedef struct hx_shaped {             /* ctx of the wrapped table */
    const hetccl_transport_ops *inner; /* normalised: no NULL in it */
    void *ctx;
    hx_rate *rate;
    uint64_t wake_ns;                  /* when the earliest refused call may be tried again; 0: none was refused */
    int timer;
    hetccl_transport_ops ops;
} hx_shaped;

/* Wraps `inner`. HETCCL_SYSTEM if there is no timer. Registered memory and one-sided calls are left out of the table. */
int hx_shape(hx_shaped *s, const hetccl_transport_ops *inner, void *ctx, hx_rate *rate);
void hx_unshape(hx_shaped *s);
#endif
