/* SPDX-License-Identifier: Apache-2.0
 * Small collectives: every rank shows its data, waits until all have, and makes its own result from them. All combine the
 * same bytes in the same order with the same code, so all get the same bits.
 *
 * Two buffers a rank are enough: whoever puts exchange k + 2 has seen everybody's k + 1, put after their reading of k.
 */
#include "island_impl.h"

static inline const char *from_rank(const hetccl_island *s, int r, size_t nbytes);
static int fold_all(hetccl_island *s, const island_call *c, size_t nbytes, size_t offset);

int island_small_all_reduce(hetccl_island *s, const island_call *c)
{
    size_t nbytes = c->count * c->size;
    int status = island_exchange(s, c->send, nbytes, nbytes);
    return status != HETCCL_OK ? status : fold_all(s, c, nbytes, 0);
}

int island_small_reduce(hetccl_island *s, const island_call *c)
{
    size_t nbytes = c->count * c->size;
    int status = island_exchange(s, c->send, nbytes, nbytes);
    return status != HETCCL_OK || s->rank != c->root ? status : fold_all(s, c, nbytes, 0);
}

int island_small_reduce_scatter(hetccl_island *s, const island_call *c)
{
    size_t nbytes = c->count * c->size * (size_t)s->n;
    int status = island_exchange(s, c->send, nbytes, nbytes);
    return status != HETCCL_OK ? status : fold_all(s, c, nbytes, (size_t)s->rank * c->count * c->size);
}

int island_small_all_gather(hetccl_island *s, const island_call *c)
{
    size_t nbytes = c->count * c->size;
    int status = island_exchange(s, c->send, nbytes, nbytes);
    for (int r = 0; r < s->n && status == HETCCL_OK; r++)
        memcpy((char *)c->recv + (size_t)r * nbytes, from_rank(s, r, nbytes), nbytes);
    return status;
}

int island_small_broadcast(hetccl_island *s, const island_call *c)
{
    size_t nbytes = c->count * c->size;
    int status = island_exchange(s, c->send, s->rank == c->root ? nbytes : 0, nbytes);
    if (status == HETCCL_OK && (s->rank != c->root || c->recv != c->send))
        memcpy(c->recv, from_rank(s, c->root, nbytes), nbytes);
    return status;
}

int island_small_all_to_all(hetccl_island *s, const island_call *c)
{
    size_t block = c->count * c->size, nbytes = block * (size_t)s->n;
    int status = island_exchange(s, c->send, nbytes, nbytes);
    for (int r = 0; r < s->n && status == HETCCL_OK; r++)
        memcpy((char *)c->recv + (size_t)r * block, from_rank(s, r, nbytes) + (size_t)s->rank * block, block);
    return status;
}

int island_exchange(hetccl_island *s, const void *data, size_t mine, size_t nbytes)
{
    uint32_t number = ++s->exchanges;
    island_flag *flag = &island_board_of(s, s->rank)->small[number & 1];
    if (mine)
        memcpy(nbytes <= ISLAND_INLINE ? flag->data : island_small_of(s, s->rank, number), data, mine);
    island_post(flag, number);
    for (int r = 0; r < s->n; r++) {
        if (r == s->rank)
            continue;
        int status = island_await(s, &island_board_of(s, r)->small[number & 1], number, r);
        if (__builtin_expect(status != HETCCL_OK, 0))
            return status;
    }
    return island_finished(s);
}

int island_small_max(hetccl_island *s, int *value)
{
    int mine = *value, status = island_exchange(s, &mine, sizeof mine, sizeof mine), theirs;
    for (int r = 0; r < s->n && status == HETCCL_OK; r++) {
        memcpy(&theirs, from_rank(s, r, sizeof theirs), sizeof theirs);
        *value = theirs > *value ? theirs : *value;
    }
    return status;
}

static inline const char *from_rank(const hetccl_island *s, int r, size_t nbytes)
{
    return nbytes <= ISLAND_INLINE ? island_board_of(s, r)->small[s->exchanges & 1].data
                                   : island_small_of(s, r, s->exchanges);
}

static int fold_all(hetccl_island *s, const island_call *c, size_t nbytes, size_t offset)
{
    const void *src[HETCCL_ISLAND_RANKS_MAX];
    void *dst = c->recv;
    for (int r = 0; r < s->n; r++)
        src[r] = from_rank(s, r, nbytes) + offset;
    return hetccl_combine(&dst, 1, src, s->n, c->count, c->dtype, c->redop, c->divisor);
}
