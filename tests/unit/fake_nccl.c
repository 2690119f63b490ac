/* SPDX-License-Identifier: Apache-2.0
 * A library of NCCL's shape that does no work: it records what it was asked, and answers what the test has set.
 * Compiled with -DPREFIX=..., -DID_BYTES=... or -DID_POINTER, -DRANKS=..., -DALL_TO_ALL=name, -DNO_ABORT, ...
 */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define CALL(name) JOIN(PREFIX, name)

#ifdef ID_POINTER
typedef const unsigned char *id_t_;
#define ID_AT(id) (id)
#else
typedef struct { unsigned char bytes[ID_BYTES]; } id_t_;
#define ID_AT(id) ((id).bytes)
#endif

struct record {
    const void *send;
    void *recv;
    size_t count, ranks;
    int dtype, redop, peer, rank, calls, sends, recvs, inits, destroys, finalizes, aborts, groups, config;
    void *comm, *stream;
    int id_first, id_last, overlap;
} fake;
int fake_code, fake_async, fake_async_left, fake_init_code, fake_sleep_us;
atomic_int fake_hold, fake_inside;

static int done(void)
{
    int code = fake_code;
    if (atomic_fetch_add(&fake_inside, 1) > 0)
        fake.overlap = 1;
    if (fake_sleep_us)
        usleep(fake_sleep_us);
    atomic_fetch_sub(&fake_inside, 1);
    fake.calls++;
    fake_code = 0;
    return code;
}

#define NOTE(field) fake.field = field
int CALL(AllReduce)(const void *send, void *recv, size_t count, int dtype, int redop, void *comm, void *stream)
{
    NOTE(send), NOTE(recv), NOTE(count), NOTE(dtype), NOTE(redop), NOTE(comm), NOTE(stream);
    return done();
}
int CALL(ReduceScatter)(const void *send, void *recv, size_t count, int dtype, int redop, void *comm, void *stream)
{
    NOTE(send), NOTE(recv), NOTE(count), NOTE(dtype), NOTE(redop), NOTE(comm), NOTE(stream);
    return done();
}
int CALL(Reduce)(const void *send, void *recv, size_t count, int dtype, int redop, int peer, void *comm, void *stream)
{
    NOTE(send), NOTE(recv), NOTE(count), NOTE(dtype), NOTE(redop), NOTE(peer), NOTE(comm), NOTE(stream);
    return done();
}
int CALL(AllGather)(const void *send, void *recv, size_t count, int dtype, void *comm, void *stream)
{
    NOTE(send), NOTE(recv), NOTE(count), NOTE(dtype), NOTE(comm), NOTE(stream);
    return done();
}
#ifdef ALL_TO_ALL
int ALL_TO_ALL(const void *send, void *recv, size_t count, int dtype, void *comm, void *stream)
{
    NOTE(send), NOTE(recv), NOTE(count), NOTE(dtype), NOTE(comm), NOTE(stream);
    return done();
}
#endif
#ifndef NO_BROADCAST
int CALL(Broadcast)(const void *send, void *recv, size_t count, int dtype, int peer, void *comm, void *stream)
{
    NOTE(send), NOTE(recv), NOTE(count), NOTE(dtype), NOTE(peer), NOTE(comm), NOTE(stream);
    return done();
}
#endif
int CALL(Send)(const void *send, size_t count, int dtype, int peer, void *comm, void *stream)
{
    NOTE(send), NOTE(count), NOTE(dtype), NOTE(peer), NOTE(comm), NOTE(stream);
    fake.sends++;
    return done();
}
int CALL(Recv)(void *recv, size_t count, int dtype, int peer, void *comm, void *stream)
{
    NOTE(recv), NOTE(count), NOTE(dtype), NOTE(peer), NOTE(comm), NOTE(stream);
    fake.recvs++;
    return done();
}
int CALL(GroupStart)(void) { fake.groups++; return 0; }
int CALL(GroupEnd)(void) { return done(); }

static int join(void **comm, size_t ranks, const unsigned char *id, int rank, const int *config)
{
    NOTE(ranks), NOTE(rank);
    fake.id_first = id[0];
    fake.id_last = id[ID_BYTES - 1];
    fake.config = config ? *config : 0;
    while (atomic_load(&fake_hold))
        usleep(1000);
    *comm = &fake;
    fake.inits++;
    return fake_init_code;
}
int CALL(CommInitRank)(void **comm, RANKS ranks, id_t_ id, int rank)
{
    return join(comm, ranks, ID_AT(id), rank, NULL);
}
int CALL(CommInitRankConfig)(void **comm, RANKS ranks, id_t_ id, int rank, void *config)
{
    return join(comm, ranks, ID_AT(id), rank, config);
}
int CALL(GetUniqueId)(void *id) { memset(id, 7, ID_BYTES); return 0; }
int CALL(CommFinalize)(void *comm) { fake.finalizes++; return 0; }
int CALL(CommDestroy)(void *comm) { fake.destroys++; return 0; }
#ifndef NO_ABORT
int CALL(CommAbort)(void *comm) { fake.aborts++; return 0; }
#endif
#ifndef NO_ASYNC
int CALL(CommGetAsyncError)(void *comm, int *state)
{
    *state = fake_async;
    if (fake_async_left > 0 && --fake_async_left == 0)
        fake_async = 0;
    return 0;
}
#endif
int CALL(GetVersion)(int *version) { *version = 12345; return 0; }
const char *CALL(GetErrorString)(int code) { return code == 3 ? "it broke" : "some error"; }
const char *CALL(GetLastError)(void *comm) { return comm == &fake ? "cable unplugged" : "no communicator"; }
