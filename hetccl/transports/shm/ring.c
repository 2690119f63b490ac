/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "ring_private.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------------------------- failures */

int hetccl_shm_fail(hetccl_shm *shm, int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(shm->text, sizeof shm->text, format, args);
    va_end(args);
    return status;
}

__attribute__((cold, noinline))
static int lost(hetccl_shm_ep *ep)
{
    ep->closed_noticed = 1;
    return hetccl_shm_fail(ep->shm, HETCCL_PEER_LOST, "rank %u has closed its end of the shared-memory link", ep->peer);
}

/* The peer's memory says something that cannot be: the link is not used again. */
__attribute__((cold, noinline))
static int damaged(hetccl_shm_ep *ep, const char *what, uint32_t found, uint32_t most)
{
    ep->error = HETCCL_SYSTEM;
    return hetccl_shm_fail(ep->shm, ep->error, "shared-memory link to rank %u is damaged: %s is %u, at most %u is "
                           "possible; the peer has written where it must not", ep->peer, what, found, most);
}

__attribute__((cold, noinline))
static int unusable(hetccl_shm_ep *ep, int32_t channel)
{
    if (ep->error == HETCCL_SYSTEM)
        return hetccl_shm_fail(ep->shm, ep->error, "shared-memory link to rank %u was found damaged before", ep->peer);
    if (ep->error)
        return hetccl_shm_fail(ep->shm, ep->error, "shared-memory link to rank %u is closed on this side", ep->peer);
    return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "channel %d does not exist; there are %d", (int)channel,
                           HETCCL_CHANNELS);
}

#define CHECK_EP(ep, channel)                                                        \
    do {                                                                             \
        if (UNLIKELY((ep)->error || (uint32_t)(channel) >= HETCCL_CHANNELS))         \
            return unusable(ep, channel);                                            \
    } while (0)

/* -------------------------------------------------------------------------------------------------- sending */

/* The contribute slot that an answer lies in. Whatever the peer wrote there, the slot is one of ours. */
static inline uint32_t answered_slot(hetccl_shm_ep *ep, slot_header *header)
{
    return atomic_load_explicit(&header->place, memory_order_relaxed) & (ep->out[HETCCL_CHANNEL_CONTRIBUTE].slots - 1);
}

/* Run when contribute credit has come in: the peer commits an answer before it gives the credit for its slot, so every
 * answer that lies in a credited slot is visible by now. */
static void note_answers(hetccl_shm_ep *ep)
{
    in_ring *in = &ep->in[HETCCL_CHANNEL_RESULT];
    uint8_t *lent = ep->out[HETCCL_CHANNEL_CONTRIBUTE].lent;
    uint32_t position = in->scanned;
    if ((int32_t)(position - in->head) < 0)
        position = in->head;
    for (; position - in->head < in->slots && arrived(in, position); position++) {
        slot_header *header = &in->headers[position & (in->slots - 1)];
        if (atomic_load_explicit(&header->flags, memory_order_relaxed) & ANSWERED)
            lent[answered_slot(ep, header)] = 1;
    }
    in->scanned = position;
}

static int shm_reserve(void *ctx, void *handle, hetccl_message *m)
{
    hetccl_shm_ep *ep = handle;
    CHECK_EP(ep, m->channel);
    out_ring *out = &ep->out[m->channel];
    if (UNLIKELY(m->nbytes > ep->slot_bytes))
        return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "a message of %zu bytes was asked for; one slot has %u",
                               m->nbytes, ep->slot_bytes);
    if (UNLIKELY(out->reserved - out->released_seen >= out->slots)) {
        uint32_t released = atomic_load_explicit(out->released, memory_order_acquire);
        if (UNLIKELY(released - out->released_seen > out->committed - out->released_seen))
            return damaged(ep, "number of released slots", released - out->released_seen,
                           out->committed - out->released_seen);
        out->released_seen = released;
        if (out->lent)
            note_answers(ep);
        if (out->reserved - released >= out->slots) {
            out->waiting = 1;
            if (UNLIKELY(atomic_load_explicit(ep->theirs, memory_order_acquire) & CLOSED))
                return lost(ep);
            return HETCCL_IN_PROGRESS;
        }
    }
    uint32_t slot = out->reserved & (out->slots - 1);
    slot_header *header = &out->headers[slot];
    if (UNLIKELY(out->lent && out->lent[slot]))   /* comes free when the caller releases the answer in it */
        return HETCCL_IN_PROGRESS;
    __builtin_prefetch(header, 1);
    out->waiting = 0;
    out->reserved++;
    if (m->nbytes <= HETCCL_SHM_INLINE) {
        out->sizes[slot] = (uint32_t)m->nbytes | SIZE_IN_LINE;
        m->ptr = header->payload;
    } else {
        out->sizes[slot] = (uint32_t)m->nbytes;
        m->ptr = out->data + (size_t)slot * ep->slot_bytes;
    }
    return HETCCL_OK;
}

/* Writes the header of the oldest reserved message, its sequence word last. */
static inline void publish(hetccl_shm_ep *ep, out_ring *out, const hetccl_message *m, uint32_t flags)
{
    slot_header *header = &out->headers[out->committed & (out->slots - 1)];
    atomic_store_explicit(&header->nbytes, (uint32_t)m->nbytes, memory_order_relaxed);
    atomic_store_explicit(&header->fingerprint, m->fingerprint, memory_order_relaxed);
    atomic_store_explicit(&header->flags, flags, memory_order_relaxed);
    atomic_store_explicit(&header->sequence, ++out->committed, memory_order_release);
    ep->counters.bytes_sent += m->nbytes;
    ep->counters.messages_sent++;
}

static int shm_commit(void *ctx, void *handle, hetccl_message *m)
{
    hetccl_shm_ep *ep = handle;
    CHECK_EP(ep, m->channel);
    out_ring *out = &ep->out[m->channel];
    uint32_t position = out->committed, slot = position & (out->slots - 1), size = out->sizes[slot];
    if (UNLIKELY(position == out->reserved))
        return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "commit on channel %d without a reserve", (int)m->channel);
    if (UNLIKELY(m->nbytes > (size & ~SIZE_IN_LINE)))
        return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "commit of %zu bytes; %u were reserved", m->nbytes,
                               size & ~SIZE_IN_LINE);
    if (UNLIKELY(atomic_load_explicit(ep->theirs, memory_order_acquire) & CLOSED)) {
        out->reserved = out->committed;        /* who tries again shall hear the same */
        return lost(ep);                       /* not asked afterwards: the peer may read this message, its last, and close */
    }
    publish(ep, out, m, size & SIZE_IN_LINE ? IN_LINE : 0);
    wake_peer(ep);
    return HETCCL_OK;
}

static int shm_send(void *ctx, void *handle, hetccl_message *m)
{
    hetccl_shm_ep *ep = handle;
    CHECK_EP(ep, m->channel);
    out_ring *out = &ep->out[m->channel];
    if (UNLIKELY(out->reserved != out->committed))
        return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "send on channel %d while %u reserved messages wait for commit",
                    (int)m->channel, out->reserved - out->committed);
    hetccl_message room = *m;
    int status = shm_reserve(ctx, handle, &room);
    if (status != HETCCL_OK)
        return status;
    if (m->nbytes)
        memcpy(room.ptr, m->ptr, m->nbytes);
    return shm_commit(ctx, handle, m);
}

/* ------------------------------------------------------------------------------------------------ receiving */

__attribute__((cold, noinline))
static int mismatch(hetccl_shm_ep *ep, const hetccl_message *m, uint32_t nbytes, uint32_t fingerprint)
{
    return hetccl_shm_fail(ep->shm, HETCCL_MISMATCH, "expected %zu bytes with fingerprint %#x on channel %d, but rank "
                           "%u sent %u bytes with fingerprint %#x: the ranks called different operations", m->nbytes,
                           m->fingerprint, (int)m->channel, ep->peer, nbytes, fingerprint);
}

/* The message at `position`, checked against what the memory can hold: *nbytes, *fingerprint, *payload. */
static inline int look(hetccl_shm_ep *ep, in_ring *in, uint32_t position, uint32_t *nbytes, uint32_t *fingerprint,
                       uint8_t **payload)
{
    if (position - in->head >= in->slots)      /* cannot be there before older ones are released */
        return HETCCL_IN_PROGRESS;
    if (!arrived(in, position)) {
        if (LIKELY(!(atomic_load_explicit(ep->theirs, memory_order_acquire) & CLOSED)) || arrived(in, position))
            return HETCCL_IN_PROGRESS;
        return lost(ep);
    }
    uint32_t slot = position & (in->slots - 1);
    slot_header *header = &in->headers[slot];
    uint32_t flags = atomic_load_explicit(&header->flags, memory_order_relaxed), most;
    *nbytes = atomic_load_explicit(&header->nbytes, memory_order_relaxed);
    *fingerprint = atomic_load_explicit(&header->fingerprint, memory_order_relaxed);
    if (flags & IN_LINE) {
        most = HETCCL_SHM_INLINE;
        *payload = header->payload;
    } else if (flags & ANSWERED) {
        most = ep->slot_bytes;
        *payload = ep->out[HETCCL_CHANNEL_CONTRIBUTE].data + (size_t)answered_slot(ep, header) * ep->slot_bytes;
    } else {
        most = ep->slot_bytes;
        *payload = in->data + (size_t)slot * ep->slot_bytes;
    }
    if (UNLIKELY(*nbytes > most))
        return damaged(ep, "length of a message", *nbytes, most);
    if ((int32_t)(position - in->noticed) >= 0)
        in->noticed = position + 1;
    return HETCCL_OK;
}

static int shm_peek(void *ctx, void *handle, hetccl_message *m, uint32_t index)
{
    hetccl_shm_ep *ep = handle;
    uint32_t nbytes = 0, fingerprint = 0;
    uint8_t *payload = NULL;
    CHECK_EP(ep, m->channel);
    in_ring *in = &ep->in[m->channel];
    if (UNLIKELY(index >= in->slots))
        return HETCCL_IN_PROGRESS;
    int status = look(ep, in, in->head + index, &nbytes, &fingerprint, &payload);
    if (status != HETCCL_OK)
        return status;
    if (m->nbytes && UNLIKELY(nbytes != m->nbytes || fingerprint != m->fingerprint))
        return mismatch(ep, m, nbytes, fingerprint);
    m->ptr = payload;
    m->nbytes = nbytes;
    m->fingerprint = fingerprint;
    return HETCCL_OK;
}

static inline void give_back(hetccl_shm_ep *ep, in_ring *in, uint32_t nbytes)
{
    slot_header *header = &in->headers[in->head & (in->slots - 1)];
    if (atomic_load_explicit(&header->flags, memory_order_relaxed) & ANSWERED)
        ep->out[HETCCL_CHANNEL_CONTRIBUTE].lent[answered_slot(ep, header)] = 0;
    atomic_store_explicit(in->released, ++in->head, memory_order_release);
    ep->counters.bytes_received += nbytes;
    ep->counters.messages_received++;
    wake_peer(ep);
}

static int shm_release(void *ctx, void *handle, int32_t channel)
{
    hetccl_shm_ep *ep = handle;
    CHECK_EP(ep, channel);
    in_ring *in = &ep->in[channel];
    if (UNLIKELY(!arrived(in, in->head)))
        return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "release on channel %d, but no message has arrived there",
                               (int)channel);
    uint32_t nbytes = atomic_load_explicit(&in->headers[in->head & (in->slots - 1)].nbytes, memory_order_relaxed);
    give_back(ep, in, nbytes <= ep->slot_bytes ? nbytes : 0);
    return HETCCL_OK;
}

static int shm_recv(void *ctx, void *handle, hetccl_message *m)
{
    hetccl_shm_ep *ep = handle;
    uint32_t nbytes = 0, fingerprint = 0;
    uint8_t *payload = NULL;
    CHECK_EP(ep, m->channel);
    in_ring *in = &ep->in[m->channel];
    int status = look(ep, in, in->head, &nbytes, &fingerprint, &payload);
    if (status != HETCCL_OK)
        return status;
    if (UNLIKELY(nbytes != m->nbytes || fingerprint != m->fingerprint))
        return mismatch(ep, m, nbytes, fingerprint);
    if (nbytes)
        memcpy(m->ptr, payload, nbytes);
    give_back(ep, in, nbytes);
    return HETCCL_OK;
}

static int shm_answer(void *ctx, void *handle, hetccl_message *m)
{
    hetccl_shm_ep *ep = handle;
    CHECK_EP(ep, HETCCL_CHANNEL_RESULT);
    in_ring *in = &ep->in[HETCCL_CHANNEL_CONTRIBUTE];
    out_ring *out = &ep->out[HETCCL_CHANNEL_RESULT];
    uint32_t nbytes = 0, fingerprint = 0, position = in->head;
    uint8_t *payload = NULL;
    hetccl_message room = {.size = sizeof room, .channel = HETCCL_CHANNEL_RESULT};
    if (UNLIKELY(!arrived(in, position)))
        return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "answer, but no contribution has arrived");
    if (UNLIKELY(out->reserved != out->committed))
        return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "answer while %u reserved results wait for commit",
                               out->reserved - out->committed);
    int status = look(ep, in, position, &nbytes, &fingerprint, &payload);
    if (UNLIKELY(status != HETCCL_OK))
        return status;
    if (UNLIKELY(m->nbytes > nbytes))
        return hetccl_shm_fail(ep->shm, HETCCL_INVALID, "answer of %zu bytes to a contribution of %u", m->nbytes,
                               nbytes);
    if (UNLIKELY(atomic_load_explicit(ep->theirs, memory_order_acquire) & CLOSED))
        return lost(ep);                       /* before it is out, as in commit */
    int small = m->nbytes <= HETCCL_SHM_INLINE;   /* then it travels in its header's line */
    room.nbytes = small ? m->nbytes : 0;
    status = shm_reserve(ctx, handle, &room);
    if (status != HETCCL_OK)
        return status;
    if (small && m->nbytes)
        memcpy(room.ptr, payload, m->nbytes);
    if (!small)
        atomic_store_explicit(&out->headers[out->committed & (out->slots - 1)].place, position, memory_order_relaxed);
    publish(ep, out, m, small ? IN_LINE : ANSWERED);
    give_back(ep, in, nbytes);                 /* after publish: see note_answers */
    return HETCCL_OK;
}

/* ------------------------------------------------------------------------------------- state of an endpoint */

static int shm_progress(void *ctx, void *handle)
{
    return HETCCL_OK;                          /* a message is whole or not there: nothing is ever half sent */
}

static int shm_counters(void *ctx, void *handle, hetccl_transport_counters *out)
{
    hetccl_shm_ep *ep = handle;
    uint32_t size = out->size < sizeof *out ? out->size : (uint32_t)sizeof *out;
    memcpy(out, &ep->counters, size);
    out->size = size;
    return HETCCL_OK;
}

/* A peer that closed is lost only once all it sent has been released: a rank may finish and close before its peer has
 * read the last message. */
static int shm_ep_error(void *ctx, void *handle)
{
    hetccl_shm_ep *ep = handle;
    if (ep->error)
        return unusable(ep, 0);
    if (LIKELY(!(atomic_load_explicit(ep->theirs, memory_order_acquire) & CLOSED)))
        return HETCCL_OK;
    for (int c = 0; c < HETCCL_CHANNELS; c++)
        if (arrived(&ep->in[c], ep->in[c].head))
            return HETCCL_OK;
    return lost(ep);
}

/* The region stays mapped until hetccl_shm_close: copies of a device may still run in it. */
int hetccl_shm_ep_close(hetccl_shm_ep *ep)
{
    if (ep->error == HETCCL_INVALID)
        return HETCCL_OK;
    ep->error = HETCCL_INVALID;
    if (getpid() != ep->shm->pid)              /* the region is not mapped in a forked child, and not its to close */
        return HETCCL_OK;
    atomic_fetch_or_explicit(ep->mine, CLOSED, memory_order_seq_cst);
    wake_peer(ep);
    return HETCCL_OK;
}

static int shm_ep_close(void *ctx, void *handle)
{
    return hetccl_shm_ep_close(handle);
}

static const char *shm_last_error(void *ctx)
{
    return ((hetccl_shm *)ctx)->text;
}

hetccl_transport_ops hetccl_shm_ops(uint32_t slot_bytes)
{
    return (hetccl_transport_ops){
        .version = HETCCL_SPI_VERSION, .size = sizeof(hetccl_transport_ops),
        .caps = HETCCL_TRANSPORT_HOST_MEMORY | HETCCL_TRANSPORT_SAME_HOST | HETCCL_TRANSPORT_SLOTS |
                HETCCL_TRANSPORT_ANSWER | HETCCL_TRANSPORT_WINDOW,
        .max_message = slot_bytes, .last_error = shm_last_error, .send = shm_send, .recv = shm_recv,
        .reserve = shm_reserve, .commit = shm_commit, .peek = shm_peek, .release = shm_release,
        .progress = shm_progress, .wait_fds = hetccl_shm_wait_fds, .arm = hetccl_shm_arm, .disarm = hetccl_shm_disarm,
        .counters = shm_counters, .ep_error = shm_ep_error, .ep_close = shm_ep_close,
        .answer = shm_answer, .window = hetccl_shm_window,
    };
}
