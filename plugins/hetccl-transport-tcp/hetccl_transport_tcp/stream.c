/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "stream.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

static int push(hetccl_tcp_channel *c);
static void load(hetccl_tcp_channel *c, const void *ptr, size_t nbytes, uint32_t fingerprint);
static int need_header(hetccl_tcp_channel *c, uint8_t *dst, size_t expected, uint32_t fingerprint);
static void begin_body(hetccl_tcp_channel *c, uint8_t *dst, int to_slot);
static int read_body(hetccl_tcp_channel *c);
static int fill_slot(hetccl_tcp_channel *c, size_t expected, uint32_t fingerprint, int check);
static int differs(hetccl_tcp_channel *c, uint32_t nbytes, uint32_t fingerprint, const hetccl_message *m, int any_length);
static int broken(hetccl_tcp_channel *c, int *status, ssize_t result, const char *doing);
static int wrong(hetccl_tcp_channel *c, const char *what);
static int lost_before(hetccl_tcp_channel *c, int status);
static int too_long(hetccl_tcp_channel *c, size_t nbytes);
static int room(hetccl_tcp_channel *c, hetccl_tcp_slot *slot);

#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define MAX_MESSAGE(c) ((c)->ep->tcp->ops.max_message)
#define fail(c, ...) hetccl_tcp_fail((c)->ep->tcp, __VA_ARGS__)

/* -------------------------------------------------------------------------------------------------- outgoing */

int hetccl_tcp_channel_send(hetccl_tcp_channel *c, const hetccl_message *m)
{
    if (UNLIKELY(c->tx_status))
        return lost_before(c, c->tx_status);
    if (c->tx_state != HETCCL_TCP_TX_IDLE && !c->tx_from_slot) {
        if (UNLIKELY(c->tx_ptr != m->ptr || c->tx_nbytes != m->nbytes || c->tx_fingerprint != m->fingerprint))
            return fail(c, HETCCL_INVALID, "another send to rank %d on channel %d is unfinished", c->ep->peer, c->index);
    } else {
        if (UNLIKELY(m->nbytes > MAX_MESSAGE(c)))
            return too_long(c, m->nbytes);
        if (UNLIKELY(c->tx_from_slot || c->tx_reserved)) {   /* what was committed before leaves before */
            int rc = hetccl_tcp_channel_flush(c);
            if (rc != HETCCL_OK)
                return rc;
        }
        load(c, m->ptr, m->nbytes, m->fingerprint);
    }
    int rc = c->tx_state == HETCCL_TCP_TX_FINISHED ? HETCCL_OK : push(c);
    if (rc == HETCCL_IN_PROGRESS && c->tx_done == 0)
        c->tx_state = HETCCL_TCP_TX_IDLE;   /* nothing has left: the caller's memory is not held on to */
    if (rc == HETCCL_OK)
        c->tx_state = HETCCL_TCP_TX_IDLE;
    return rc;
}

int hetccl_tcp_channel_reserve(hetccl_tcp_channel *c, hetccl_message *m)
{
    if (UNLIKELY(m->nbytes > MAX_MESSAGE(c)))
        return too_long(c, m->nbytes);
    if (c->tx_reserved == HETCCL_TCP_SLOTS) {
        int rc = hetccl_tcp_channel_flush(c);
        if (rc > HETCCL_IN_PROGRESS)
            return rc;
        if (c->tx_reserved == HETCCL_TCP_SLOTS)
            return HETCCL_IN_PROGRESS;
    }
    hetccl_tcp_slot *slot = &c->tx_slot[(c->tx_first + c->tx_reserved) % HETCCL_TCP_SLOTS];
    int rc = room(c, slot);
    if (rc != HETCCL_OK)
        return rc;
    slot->nbytes = (uint32_t)m->nbytes;
    slot->committed = 0;
    c->tx_reserved++;
    m->ptr = slot->data;
    return HETCCL_OK;
}

int hetccl_tcp_channel_commit(hetccl_tcp_channel *c, const hetccl_message *m)
{
    for (uint32_t i = 0; i < c->tx_reserved; i++) {
        hetccl_tcp_slot *slot = &c->tx_slot[(c->tx_first + i) % HETCCL_TCP_SLOTS];
        if (slot->committed)
            continue;
        if (UNLIKELY(m->nbytes > slot->nbytes))
            return fail(c, HETCCL_INVALID, "%zu bytes are committed, but only %u were reserved", m->nbytes, slot->nbytes);
        slot->nbytes = (uint32_t)m->nbytes;
        slot->fingerprint = m->fingerprint;
        slot->committed = 1;
        int rc = hetccl_tcp_channel_flush(c);
        return rc == HETCCL_IN_PROGRESS ? HETCCL_OK : rc;
    }
    return fail(c, HETCCL_INVALID, "commit without reserve on channel %d", c->index);
}

int hetccl_tcp_channel_flush(hetccl_tcp_channel *c)
{
    for (;;) {
        if (c->tx_state == HETCCL_TCP_TX_PARTIAL) {
            int rc = c->tx_status ? lost_before(c, c->tx_status) : push(c);
            if (rc != HETCCL_OK)
                return rc;
        }
        if (c->tx_state == HETCCL_TCP_TX_FINISHED) {
            if (!c->tx_from_slot)
                return HETCCL_OK;           /* its caller has yet to hear of it */
            c->tx_state = HETCCL_TCP_TX_IDLE;
            c->tx_from_slot = 0;
            c->tx_first = (c->tx_first + 1) % HETCCL_TCP_SLOTS;
            c->tx_reserved--;
        }
        hetccl_tcp_slot *slot = &c->tx_slot[c->tx_first];
        if (c->tx_reserved == 0 || !slot->committed)
            return HETCCL_OK;
        load(c, slot->data, slot->nbytes, slot->fingerprint);
        c->tx_from_slot = 1;
    }
}

int hetccl_tcp_channel_unsent(const hetccl_tcp_channel *c)
{
    return !c->tx_status && (c->tx_state == HETCCL_TCP_TX_PARTIAL || c->tx_blocked ||
                             (c->tx_reserved && c->tx_slot[c->tx_first].committed));
}

/* -------------------------------------------------------------------------------------------------- incoming */

int hetccl_tcp_channel_recv(hetccl_tcp_channel *c, const hetccl_message *m)
{
    if (UNLIKELY(m->nbytes > MAX_MESSAGE(c)))
        return too_long(c, m->nbytes);
    if (UNLIKELY(c->rx_count || c->rx_to_slot)) {            /* a peeked message comes first */
        hetccl_message held = *m;
        int rc = hetccl_tcp_channel_peek(c, &held, 0);
        if (rc != HETCCL_OK)
            return rc;
        if (held.nbytes != m->nbytes)                        /* peek takes 0 for "any length" */
            return differs(c, (uint32_t)held.nbytes, held.fingerprint, m, 0);
        if (held.nbytes)
            memcpy(m->ptr, held.ptr, held.nbytes);
        return hetccl_tcp_channel_release(c);
    }
    if (!c->rx_body) {
        int rc = need_header(c, m->ptr, m->nbytes, m->fingerprint);
        if (rc != HETCCL_OK)
            return rc;
        if (!c->rx_body) {
            rc = differs(c, c->rx_header.nbytes, c->rx_header.fingerprint, m, 0);
            if (rc != HETCCL_OK)
                return rc;
            begin_body(c, m->ptr, 0);
        }
    } else if (UNLIKELY(c->rx_ptr != m->ptr || c->rx_header.nbytes != m->nbytes || c->rx_header.fingerprint != m->fingerprint)) {
        return fail(c, HETCCL_INVALID, "another recv from rank %d on channel %d is unfinished", c->ep->peer, c->index);
    }
    return read_body(c);
}

int hetccl_tcp_channel_peek(hetccl_tcp_channel *c, hetccl_message *m, uint32_t index)
{
    if (UNLIKELY(index >= HETCCL_TCP_SLOTS))
        return fail(c, HETCCL_INVALID, "message %u was asked for, %u can be held", index, HETCCL_TCP_SLOTS);
    if (UNLIKELY(c->rx_body && !c->rx_to_slot))
        return fail(c, HETCCL_INVALID, "a recv from rank %d on channel %d is unfinished", c->ep->peer, c->index);
    while (c->rx_count <= index) {
        int rc = fill_slot(c, m->nbytes, m->fingerprint, c->rx_count == index);
        if (rc != HETCCL_OK)
            return rc;
    }
    hetccl_tcp_slot *slot = &c->rx_slot[(c->rx_first + index) % HETCCL_TCP_SLOTS];
    int rc = differs(c, slot->nbytes, slot->fingerprint, m, m->nbytes == 0);
    if (rc != HETCCL_OK)
        return rc;
    m->ptr = slot->data;
    m->nbytes = slot->nbytes;
    return HETCCL_OK;
}

int hetccl_tcp_channel_release(hetccl_tcp_channel *c)
{
    if (UNLIKELY(c->rx_count == 0))
        return fail(c, HETCCL_INVALID, "release without a message on channel %d", c->index);
    c->rx_first = (c->rx_first + 1) % HETCCL_TCP_SLOTS;
    c->rx_count--;
    return HETCCL_OK;
}

void hetccl_tcp_channel_lost(hetccl_tcp_channel *c, int status)
{
    c->rx_status = c->rx_status ? c->rx_status : status;
    c->tx_status = c->tx_status ? c->tx_status : status;
}

/* --------------------------------------------------------------------------------------------------- helpers */

static void load(hetccl_tcp_channel *c, const void *ptr, size_t nbytes, uint32_t fingerprint)
{
    c->tx_header = (hetccl_tcp_header){htole32(HETCCL_TCP_MAGIC), htole32((uint32_t)nbytes), htole32(fingerprint),
                                       htole32(c->tx_sequence)};
    c->tx_ptr = ptr;
    c->tx_nbytes = nbytes;
    c->tx_fingerprint = fingerprint;
    c->tx_done = 0;
    c->tx_from_slot = 0;
    c->tx_state = HETCCL_TCP_TX_PARTIAL;
}

/* Hands the kernel what it takes of the loaded message. One call unless a signal comes: a short count means "full". */
static int push(hetccl_tcp_channel *c)
{
    size_t total = HETCCL_TCP_HEADER + c->tx_nbytes;
    ssize_t n;
    do {
        if (c->tx_done >= HETCCL_TCP_HEADER) {
            size_t sent = c->tx_done - HETCCL_TCP_HEADER;
            n = send(c->fd, c->tx_ptr + sent, c->tx_nbytes - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        } else {
            struct iovec part[2] = {{(uint8_t *)&c->tx_header + c->tx_done, HETCCL_TCP_HEADER - c->tx_done},
                                    {(void *)c->tx_ptr, c->tx_nbytes}};
            struct msghdr msg = {.msg_iov = part, .msg_iovlen = c->tx_nbytes ? 2 : 1};
            n = sendmsg(c->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        c->tx_blocked = errno == EAGAIN || errno == EWOULDBLOCK;
        return c->tx_blocked ? HETCCL_IN_PROGRESS : broken(c, &c->tx_status, n, "sending to");
    }
    c->tx_done += (size_t)n;
    c->tx_blocked = 0;
    if (c->tx_done < total)
        return HETCCL_IN_PROGRESS;
    c->tx_state = HETCCL_TCP_TX_FINISHED;
    c->tx_sequence++;
    c->ep->counters.bytes_sent += c->tx_nbytes;
    c->ep->counters.messages_sent++;
    return HETCCL_OK;
}

/* Gets the next message's header. A large payload is read straight to `dst` in the same call, on trust that the message is
 * the expected one: if so the body is begun; if not, its bytes go back into the stage and nothing is lost. */
static int need_header(hetccl_tcp_channel *c, uint8_t *dst, size_t expected, uint32_t fingerprint)
{
    if (c->have_header)
        return HETCCL_OK;
    size_t direct = 0;
    if (c->hi - c->lo < HETCCL_TCP_HEADER) {
        if (UNLIKELY(c->rx_status))
            return lost_before(c, c->rx_status);
        if (c->lo) {
            memmove(c->stage, c->stage + c->lo, c->hi - c->lo);
            c->hi -= c->lo;
            c->lo = 0;
        }
        int straight = c->hi == 0 && expected > HETCCL_TCP_GULP - HETCCL_TCP_HEADER;
        ssize_t n;
        do {
            if (straight) {
                struct iovec part[2] = {{c->stage, HETCCL_TCP_HEADER}, {dst, expected}};
                struct msghdr msg = {.msg_iov = part, .msg_iovlen = 2};
                n = recvmsg(c->fd, &msg, MSG_DONTWAIT);
            } else {
                n = recv(c->fd, c->stage + c->hi, HETCCL_TCP_GULP - c->hi, MSG_DONTWAIT);
            }
        } while (n < 0 && errno == EINTR);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return HETCCL_IN_PROGRESS;
        if (UNLIKELY(n <= 0))
            return broken(c, &c->rx_status, n, "receiving from");
        if (straight && n > (ssize_t)HETCCL_TCP_HEADER) {
            direct = (size_t)n - HETCCL_TCP_HEADER;
            n = HETCCL_TCP_HEADER;
        }
        c->hi += (size_t)n;
        if (c->hi < HETCCL_TCP_HEADER)
            return HETCCL_IN_PROGRESS;
    }
    hetccl_tcp_header h;
    memcpy(&h, c->stage + c->lo, sizeof h);
    c->rx_header = (hetccl_tcp_header){le32toh(h.magic), le32toh(h.nbytes), le32toh(h.fingerprint), le32toh(h.sequence)};
    if (UNLIKELY(c->rx_header.magic != HETCCL_TCP_MAGIC))
        return wrong(c, "is no message header");
    if (UNLIKELY(c->rx_header.nbytes > MAX_MESSAGE(c)))
        return wrong(c, "announces a message that is too long (is HETCCL_TCP_CHUNK_BYTES equal on all ranks?)");
    if (UNLIKELY(c->rx_header.sequence != c->rx_sequence))
        return wrong(c, "is out of sequence");
    c->have_header = 1;
    if (direct && c->rx_header.nbytes == expected && c->rx_header.fingerprint == fingerprint) {
        begin_body(c, dst, 0);
        c->rx_done = direct;
    } else if (direct) {
        memcpy(c->stage + c->hi, dst, direct);               /* stage_size covers a header and a whole message */
        c->hi += direct;
    }
    return HETCCL_OK;
}

static void begin_body(hetccl_tcp_channel *c, uint8_t *dst, int to_slot)
{
    c->lo += HETCCL_TCP_HEADER;
    c->rx_ptr = dst;
    c->rx_done = 0;
    c->rx_body = 1;
    c->rx_to_slot = to_slot;
}

/* Takes payload from the stage, then from the socket. HETCCL_OK: the message is whole. */
static int read_body(hetccl_tcp_channel *c)
{
    size_t left = c->rx_header.nbytes - c->rx_done, staged = c->hi - c->lo;
    if (left && staged) {
        size_t n = left < staged ? left : staged;
        memcpy(c->rx_ptr + c->rx_done, c->stage + c->lo, n);
        c->lo += n;
        c->rx_done += n;
        left -= n;
    }
    if (left) {
        if (UNLIKELY(c->rx_status))
            return fail(c, c->rx_status, "the connection to rank %d was lost in the middle of a message", c->ep->peer);
        ssize_t n;
        do {
            n = recv(c->fd, c->rx_ptr + c->rx_done, left, MSG_DONTWAIT);
        } while (n < 0 && errno == EINTR);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return HETCCL_IN_PROGRESS;
        if (UNLIKELY(n <= 0))
            return broken(c, &c->rx_status, n, "in the middle of a message from");
        c->rx_done += (size_t)n;
        if ((size_t)n < left)
            return HETCCL_IN_PROGRESS;
    }
    if (c->lo == c->hi)
        c->lo = c->hi = 0;
    c->have_header = c->rx_body = c->rx_to_slot = 0;
    c->rx_sequence++;
    c->ep->counters.bytes_received += c->rx_header.nbytes;
    c->ep->counters.messages_received++;
    return HETCCL_OK;
}

/* Brings the next message into the next slot. check: it is the one that the caller described. */
static int fill_slot(hetccl_tcp_channel *c, size_t expected, uint32_t fingerprint, int check)
{
    hetccl_tcp_slot *slot = &c->rx_slot[(c->rx_first + c->rx_count) % HETCCL_TCP_SLOTS];
    if (!c->rx_body) {
        int rc = room(c, slot);
        if (rc != HETCCL_OK)
            return rc;
        rc = need_header(c, slot->data, check && expected <= MAX_MESSAGE(c) ? expected : 0, fingerprint);
        if (rc != HETCCL_OK)
            return rc;
        if (c->rx_body) {
            c->rx_to_slot = 1;
        } else {
            hetccl_message m = {sizeof m, fingerprint, c->index, 0, NULL, expected};
            rc = check ? differs(c, c->rx_header.nbytes, c->rx_header.fingerprint, &m, expected == 0) : HETCCL_OK;
            if (rc != HETCCL_OK)
                return rc;
            begin_body(c, slot->data, 1);
        }
    }
    int rc = read_body(c);
    if (rc != HETCCL_OK)
        return rc;
    slot->nbytes = c->rx_header.nbytes;
    slot->fingerprint = c->rx_header.fingerprint;
    c->rx_count++;
    return HETCCL_OK;
}

static int differs(hetccl_tcp_channel *c, uint32_t nbytes, uint32_t fingerprint, const hetccl_message *m, int any_length)
{
    if (!UNLIKELY(fingerprint != m->fingerprint || (!any_length && nbytes != m->nbytes)))
        return HETCCL_OK;
    return fail(c, HETCCL_MISMATCH,
                "rank %d sent %u bytes of operation %08x on channel %d, %zu bytes of operation %08x were expected here",
                c->ep->peer, nbytes, fingerprint, c->index, m->nbytes, m->fingerprint);
}

/* The socket failed: result is what the call returned, 0 is the end of the stream. Stays. */
__attribute__((cold, noinline))
static int broken(hetccl_tcp_channel *c, int *status, ssize_t result, const char *doing)
{
    int code = result == 0 ? 0 : errno;
    int gone = code == 0 || code == ECONNRESET || code == EPIPE || code == ETIMEDOUT || code == EHOSTUNREACH ||
               code == ENETUNREACH || code == ENETDOWN || code == ECONNABORTED;
    char reason[96];
    *status = gone ? HETCCL_PEER_LOST : HETCCL_SYSTEM;
    return fail(c, *status, "%s rank %d on channel %d: %s", doing, c->ep->peer, c->index,
                code == 0 ? "it has closed the connection" : strerror_r(code, reason, sizeof reason));
}

/* The peer's bytes are not of this protocol. Stays, both ways. */
__attribute__((cold, noinline))
static int wrong(hetccl_tcp_channel *c, const char *what)
{
    hetccl_tcp_channel_lost(c, HETCCL_SYSTEM);
    c->lo = c->hi = 0;
    return fail(c, HETCCL_SYSTEM, "what rank %d sent on channel %d %s: magic %08x, %u bytes, sequence %u (expected %u)",
                c->ep->peer, c->index, what, c->rx_header.magic, c->rx_header.nbytes, c->rx_header.sequence, c->rx_sequence);
}

__attribute__((cold, noinline))
static int lost_before(hetccl_tcp_channel *c, int status)
{
    return fail(c, status, "the connection to rank %d was lost before", c->ep->peer);
}

__attribute__((cold, noinline))
static int too_long(hetccl_tcp_channel *c, size_t nbytes)
{
    return fail(c, HETCCL_INVALID, "%zu bytes were asked for, a message has at most %zu (HETCCL_TCP_CHUNK_BYTES)",
                nbytes, MAX_MESSAGE(c));
}

static int room(hetccl_tcp_channel *c, hetccl_tcp_slot *slot)
{
    if (slot->data == NULL) {
        slot->data = aligned_alloc(64, (MAX_MESSAGE(c) + 63) & ~(size_t)63);
        if (slot->data == NULL)
            return fail(c, HETCCL_NO_MEMORY, "no memory for a message of %zu bytes", MAX_MESSAGE(c));
    }
    return HETCCL_OK;
}
