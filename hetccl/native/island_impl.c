/* SPDX-License-Identifier: Apache-2.0
 * The collectives of an island. Up to ISLAND_SMALL bytes: one exchange (island_small.c). Above: steps through a ring of
 * slots that stays in the cache. In every step a rank puts what others need into its slot, folds what it owns straight
 * from the others' slots, and takes results from their slots; the three stages of different steps overlap as far as the
 * slots reach. Step k of a rank may use its slot again when all ranks have taken step k - ISLAND_SLOTS. Where ranks have
 * several threads an operation is cut into parts, and each track carries every so manieth of them.
 */
#include "island_impl.h"

#define LANE_ALIGN ((size_t)64)
#define LEAST_PART ((size_t)512 << 10)        /* bytes of a block that are worth a thread */
#define MOST_PART ((size_t)8 << 20)           /* a rank with fewer threads than others comes to the next track in time */

typedef struct island_flow {
    hetccl_island *s;
    const island_call *call;
    island_track *track;
    size_t grain, lane;                       /* elements that a lane carries in a step; bytes between lanes */
    uint32_t first, steps;                    /* number of the first step, and how many */
    void (*put)(const struct island_flow *f, uint32_t step);     /* NULL: this rank has nothing to put */
    void (*fold)(const struct island_flow *f, uint32_t step);    /* NULL: nothing is combined */
    void (*take)(const struct island_flow *f, uint32_t step);    /* NULL: this rank takes nothing */
    int source;                               /* rank that alone puts; -1: all do */
    int past;                                 /* the result is more than the caches keep, so it goes past them */
} island_flow;

static int run(const island_flow *f, size_t per_step, int lanes);
static int run_part(island_flow *f);
static void divide(island_flow *f, size_t per_step, int lanes);
static void deliver(const island_flow *f, char *to, const char *from, size_t nbytes);
static void put_parts(const island_flow *f, uint32_t step);
static void fold_part(const island_flow *f, uint32_t step);
static void take_parts(const island_flow *f, uint32_t step);
static void put_blocks(const island_flow *f, uint32_t step);
static void fold_block(const island_flow *f, uint32_t step);
static void put_own(const island_flow *f, uint32_t step);
static void take_whole(const island_flow *f, uint32_t step);
static void take_own(const island_flow *f, uint32_t step);
static void take_blocks(const island_flow *f, uint32_t step);

static inline int check(hetccl_island *s, const island_call *c, int reduces, size_t parts)
{
    int status = island_usable(s);
    if (__builtin_expect(status != HETCCL_OK, 0))
        return status;
    if (__builtin_expect(c->size == 0 || c->root < 0 || c->root >= s->n || c->count > SIZE_MAX / 2 / c->size / parts, 0))
        return HETCCL_INVALID;
    return !reduces || hetccl_can_combine(c->dtype, c->redop) ? HETCCL_OK : HETCCL_UNSUPPORTED;
}

static inline double divisor_of(const hetccl_island *s, int redop) { return redop == HETCCL_AVG ? (double)s->n : 1.0; }

int hetccl_island_all_reduce(hetccl_island *s, const void *send, void *recv, size_t count, int dtype, int redop)
{
    island_call c = {send, recv, count, hetccl_dtype_size(dtype), count, dtype, redop, 0, 1.0};
    int status = check(s, &c, 1, 1);
    if (status != HETCCL_OK || count == 0)
        return status;
    c.divisor = divisor_of(s, redop);
    if (s->n == 1)
        return hetccl_combine(&recv, 1, &send, 1, count, dtype, redop, 1.0);
    if (count * c.size <= ISLAND_SMALL)
        return island_small_all_reduce(s, &c);
    island_flow f = {.s = s, .call = &c, .put = put_parts, .fold = fold_part, .take = take_parts, .source = -1};
    return run(&f, (size_t)s->n, s->n);
}

int hetccl_island_reduce(hetccl_island *s, const void *send, void *recv, size_t count, int dtype, int redop, int root)
{
    island_call c = {send, recv, count, hetccl_dtype_size(dtype), count, dtype, redop, root, 1.0};
    int status = check(s, &c, 1, 1);
    if (status != HETCCL_OK || count == 0)
        return status;
    c.divisor = divisor_of(s, redop);
    if (s->n == 1)
        return hetccl_combine(&recv, 1, &send, 1, count, dtype, redop, 1.0);
    if (count * c.size <= ISLAND_SMALL)
        return island_small_reduce(s, &c);
    if (s->rank != root)
        c.recv = NULL;
    island_flow f = {.s = s, .call = &c, .put = put_parts, .fold = fold_part, .source = -1,
                     .take = s->rank == root ? take_parts : NULL};
    return run(&f, (size_t)s->n, s->n);
}

int hetccl_island_reduce_scatter(hetccl_island *s, const void *send, void *recv, size_t count, int dtype, int redop)
{
    island_call c = {send, recv, count, hetccl_dtype_size(dtype), count, dtype, redop, 0, 1.0};
    int status = check(s, &c, 1, s ? (size_t)s->n + 1 : 1);
    if (status != HETCCL_OK || count == 0)
        return status;
    c.divisor = divisor_of(s, redop);
    if (s->n == 1)
        return hetccl_combine(&recv, 1, &send, 1, count, dtype, redop, 1.0);
    if (count * c.size * (size_t)s->n <= ISLAND_SMALL)
        return island_small_reduce_scatter(s, &c);
    island_flow f = {.s = s, .call = &c, .put = put_blocks, .fold = fold_block, .source = -1};
    return run(&f, 1, s->n);
}

int hetccl_island_all_gather(hetccl_island *s, const void *send, void *recv, size_t count, int dtype)
{
    island_call c = {send, recv, count, hetccl_dtype_size(dtype), count, dtype, 0, 0, 1.0};
    int status = check(s, &c, 0, s ? (size_t)s->n + 1 : 1);
    if (status != HETCCL_OK || count == 0)
        return status;
    if (s->n > 1 && count * c.size <= ISLAND_SMALL)
        return island_small_all_gather(s, &c);
    island_flow f = {.s = s, .call = &c, .put = put_own, .take = take_own, .source = -1};
    return run(&f, 1, 1);
}

int hetccl_island_broadcast(hetccl_island *s, const void *send, void *recv, size_t count, int dtype, int root)
{
    island_call c = {send, recv, count, hetccl_dtype_size(dtype), count, dtype, 0, root, 1.0};
    int status = check(s, &c, 0, 1);
    if (status != HETCCL_OK || count == 0)
        return status;
    if (s->n > 1 && count * c.size <= ISLAND_SMALL)
        return island_small_broadcast(s, &c);
    island_flow f = {.s = s, .call = &c, .source = root, .put = s->rank == root ? put_own : NULL,
                     .take = s->rank == root ? NULL : take_whole};
    return run(&f, 1, 1);
}

int hetccl_island_all_to_all(hetccl_island *s, const void *send, void *recv, size_t count, int dtype)
{
    island_call c = {send, recv, count, hetccl_dtype_size(dtype), count, dtype, 0, 0, 1.0};
    int status = check(s, &c, 0, s ? (size_t)s->n + 1 : 1);
    if (status != HETCCL_OK || count == 0)
        return status;
    if (s->n > 1 && count * c.size * (size_t)s->n <= ISLAND_SMALL)
        return island_small_all_to_all(s, &c);
    island_flow f = {.s = s, .call = &c, .put = put_blocks, .take = take_blocks, .source = -1};
    return run(&f, 1, s->n);
}

int hetccl_island_barrier(hetccl_island *s)
{
    int status = island_usable(s);
    return status != HETCCL_OK ? status : island_exchange(s, NULL, 0, 0);
}

/* First rank, of all others or `source` alone, whose flag `which` (an offset) has not reached `want`; -1: none. */
static inline int missing(const island_flow *f, size_t which, uint32_t want, int source)
{
    const hetccl_island *s = f->s;
    int from = source < 0 ? 0 : source, to = source < 0 ? s->n : source + 1;
    for (int r = from; r < to; r++)
        if (r != s->rank && !island_reached((island_flag *)((char *)island_track_board(s, f->track, r) + which), want))
            return r;
    return -1;
}

typedef struct island_job {
    const island_flow *flow;
    size_t per_step;
    int lanes, parts, tracks;
    _Atomic int status;
} island_job;

static inline void *moved_on(const void *at, size_t nbytes) { return at ? (char *)(uintptr_t)at + nbytes : NULL; }

/* The parts of the tracks of one thread. Part p goes before p + 1 wherever one thread has both, on every rank, so the first
 * part that is not done is always in the hands of a thread of each rank. */
static void run_share(void *arg, int thread, int threads)
{
    island_job *j = arg;
    const island_call *all = j->flow->call;
    for (int p = 0; p < j->parts && atomic_load_explicit(&j->status, memory_order_relaxed) == HETCCL_OK; p++) {
        if (p % j->tracks % threads != thread)
            continue;
        size_t each = all->count / (size_t)j->parts & ~(LANE_ALIGN - 1), at = each * (size_t)p;
        size_t end = p + 1 == j->parts ? all->count : at + each;
        island_call c = *all;
        c.send = moved_on(all->send, at * all->size);
        c.recv = moved_on(all->recv, at * all->size);
        c.count = end - at;
        island_flow f = *j->flow;
        f.call = &c;
        f.track = &f.s->track[p % j->tracks];
        divide(&f, j->per_step, j->lanes);
        int status = run_part(&f);
        if (status != HETCCL_OK)
            atomic_store_explicit(&j->status, status, memory_order_relaxed);
    }
}

/* Runs an operation: its parts on all tracks. What ranks compute here they all compute alike. */
static int run(const island_flow *f, size_t per_step, int lanes)
{
    hetccl_island *s = f->s;
    size_t nbytes = f->call->count * f->call->size;
    island_job j = {f, per_step, lanes, 1, 1, HETCCL_OK};
    if (s->tracks == 0) {
        int most = s->threads, status = island_small_max(s, &most);
        if (status != HETCCL_OK)
            return status;
        s->tracks = most < island_tracks_of(s->n) ? most : island_tracks_of(s->n);
        if (s->tracks > 1)
            s->team = island_team_new(s->threads < s->tracks ? s->threads : s->tracks);
    }
    if (s->tracks > 1 && nbytes >= 2 * LEAST_PART) {
        size_t most = nbytes / LEAST_PART, rounds = nbytes / MOST_PART / (size_t)s->tracks + 1;
        j.tracks = most < (size_t)s->tracks ? (int)most : s->tracks;
        j.parts = (int)rounds * j.tracks;
    }
    if (j.parts == 1)
        run_share(&j, 0, 1);
    else
        island_team_run(s->team, run_share, &j);
    return j.status == HETCCL_OK ? island_finished(s) : j.status;
}

/* Runs a flow on its track. What waits is always this rank's earliest unfinished stage; the earliest of all ranks together is never
 * blocked, so some rank always moves. Blocks as hetccl_island_idle does. */
static int run_part(island_flow *f)
{
    hetccl_island *s = f->s;
    const size_t sent = offsetof(island_board, sent), done = offsetof(island_board, done);
    const size_t taken = offsetof(island_board, taken);
    const size_t ready = f->fold ? done : sent;                /* what a take waits for */
    island_board *mine = island_track_board(s, f->track, s->rank);
    uint32_t put = 0, folded = 0, out = 0, first = f->track->steps;
    island_wait w = {0, 0};
    f->first = first;
    while (out < f->steps) {
        int moved = 0, lacking_room = -1, lacking_sent = -1, lacking_ready = -1;
        if (put < f->steps && put - out < ISLAND_SLOTS) {      /* this rank's own take must be over, too */
            lacking_room = missing(f, taken, first + put + 1 - ISLAND_SLOTS, -1);
            if (lacking_room < 0) {
                if (f->put) {
                    f->put(f, put);
                    island_post(&mine->sent, first + put + 1);
                }
                put++;
                moved = 1;
            }
        }
        if (f->fold && folded < put) {
            lacking_sent = missing(f, sent, first + folded + 1, f->source);
            if (lacking_sent < 0) {
                f->fold(f, folded);
                island_post(&mine->done, first + folded + 1);
                folded++;
                moved = 1;
            }
        }
        if (out < (f->fold ? folded : put)) {
            lacking_ready = f->take ? missing(f, ready, first + out + 1, f->source) : -1;
            if (lacking_ready < 0) {
                if (f->take)
                    f->take(f, out);
                island_post(&mine->taken, first + out + 1);
                out++;
                moved = 1;
            }
        }
        if (moved) {
            w = (island_wait){0, 0};
            continue;
        }
        int peer = lacking_ready >= 0 ? lacking_ready : lacking_sent >= 0 ? lacking_sent : lacking_room;
        size_t which = lacking_ready >= 0 ? ready : lacking_sent >= 0 ? sent : taken;
        uint32_t want = first + (lacking_ready >= 0 ? out + 1 : lacking_sent >= 0 ? folded + 1 : put + 1 - ISLAND_SLOTS);
        island_flag *flag = (island_flag *)((char *)island_track_board(s, f->track, peer) + which);
        int status = hetccl_island_idle(s, &w, flag, want, peer);
        if (status != HETCCL_OK)
            return status;
    }
    f->track->steps += f->steps;
    return HETCCL_OK;
}

/* Sets grain, lane and steps: a slot has `lanes` lanes, and a step moves `per_step` grains of the call's count. */
static void divide(island_flow *f, size_t per_step, int lanes)
{
    size_t size = f->call->size;
    size_t blocks = f->take == take_own || f->take == take_blocks ? (size_t)f->s->n : 1;
    f->past = hetccl_outgrows_caches(f->call->stride * size * blocks, f->s->sharers);
    f->lane = ISLAND_SLOT / (size_t)lanes / LANE_ALIGN * LANE_ALIGN;
    f->grain = f->lane / size;
    f->steps = (uint32_t)((f->call->count + f->grain * per_step - 1) / (f->grain * per_step));
}

/* A piece of the result, which this call does not read again. */
static void deliver(const island_flow *f, char *to, const char *from, size_t nbytes)
{
    if (f->past)
        hetccl_copy_past(to, from, nbytes);
    else
        memcpy(to, from, nbytes);
}

/* Part `lane` of a step of all_reduce or reduce: the block of this step, cut into one part an owner. Elements, from `*at`. */
static inline size_t part(const island_flow *f, uint32_t step, int lane, size_t *at)
{
    size_t n = (size_t)f->s->n, start = (size_t)step * n * f->grain, rest = f->call->count - start, each = f->grain;
    if (rest < n * each) {
        size_t unit = LANE_ALIGN / f->call->size;
        each = ((rest + n - 1) / n + unit - 1) / unit * unit;
    }
    size_t skip = (size_t)lane * each;
    *at = start + (skip < rest ? skip : rest);
    return skip >= rest ? 0 : rest - skip < each ? rest - skip : each;
}

/* The same for blocks of `count` elements, of which every step moves `grain`. */
static inline size_t piece(const island_flow *f, uint32_t step, size_t *at)
{
    *at = (size_t)step * f->grain;
    return f->call->count - *at < f->grain ? f->call->count - *at : f->grain;
}

static inline char *lane_of(const island_flow *f, int rank, uint32_t step, int lane)
{
    return island_slot_of(f->s, f->track, rank, f->first + step) + (size_t)lane * f->lane;
}

/* Where an owner leaves its result: over the contribution of the rank after it, whose cache lines it holds anyway. */
static inline char *result_of(const island_flow *f, int owner, uint32_t step)
{
    return lane_of(f, (owner + 1) % f->s->n, step, owner);
}

/* Lane j of my slot: my contribution to what j owns. */
static void put_parts(const island_flow *f, uint32_t step)
{
    for (int j = 0; j < f->s->n; j++) {
        size_t at, n = part(f, step, j, &at);
        if (j != f->s->rank && n)
            memcpy(lane_of(f, f->s->rank, step, j), (const char *)f->call->send + at * f->call->size, n * f->call->size);
    }
}

static inline void fold_into(const island_flow *f, uint32_t step, void *const *dst, int n_dst, const char *own, size_t n)
{
    const void *src[HETCCL_ISLAND_RANKS_MAX];
    for (int r = 0; r < f->s->n; r++)
        src[r] = r == f->s->rank ? own : lane_of(f, r, step, f->s->rank);
    hetccl_combine(dst, n_dst, src, f->s->n, n, f->call->dtype, f->call->redop, f->call->divisor);
}

static void fold_part(const island_flow *f, uint32_t step)
{
    size_t at, n = part(f, step, f->s->rank, &at);
    char *result = result_of(f, f->s->rank, step);
    char *recv = f->call->recv ? (char *)f->call->recv + at * f->call->size : NULL;
    void *dst[2] = {recv ? recv : result, result};
    fold_into(f, step, dst, recv ? 2 : 1, (const char *)f->call->send + at * f->call->size, n);
}

static void take_parts(const island_flow *f, uint32_t step)
{
    for (int j = 0; j < f->s->n; j++) {
        size_t at, n = part(f, step, j, &at);
        if (j != f->s->rank && n)
            deliver(f, (char *)f->call->recv + at * f->call->size, result_of(f, j, step), n * f->call->size);
    }
}

/* reduce_scatter and all_to_all: lane j holds a piece of block j. all_to_all moves its own block here, too. */
static void put_blocks(const island_flow *f, uint32_t step)
{
    size_t at, n = piece(f, step, &at), size = f->call->size;
    for (int j = 0; j < f->s->n; j++) {
        const char *from = (const char *)f->call->send + ((size_t)j * f->call->stride + at) * size;
        if (j != f->s->rank)
            memcpy(lane_of(f, f->s->rank, step, j), from, n * size);
        else if (f->take && f->call->recv != f->call->send)
            deliver(f, (char *)f->call->recv + ((size_t)j * f->call->stride + at) * size, from, n * size);
    }
}

static void fold_block(const island_flow *f, uint32_t step)
{
    size_t at, n = piece(f, step, &at), size = f->call->size;
    void *dst = (char *)f->call->recv + at * size;
    fold_into(f, step, &dst, 1, (const char *)f->call->send + ((size_t)f->s->rank * f->call->stride + at) * size, n);
}

static void take_blocks(const island_flow *f, uint32_t step)
{
    size_t at, n = piece(f, step, &at), size = f->call->size;
    for (int j = 0; j < f->s->n; j++)
        if (j != f->s->rank)
            deliver(f, (char *)f->call->recv + ((size_t)j * f->call->stride + at) * size,
                    lane_of(f, j, step, f->s->rank), n * size);
}

/* all_gather and broadcast: one lane with a piece of my buffer, which goes to its place in my own result at once. */
static void put_own(const island_flow *f, uint32_t step)
{
    size_t at, n = piece(f, step, &at), size = f->call->size;
    const char *from = (const char *)f->call->send + at * size;
    char *to = (char *)f->call->recv + ((f->source < 0 ? (size_t)f->s->rank * f->call->stride : 0) + at) * size;
    if (f->s->n > 1)
        memcpy(lane_of(f, f->s->rank, step, 0), from, n * size);
    if (to != from)
        deliver(f, to, from, n * size);
}

static void take_own(const island_flow *f, uint32_t step)
{
    size_t at, n = piece(f, step, &at), size = f->call->size;
    for (int j = 0; j < f->s->n; j++)
        if (j != f->s->rank)
            deliver(f, (char *)f->call->recv + ((size_t)j * f->call->stride + at) * size, lane_of(f, j, step, 0), n * size);
}

static void take_whole(const island_flow *f, uint32_t step)
{
    size_t at, n = piece(f, step, &at), size = f->call->size;
    deliver(f, (char *)f->call->recv + at * size, lane_of(f, f->source, step, 0), n * size);
}
