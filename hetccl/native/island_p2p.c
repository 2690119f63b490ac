/* SPDX-License-Identifier: Apache-2.0
 * Messages between two ranks of an island: a ring for each ordered pair.
 */
#include "island_layout.h"

#include "combine.h"

/* What the two directions share. Returns HETCCL_OK and the message's bytes, or why not. */
static int check(hetccl_island *s, size_t count, int dtype, int peer, size_t *nbytes);

int hetccl_island_send(hetccl_island *s, const void *send, size_t count, int dtype, int peer)
{
    size_t nbytes, n;
    int status = check(s, count, dtype, peer, &nbytes);
    if (status != HETCCL_OK)
        return status;
    island_pair *pair = island_pair_of(s, s->rank, peer);
    uint32_t at = atomic_load_explicit(&pair->head.value, memory_order_relaxed);      /* this rank alone writes it */
    for (size_t o = 0; o < nbytes; o += n, at++) {
        n = nbytes - o < s->message_bytes ? nbytes - o : s->message_bytes;
        status = island_await(s, &pair->tail, at + 1 - ISLAND_MESSAGES, peer);
        if (status != HETCCL_OK)
            return status;
        pair->nbytes[at % ISLAND_MESSAGES][0] = nbytes;
        pair->nbytes[at % ISLAND_MESSAGES][1] = n;
        memcpy(island_message_of(s, pair, at), (const char *)send + o, n);
        island_post(&pair->head, at + 1);
    }
    return island_finished(s);
}

int hetccl_island_recv(hetccl_island *s, void *recv, size_t count, int dtype, int peer)
{
    size_t nbytes, n;
    int status = check(s, count, dtype, peer, &nbytes);
    if (status != HETCCL_OK)
        return status;
    island_pair *pair = island_pair_of(s, peer, s->rank);
    uint32_t at = atomic_load_explicit(&pair->tail.value, memory_order_relaxed);
    for (size_t o = 0; o < nbytes; o += n, at++) {
        n = nbytes - o < s->message_bytes ? nbytes - o : s->message_bytes;
        status = island_await(s, &pair->head, at + 1, peer);
        if (status != HETCCL_OK)
            return status;
        if (pair->nbytes[at % ISLAND_MESSAGES][0] != nbytes || pair->nbytes[at % ISLAND_MESSAGES][1] != n)
            return HETCCL_MISMATCH;
        memcpy((char *)recv + o, island_message_of(s, pair, at), n);
        island_post(&pair->tail, at + 1);
    }
    return island_finished(s);
}

static int check(hetccl_island *s, size_t count, int dtype, int peer, size_t *nbytes)
{
    int status = island_usable(s);
    size_t size = hetccl_dtype_size(dtype);
    if (status != HETCCL_OK)
        return status;
    if (size == 0 || count > SIZE_MAX / size || peer < 0 || peer >= s->n || peer == s->rank)
        return HETCCL_INVALID;
    *nbytes = count * size;
    return HETCCL_OK;
}
