/* SPDX-License-Identifier: Apache-2.0
 * Windows over TCP: each rank of a link has a copy of the memory, and what one of them puts is carried into the other's.
 *
 * A link has, beside its channels, one socket for words and small puts, which the thread that drives serves itself, and so
 * many *bulk* sockets for each direction as HETCCL_TCP_SOCKETS says. A large put is cut into parts that wait in one queue; each
 * bulk socket has a thread that takes the next part and sends it, and at its other end one that receives parts straight to where
 * they belong. So whichever socket is free carries on, and the threads sleep when there is nothing to do. They start with the
 * first large put. Data goes one way on such a socket: the kernel lets one thread at a time into it, so that a sender and a
 * receiver of the same socket hold each other up.
 *
 * Every frame is a header (64 bytes, little-endian) and the bytes. Puts that have bytes are numbered, and their words become
 * visible in that order, whatever socket the parts came over.
 *
 * window.c: the memory, the words' socket, what has landed. bulk.c: the threads.
 */
#ifndef HETCCL_TCP_WINDOW_H
#define HETCCL_TCP_WINDOW_H
#include "stream.h"

#define HETCCL_TCP_BULK_MAGIC 0x32544348u  /* "HCT2" */
#define HETCCL_TCP_WINDOW_BYTES ((size_t)128 << 20)
#define HETCCL_TCP_MOST_BULK 16
#define HETCCL_TCP_SMALL (64u << 10)       /* a put up to here goes over the words' socket */
#define HETCCL_TCP_LEAST_PART ((uint64_t)128 << 10)
#define HETCCL_TCP_PARTS 512u              /* that can wait */
#define HETCCL_TCP_PUTS 1024u              /* so many may land before the first of them is whole: far more than slots */

enum { HETCCL_TCP_START = 1 };             /* flag: bulk data follows, start the threads that receive it */

typedef struct hetccl_tcp_frame {
    uint32_t magic, nbytes;
    uint64_t at;
    uint32_t put, parts;                   /* number of the put, and of frames that it comes in; 0 parts: words only */
    uint32_t sequence;                     /* of the frames of this socket */
    uint16_t n_words, flags;
    uint64_t word[2][2];                   /* where, value */
} hetccl_tcp_frame;

typedef struct hetccl_tcp_bulk {           /* a pair of bulk sockets, one a direction */
    struct hetccl_tcp_window *window;
    int out_fd, in_fd;
    pthread_t sender, receiver;
    int sends, receives;                   /* its threads run */
    uint64_t send_ns, recv_ns, idle_ns;    /* in send; receiving a body; sender without work. Written by its threads */
} hetccl_tcp_bulk;

typedef struct hetccl_tcp_landing {        /* a put of which parts have come */
    uint32_t put, left, n_words;
    int begun;
    uint64_t word[2][2];
} hetccl_tcp_landing;

typedef struct hetccl_tcp_window {
    hetccl_tcp_ep *ep;
    int pid, side, n_bulk, words_fd;
    uint8_t *memory;                       /* NULL until it is asked for */
    size_t nbytes;
    uint32_t put;                          /* puts with bytes so far */
    int started;                           /* the peer was told to start its threads */
    /* words' socket; the thread that drives */
    uint8_t *out;                          /* what the socket has not taken yet lies in [out_lo, out_hi) */
    size_t out_lo, out_hi, out_room;
    uint32_t out_sequence, in_sequence;
    hetccl_tcp_frame in;
    size_t in_got;                         /* of the frame and its bytes */
    /* parts that wait to be sent */
    pthread_mutex_t lock;
    pthread_cond_t work;
    hetccl_tcp_frame part[HETCCL_TCP_PARTS];
    uint32_t head, tail, sending;          /* free-running; sending: taken out, not yet handed to the kernel */
    int stop;
    /* what has landed */
    pthread_mutex_t landing_lock;
    hetccl_tcp_landing landing[HETCCL_TCP_PUTS];
    uint32_t landed;                       /* puts whose words are visible */
    _Atomic int status;                    /* HETCCL_OK, or the failure that stays */
    char text[HETCCL_TCP_TEXT];            /* written once, before status */
    hetccl_tcp_bulk bulk[HETCCL_TCP_MOST_BULK];
} hetccl_tcp_window;

/* window.c */
/* fds: the words' socket, n_bulk on which side 0 sends, n_bulk on which side 1 does. Takes them over; NULL: no memory. */
hetccl_tcp_window *hetccl_tcp_window_new(hetccl_tcp_ep *ep, const int *fds, int n_bulk, int side);
int hetccl_tcp_window_map(hetccl_tcp_window *w, hetccl_window_args *args);
int hetccl_tcp_window_put(hetccl_tcp_window *w, const hetccl_window_put *put);
int hetccl_tcp_window_test(hetccl_tcp_window *w);
int hetccl_tcp_window_unsent(const hetccl_tcp_window *w);           /* 1: the words' socket shall be writable */
void hetccl_tcp_window_close(hetccl_tcp_window *w);                 /* ends the threads, closes the sockets; memory stays */
void hetccl_tcp_window_free(hetccl_tcp_window *w);
int hetccl_tcp_window_check(const hetccl_tcp_window *w, const hetccl_tcp_frame *f, uint32_t sequence);  /* 1: it makes sense */
void hetccl_tcp_window_land(hetccl_tcp_window *w, const hetccl_tcp_frame *f);
void hetccl_tcp_window_fail(hetccl_tcp_window *w, int status, const char *format, ...) __attribute__((format(printf, 3, 4), cold));
void hetccl_tcp_window_broken(hetccl_tcp_window *w, long result, const char *doing);

/* bulk.c */
int hetccl_tcp_bulk_send(hetccl_tcp_window *w, const hetccl_tcp_frame *f, uint64_t nbytes);   /* IN_PROGRESS: no room */
int hetccl_tcp_bulk_sent(hetccl_tcp_window *w);                     /* 1: nothing waits or is being sent */
int hetccl_tcp_bulk_receive(hetccl_tcp_window *w);                  /* starts the threads that receive */
void hetccl_tcp_bulk_close(hetccl_tcp_window *w);
#endif
