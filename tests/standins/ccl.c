/* SPDX-License-Identifier: Apache-2.0
 * Stand-in for libnccl and, with -DHIP, librccl: the exact C interface on the memory and streams of the runtime's stand-in, across
 * processes of one host (POSIX shared memory, one byte ring for each ordered pair of ranks). Calls only enqueue; the work is
 * done when something waits for the stream. Arguments are checked as the real ones do, and pointers as they should.
 * Variables: STANDIN_VERSION; STANDIN_CCL_FAIL="ncclAllReduce:2:5" (the second call answers 5); STANDIN_CCL_BUSY="ncclAllReduce:2:9"
 * (the second call answers "in progress", and so do the next 9 questions for errors); STANDIN_CCL_ASYNC="4:6" (the fourth question
 * for errors, and all after it, answer 6). Compiled with -DOLD it lacks what came with later versions.
 * ncclCommDestroy waits, as the real one does, until every rank has begun to leave the communicator or has ended.
 */
#define _GNU_SOURCE
#include "beside.h"
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, DEVICE_ERROR = 1, SYSTEM_ERROR = 2, INTERNAL = 3, BAD_ARGUMENT = 4, BAD_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { RING = 1 << 16, MAX_RANKS = 16 };

typedef struct { char bytes[128]; } unique_id;
typedef struct { uint32_t magic; char name[64]; } id_head;
typedef struct { _Atomic uint64_t head; char pad0[56]; _Atomic uint64_t tail; char pad1[56]; char data[RING]; } ring;
typedef struct { _Atomic int joined, device[MAX_RANKS]; char pad[60]; ring rings[]; } segment;
typedef struct comm { uint32_t magic; int n, rank, device; _Atomic int aborted; segment *s; uint64_t posted, done; int fd; } comm;
typedef struct xfer { int peer, sending; char *p; size_t left; } xfer;
typedef struct job {
    comm *c;
    uint64_t number;
    int n, started;
    xfer x[2 * MAX_RANKS];
    void (*before)(struct job *), (*after)(struct job *);
    const char *in;
    char *out, *scratch;
    size_t count, bytes;
    int type, op, root;
    void *stream;
    struct job *next;
} job;

static char last[256];                          /* of the process, as in the real ones */
static _Thread_local int depth;
static _Thread_local job *group, *group_tail;
static char unjoined[64];

static int fail(int code, const char *text) { snprintf(last, sizeof last, "stand-in: %s", text); return code; }
static size_t size_of(int type) { static const int s[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2}; return type < 0 || type > 9 ? 0 : (size_t)s[type]; }

/* The number behind the second colon if this is the call that a variable names ("ncclAllReduce:2:5"), else 0. */
static int chosen(const char *variable, const char *name, int *calls)
{
    const char *wanted = getenv(variable);
    size_t n = strlen(name);
    char *rest;
    if (!wanted || strncmp(wanted, name, n) || wanted[n] != ':')
        return 0;
    long k = strtol(wanted + n + 1, &rest, 10);
    return ++*calls == k && *rest == ':' ? atoi(rest + 1) : 0;
}
static _Atomic int busy;                        /* questions that are still answered "in progress" */
static int fault(const char *name)
{
    static int failing, slow;
    int polls = chosen("STANDIN_CCL_BUSY", name, &slow);
    if (polls)
        busy = polls;
    return chosen("STANDIN_CCL_FAIL", name, &failing);
}
/* What a call that went well answers. */
static int ended(void) { return busy ? IN_PROGRESS : OK; }
#define ENTER() do { int f = fault(__func__); if (f) return fail(f, "a test asked for this error"); } while (0)

/* Leaves nothing in /dev/shm when a rank never came. */
static __attribute__((destructor)) void unlink_unjoined(void) { if (unjoined[0]) shm_unlink(unjoined); }

API int ncclGetVersion(int *v) { const char *e = getenv("STANDIN_VERSION"); if (!v) return BAD_ARGUMENT; *v = e ? atoi(e) : 22809; return OK; }
API const char *ncclGetLastError(void *c) { (void)c; return last; }
API const char *ncclGetErrorString(int r)
{
    static const char *const s[] = {"no error", "unhandled device error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "operation in progress"};
    return r < 0 || r > 7 ? "unknown result code" : s[r];
}
API int ncclGetUniqueId(unique_id *u)
{
    static _Atomic int k;
    struct timespec t;
    if (!u)
        return BAD_ARGUMENT;
    clock_gettime(CLOCK_MONOTONIC, &t);
    memset(u, 0, sizeof *u);
    id_head *h = (id_head *)u;
    h->magic = 0x57a4d14;
    snprintf(h->name, sizeof h->name, "/hetccl-standin.%d.%d.%lx", getpid(), k++, (long)t.tv_nsec);
    return OK;
}
/* A rank holds a lock on its byte of the shared memory while it belongs to the communicator. Tells what is there for F_OFD_GETLK. */
static int presence(int fd, int command, int type, int rank)
{
    struct flock l = {.l_type = (short)type, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(fd, command, &l) ? F_UNLCK : l.l_type;
}
API int ncclCommInitRank(comm **out, int n, unique_id u, int rank)
{
    ENTER();
    id_head *h = (id_head *)&u;
    if (!out || n < 1 || n > MAX_RANKS || rank < 0 || rank >= n || h->magic != 0x57a4d14)
        return fail(BAD_ARGUMENT, "ncclCommInitRank: rank, number of ranks or id");
    int (*device)(void) = (int (*)(void))runtime("standin_current_device");
    if (!device)
        return fail(DEVICE_ERROR, "the runtime's stand-in is not loaded");
    size_t len = sizeof(segment) + (size_t)(n * n) * sizeof(ring);
    strcpy(unjoined, h->name);
    int fd = shm_open(h->name, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)len))
        return fail(SYSTEM_ERROR, "shared memory");
    segment *s = mmap(0, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    presence(fd, F_OFD_SETLK, F_WRLCK, rank);
    s->device[rank] = device();
    atomic_fetch_add(&s->joined, 1);
    while (s->joined < n)
        usleep(200);
    shm_unlink(h->name);
    unjoined[0] = 0;
    for (int a = 0; a < n; a++)
        for (int b = 0; b < a; b++)
            if (s->device[a] == s->device[b])
                return fail(BAD_USAGE, "Duplicate GPU detected: two ranks of one host use the same device");
    comm *c = calloc(1, sizeof *c);
    *c = (comm){0xc0ffee, n, rank, device(), 0, s, 0, 0, fd};
    *out = c;
    return ended();
}
static int asked(void)
{
    static int questions;
    const char *wanted = getenv("STANDIN_CCL_ASYNC"), *code = wanted ? strchr(wanted, ':') : NULL;
    if (code && ++questions >= atoi(wanted))
        return atoi(code + 1);
    int left = busy;
    if (!left)
        return OK;
    busy = left - 1;
    return IN_PROGRESS;
}
API int ncclCommDestroy(comm *c)
{
    if (c && c->magic != 0xc0ffee)
        return fail(BAD_ARGUMENT, "ncclCommDestroy: not a communicator");
    if (!c)
        return OK;
    c->magic = 0xdead;
    presence(c->fd, F_OFD_SETLK, F_UNLCK, c->rank);
    for (int r = 0; r < c->n; r++)
        while (presence(c->fd, F_OFD_GETLK, F_WRLCK, r) != F_UNLCK)
            usleep(1000);
    close(c->fd);
    return OK;
}
API int ncclCommAbort(comm *c)
{
    if (!c || c->magic != 0xc0ffee)
        return fail(BAD_ARGUMENT, "ncclCommAbort: not a communicator");
    c->aborted = 1;
    presence(c->fd, F_OFD_SETLK, F_UNLCK, c->rank);
    return OK;
}
API int ncclCommGetAsyncError(comm *c, int *e) { if (!c || !e || c->magic != 0xc0ffee) return fail(BAD_ARGUMENT, "comm argument is NULL or destroyed"); *e = c->aborted ? REMOTE : asked(); return OK; }
API int ncclCommCount(comm *c, int *v) { if (!c || !v) return BAD_ARGUMENT; *v = c->n; return OK; }
API int ncclCommUserRank(comm *c, int *v) { if (!c || !v) return BAD_ARGUMENT; *v = c->rank; return OK; }
API int ncclCommCuDevice(comm *c, int *v) { if (!c || !v) return BAD_ARGUMENT; *v = c->device; return OK; }

/* Moves what can be moved; 1 when all is done. Calls of a communicator come one after another, whatever their streams. */
static int step(void *arg)
{
    job *j = arg;
    comm *c = j->c;
    if (!c->aborted) {
        if (c->done != j->number)
            return 0;
        if (!j->started++ && j->before)
            j->before(j);
        int live = 0;
        for (int i = 0; i < j->n; i++) {
            xfer *x = &j->x[i];
            int blocked = 0;
            for (int k = 0; k < i; k++)
                blocked |= j->x[k].left && j->x[k].peer == x->peer && j->x[k].sending == x->sending;
            while (x->left && !blocked) {
                ring *r = &c->s->rings[x->sending ? c->rank * c->n + x->peer : x->peer * c->n + c->rank];
                uint64_t head = atomic_load(&r->head), tail = atomic_load(&r->tail), at = (x->sending ? head : tail) % RING;
                size_t k = x->sending ? RING - (head - tail) : head - tail;
                k = k > x->left ? x->left : k;
                k = k > RING - at ? RING - at : k;
                if (!k)
                    break;
                if (x->sending) {
                    memcpy(r->data + at, x->p, k);
                    atomic_store(&r->head, head + k);
                } else {
                    memcpy(x->p, r->data + at, k);
                    atomic_store(&r->tail, tail + k);
                }
                x->p += k;
                x->left -= k;
            }
            live |= x->left != 0;
        }
        if (live)
            return 0;
        if (j->after)
            j->after(j);
        c->done++;
    }
    free(j->scratch);
    free(j);
    return 1;
}

/* One replay's copy of a job in a graph. */
static void *again(void *arg)
{
    job *old = arg, *j = malloc(sizeof *j);
    *j = *old;
    j->number = j->c->posted++;
    if (old->scratch) {
        size_t n = j->bytes * (size_t)j->c->n + 1;
        j->scratch = malloc(n);
        for (int i = 0; i < j->n; i++)
            if (j->x[i].p >= old->scratch && j->x[i].p < old->scratch + n)
                j->x[i].p = j->scratch + (j->x[i].p - old->scratch);
    }
    return j;
}

static int post(job *j)
{
    typedef int (*enqueue_fn)(void *, int (*)(void *), void *, void *(*)(void *));
    enqueue_fn enqueue = (enqueue_fn)runtime("standin_enqueue");
    int (*capturing)(void *, int *) = (int (*)(void *, int *))runtime(CAPTURING), now = 0;
    if (capturing(j->stream, &now) == 0 && !now)
        j->number = j->c->posted++;         /* else its replays have numbers */
    return enqueue(j->stream, step, j, again) ? fail(DEVICE_ERROR, "the stream is no stream") : ended();
}

static int submit(job *j)
{
    if (!depth)
        return post(j);
    if (group_tail)
        group_tail->next = j;
    else
        group = j;
    group_tail = j;
    return OK;
}

API int ncclGroupStart(void) { depth++; return OK; }
API int ncclGroupEnd(void)
{
    int rc = OK;
    if (!depth)
        return fail(BAD_USAGE, "ncclGroupEnd without ncclGroupStart");
    if (--depth)
        return OK;
    ENTER();
    job *all = NULL, *j, *next;             /* sends and receives of a group go on side by side: one job */
    for (j = group; j; j = next) {
        next = j->next;
        if (j->before || j->after) {
            rc = rc && rc != IN_PROGRESS ? rc : post(j);
        } else if (!all) {
            all = j;
        } else if (all->n + j->n <= 2 * MAX_RANKS) {
            memcpy(all->x + all->n, j->x, (size_t)j->n * sizeof *j->x);
            all->n += j->n;
            free(j);
        } else {
            return fail(INTERNAL, "too many messages in a group");
        }
    }
    group = group_tail = NULL;
    return all && (!rc || rc == IN_PROGRESS) ? post(all) : rc;
}

static job *make(comm *c, const void *in, size_t in_bytes, void *out, size_t out_bytes, size_t count, int type, void *stream, int *code)
{
    int (*owner)(const void *, size_t) = (int (*)(const void *, size_t))runtime("standin_device_of");
    *code = BAD_ARGUMENT;
    if (!c || c->magic != 0xc0ffee)
        fail(*code, "comm argument is NULL or destroyed");
    else if (!size_of(type))
        fail(*code, "invalid type");
    else if (count && !in && !out)
        fail(*code, "sendbuff or recvbuff argument is NULL");
    else if ((in && owner(in, in_bytes) != c->device) || (out && owner(out, out_bytes) != c->device))
        fail(*code, "a buffer is not, or not wholly, memory of the communicator's device");
    else {
        job *j = calloc(1, sizeof *j);
        j->c = c;
        j->in = in;
        j->out = out;
        j->count = count;
        j->type = type;
        j->bytes = count * size_of(type);
        j->stream = stream;
        *code = OK;
        return j;
    }
    return NULL;
}

static void add(job *j, int peer, int sending, const void *p, size_t n)
{
    if (n)
        j->x[j->n++] = (xfer){peer, sending, (char *)p, n};
}

#include "reduce.h"

static void after_reduce(job *j) { if (j->out) reduce(j->out, j->scratch, j->count, j->type, j->op, j->c->n); }
static void own_block(job *j) { memcpy(j->scratch + (size_t)j->c->rank * j->bytes, j->in, j->bytes); }
static void own_part(job *j) { memcpy(j->scratch + (size_t)j->c->rank * j->bytes, j->in + (size_t)j->c->rank * j->bytes, j->bytes); }

/* Everybody's contribution comes into scratch, then is reduced. `part`: each rank gets its own block only. */
static int reducing(job *j, int part, int root)
{
    comm *c = j->c;
    int mine = root < 0 || root == c->rank;
    j->scratch = malloc(j->bytes * (size_t)c->n + 1);
    j->before = part ? own_part : own_block;
    j->after = after_reduce;
    if (!mine)
        j->out = NULL;
    for (int p = 0; p < c->n; p++) {
        if (p == c->rank)
            continue;
        if (root < 0 || p == root)
            add(j, p, 1, j->in + (part ? (size_t)p * j->bytes : 0), j->bytes);
        if (mine)
            add(j, p, 0, j->scratch + (size_t)p * j->bytes, j->bytes);
    }
    return submit(j);
}

#define MAKE(in, in_bytes, out, out_bytes) \
    ENTER();                               \
    int code;                              \
    job *j = make(c, in, in_bytes, out, out_bytes, count, type, stream, &code); \
    if (!j)                                \
        return code
#define CHECK_OP() do { if (op < 0 || op > 4) { free(j); return fail(BAD_ARGUMENT, "invalid reduction operation"); } j->op = op; } while (0)
#define CHECK_RANK(r) do { if ((r) < 0 || (r) >= c->n) { free(j); return fail(BAD_ARGUMENT, "invalid root or peer"); } } while (0)
#define BYTES (count * size_of(type))

API int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, comm *c, void *stream)
{
    MAKE(in, BYTES, out, BYTES);
    CHECK_OP();
    return reducing(j, 0, -1);
}
API int ncclReduce(const void *in, void *out, size_t count, int type, int op, int root, comm *c, void *stream)
{
    MAKE(in, BYTES, c && c->rank == root ? out : NULL, BYTES);
    CHECK_OP();
    CHECK_RANK(root);
    return reducing(j, 0, root);
}
API int ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, comm *c, void *stream)
{
    MAKE(in, BYTES * (size_t)(c ? c->n : 1), out, BYTES);
    CHECK_OP();
    return reducing(j, 1, -1);
}
static void place(job *j) { memmove(j->out + (size_t)j->c->rank * j->bytes, j->in, j->bytes); }
API int ncclAllGather(const void *in, void *out, size_t count, int type, comm *c, void *stream)
{
    MAKE(in, BYTES, out, BYTES * (size_t)(c ? c->n : 1));
    j->before = place;
    for (int p = 0; p < c->n; p++)
        if (p != c->rank) {
            add(j, p, 1, in, j->bytes);
            add(j, p, 0, (char *)out + (size_t)p * j->bytes, j->bytes);
        }
    if (in != (char *)out + (size_t)c->rank * j->bytes)
        return submit(j);
    j->before = NULL;
    j->after = NULL;
    return submit(j);
}
static void same(job *j) { if (j->out != j->in) memmove(j->out, j->in, j->bytes); }
API int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, comm *c, void *stream)
{
    MAKE(c && c->rank == root ? in : NULL, BYTES, out, BYTES);
    CHECK_RANK(root);
    if (c->rank == root) {
        j->in = in;
        j->before = same;
        for (int p = 0; p < c->n; p++)
            if (p != root)
                add(j, p, 1, in, j->bytes);
    } else {
        add(j, root, 0, out, j->bytes);
    }
    return submit(j);
}
__attribute__((unused)) static void own_pair(job *j)
{
    memmove(j->out + (size_t)j->c->rank * j->bytes, j->in + (size_t)j->c->rank * j->bytes, j->bytes);
}
#ifndef OLD                                     /* NCCL has it from 2.28 on, RCCL since long under another name */
#ifdef HIP
API int ncclAllToAll(const void *in, void *out, size_t count, int type, comm *c, void *stream)
#else
API int ncclAlltoAll(const void *in, void *out, size_t count, int type, comm *c, void *stream)
#endif
{
    MAKE(in, BYTES * (size_t)(c ? c->n : 1), out, BYTES * (size_t)(c ? c->n : 1));
    j->before = own_pair;
    for (int p = 0; p < c->n; p++)
        if (p != c->rank) {
            add(j, p, 1, j->in + (size_t)p * j->bytes, j->bytes);
            add(j, p, 0, j->out + (size_t)p * j->bytes, j->bytes);
        }
    return submit(j);
}
#endif
API int ncclSend(const void *in, size_t count, int type, int peer, comm *c, void *stream)
{
    MAKE(in, BYTES, NULL, 0);
    CHECK_RANK(peer);
    add(j, peer, 1, in, j->bytes);
    return submit(j);
}
API int ncclRecv(void *out, size_t count, int type, int peer, comm *c, void *stream)
{
    MAKE(NULL, 0, out, BYTES);
    CHECK_RANK(peer);
    add(j, peer, 0, out, j->bytes);
    return submit(j);
}
