/* SPDX-License-Identifier: Apache-2.0
 * Messages over TCP sockets. An endpoint is one socket a channel, so that a full channel never holds up another,
 * and those of its window (window.h).
 *
 * On the wire a message is a 16-byte header in little-endian order {magic, nbytes, fingerprint, sequence} and the payload.
 * stream.c moves one channel's bytes; endpoint.c is the table of functions that the core sees.
 */
#ifndef HETCCL_TCP_STREAM_H
#define HETCCL_TCP_STREAM_H
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "hetccl/spi.h"

#define HETCCL_TCP_MAGIC 0x31544348u       /* "HCT1" */
#define HETCCL_TCP_HEADER 16u
#define HETCCL_TCP_SLOTS 4u                /* messages that peek can hold, and that reserve can give room for */
#define HETCCL_TCP_GULP 4096u              /* small messages are read this many bytes at a time: one call brings several */
#define HETCCL_TCP_TEXT 256u

typedef struct hetccl_tcp_header {
    uint32_t magic, nbytes, fingerprint, sequence;
} hetccl_tcp_header;

enum { HETCCL_TCP_TX_IDLE, HETCCL_TCP_TX_PARTIAL, HETCCL_TCP_TX_FINISHED };

/* One message slot of max_message bytes, 64-byte aligned, allocated at first use. */
typedef struct hetccl_tcp_slot {
    uint8_t *data;
    uint32_t nbytes, fingerprint, committed;
} hetccl_tcp_slot;

typedef struct hetccl_tcp_channel {
    struct hetccl_tcp_ep *ep;
    int fd, index;
    int rx_status, tx_status;              /* HETCCL_OK, or the failure that stays */
    /* Outgoing. A message leaves from tx_ptr; while PARTIAL or FINISHED and not from a slot it is the caller's memory. */
    int tx_state, tx_from_slot;
    int tx_blocked;                        /* the socket took nothing of a send that has not begun */
    uint32_t tx_sequence;
    hetccl_tcp_header tx_header;           /* as on the wire */
    const uint8_t *tx_ptr;
    size_t tx_nbytes, tx_done;             /* payload; header and payload bytes handed to the kernel */
    uint32_t tx_fingerprint;
    hetccl_tcp_slot tx_slot[HETCCL_TCP_SLOTS];
    uint32_t tx_first, tx_reserved;        /* ring of reserved slots, the first of them committed */
    /* Incoming. Bytes read ahead lie in stage[lo, hi). */
    uint8_t *stage;
    size_t lo, hi, stage_size;
    int have_header, rx_body, rx_to_slot;
    hetccl_tcp_header rx_header;           /* host order, valid with have_header */
    uint32_t rx_sequence;
    uint8_t *rx_ptr;
    size_t rx_done;
    hetccl_tcp_slot rx_slot[HETCCL_TCP_SLOTS];
    uint32_t rx_first, rx_count;           /* ring of whole messages */
} hetccl_tcp_channel;

typedef struct hetccl_tcp_ep {
    struct hetccl_tcp *tcp;
    struct hetccl_tcp_ep *next;
    int peer, closed;
    uint64_t looked_ns;                    /* when the sockets were last asked for signs of a vanished host */
    hetccl_transport_counters counters;
    hetccl_tcp_channel channel[HETCCL_CHANNELS];
    struct hetccl_tcp_window *window;      /* NULL: the link has no sockets for one */
} hetccl_tcp_ep;

/* Text of the last failure of one thread. */
typedef struct hetccl_tcp_text {
    pthread_t thread;
    int used;
    char text[HETCCL_TCP_TEXT];
} hetccl_tcp_text;

/* One opened transport: the `ctx` of every call. Endpoints stay in the list, closed, until the transport is freed, so that
 * a late call on a closed one is an error and not a crash. */
typedef struct hetccl_tcp {
    hetccl_table table;
    hetccl_transport_ops ops;
    pthread_mutex_t lock;                  /* list and texts; never held around a system call */
    hetccl_tcp_ep *eps;
    hetccl_tcp_text text[8];
    uint32_t next_text;
    uint32_t most_part;                    /* bytes of a window's put that one socket takes at a time; 0: by their number */
} hetccl_tcp;

/* endpoint.c */
hetccl_tcp *hetccl_tcp_new(size_t max_message, uint32_t most_part);   /* NULL: no memory */
void hetccl_tcp_free(hetccl_tcp *tcp);                            /* closes what is open */
/* One socket a channel; with more, one for the words of a window, and its bulk sockets, first those on which side 0 sends.
 * side: 0 on the rank that dialled. Takes the fds over; NULL: no memory. */
hetccl_tcp_ep *hetccl_tcp_open(hetccl_tcp *tcp, int peer, const int *fds, int n_fds, int side);
void hetccl_tcp_close_all(hetccl_tcp *tcp);
int hetccl_tcp_fail(hetccl_tcp *tcp, int status, const char *format, ...) __attribute__((format(printf, 3, 4), cold));

/* stream.c; none blocks */
int hetccl_tcp_channel_send(hetccl_tcp_channel *c, const hetccl_message *m);
int hetccl_tcp_channel_recv(hetccl_tcp_channel *c, const hetccl_message *m);
int hetccl_tcp_channel_reserve(hetccl_tcp_channel *c, hetccl_message *m);
int hetccl_tcp_channel_commit(hetccl_tcp_channel *c, const hetccl_message *m);
int hetccl_tcp_channel_peek(hetccl_tcp_channel *c, hetccl_message *m, uint32_t index);
int hetccl_tcp_channel_release(hetccl_tcp_channel *c);
int hetccl_tcp_channel_flush(hetccl_tcp_channel *c);              /* HETCCL_OK: nothing is left to send */
int hetccl_tcp_channel_unsent(const hetccl_tcp_channel *c);       /* 1: waits for the socket to take more */
void hetccl_tcp_channel_lost(hetccl_tcp_channel *c, int status);  /* both directions fail from now on */
#endif
