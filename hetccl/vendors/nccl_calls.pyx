# SPDX-License-Identifier: Apache-2.0
"""The functions of the ccl table of NCCL-shaped libraries. nccl_shaped fills in what they work on.

A call through the table adds a few nanoseconds to the library's own: a look at the type and operator, and the order of
arguments. Nothing here allocates, locks or takes the GIL per call, but for libraries that allow one call at a time (a
lock) and a reduce whose rank gave no receive buffer to a library that needs one (a scratch buffer that only grows).
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy
from posix.unistd cimport getpid, usleep

from hetccl.spi cimport *

cdef extern from *:
    """
    /* The communicator that this thread used last: group_end has no argument, but may have to wait for it. */
    static _Thread_local hetccl_nccl_comm *hetccl_nccl_last __attribute__((tls_model("initial-exec")));
    /* last_error is asked by the thread that failed. */
    static _Thread_local char hetccl_nccl_text[1024];
    """
    hetccl_nccl_comm *hetccl_nccl_last
    char *hetccl_nccl_text
    const char *ABORTED "\"the communicator was aborted\""

ctypedef hetccl_nccl_library Lib
ctypedef hetccl_nccl_comm Comm


cdef int nccl_fill_table(Lib *l) except -1:
    """Calls that the library lacks stay NULL, and their bits of caps go."""
    cdef hetccl_ccl_ops *ops = &l.ops
    cdef bint grouped = l.group_start != NULL and l.group_end != NULL
    ops.version = HETCCL_SPI_VERSION
    ops.size = sizeof(hetccl_ccl_ops)
    ops.last_error = last_error
    ops.unique_id = unique_id
    ops.init_post = init_post
    ops.init_test = init_test
    ops.all_reduce = all_reduce
    ops.reduce_scatter = reduce_scatter
    ops.all_gather = all_gather
    ops.broadcast = broadcast
    ops.destroy = destroy
    if l.reduce != NULL:
        ops.reduce = reduce
    if l.send != NULL and l.recv != NULL:
        ops.send = send
        ops.recv = recv
    if l.all_to_all != NULL:
        ops.all_to_all = all_to_all
    elif grouped and l.send != NULL and l.recv != NULL:
        ops.all_to_all = all_to_all_by_sends
    if grouped and ops.caps & HETCCL_CCL_GROUP:
        ops.group_start = group_start
        ops.group_end = group_end
    else:
        ops.caps &= ~<uint64_t>HETCCL_CCL_GROUP
    if l.async_error != NULL:
        ops.async_error = async_error
    if l.abort != NULL and ops.caps & HETCCL_CCL_ABORT:
        ops.abort = abort
    else:
        ops.caps &= ~<uint64_t>HETCCL_CCL_ABORT
        l.abort = NULL
    l.table.ops = ops
    l.table.ctx = l
    return 0


cdef int all_reduce(void *ctx, const hetccl_ccl_args *a) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>a.comm
    cdef int rc = enter(l, c, a, REDUCES)
    if rc != GO:
        return rc
    return leave(l, c, l.all_reduce(a.send, a.recv, a.count * l.elements_of[a.dtype], l.dtype_of[a.dtype],
                                    l.redop_of[a.redop], c.handle, stream_of(l, a)), "AllReduce")


cdef int reduce_scatter(void *ctx, const hetccl_ccl_args *a) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>a.comm
    cdef int rc = enter(l, c, a, REDUCES)
    if rc != GO:
        return rc
    return leave(l, c, l.reduce_scatter(a.send, a.recv, a.count * l.elements_of[a.dtype], l.dtype_of[a.dtype],
                                        l.redop_of[a.redop], c.handle, stream_of(l, a)), "ReduceScatter")


cdef int reduce(void *ctx, const hetccl_ccl_args *a) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>a.comm
    cdef void *recv = a.recv
    cdef int rc
    if l.recv_on_all_ranks and recv == NULL and a.peer != c.rank:
        recv = scratch(c, a.count * l.item_bytes[a.dtype & 31])
        if recv == NULL:
            return explain(HETCCL_NO_MEMORY, "Reduce: no memory for a receive buffer on a rank that is not the root")
    rc = enter(l, c, a, REDUCES | HAS_PEER)
    if rc != GO:
        return rc
    return leave(l, c, l.reduce(a.send, recv, a.count * l.elements_of[a.dtype], l.dtype_of[a.dtype],
                                l.redop_of[a.redop], a.peer, c.handle, stream_of(l, a)), "Reduce")


cdef int all_gather(void *ctx, const hetccl_ccl_args *a) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>a.comm
    cdef int rc = enter(l, c, a, MOVES)
    if rc != GO:
        return rc
    return leave(l, c, l.all_gather(a.send, a.recv, a.count * l.elements_of[a.dtype], l.dtype_of[a.dtype], c.handle,
                                    stream_of(l, a)), "AllGather")


cdef int broadcast(void *ctx, const hetccl_ccl_args *a) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>a.comm
    cdef int rc = enter(l, c, a, MOVES | HAS_PEER)
    if rc != GO:
        return rc
    return leave(l, c, l.broadcast(a.send, a.recv, a.count * l.elements_of[a.dtype], l.dtype_of[a.dtype], a.peer,
                                   c.handle, stream_of(l, a)), "Broadcast")


cdef int all_to_all(void *ctx, const hetccl_ccl_args *a) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>a.comm
    cdef int rc = enter(l, c, a, MOVES)
    if rc != GO:
        return rc
    return leave(l, c, l.all_to_all(a.send, a.recv, a.count * l.elements_of[a.dtype], l.dtype_of[a.dtype], c.handle,
                                    stream_of(l, a)), "AllToAll")


cdef int all_to_all_by_sends(void *ctx, const hetccl_ccl_args *a) noexcept nogil:
    """For libraries without AllToAll: a group of sends and receives."""
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>a.comm
    cdef size_t n = a.count * l.elements_of[a.dtype & 31]
    cdef size_t nbytes = a.count * l.item_bytes[a.dtype & 31]
    cdef const char *send = <const char *>a.send
    cdef char *recv = <char *>a.recv
    cdef int rc = enter(l, c, a, MOVES)
    cdef int closed, peer
    if rc != GO:
        return rc
    rc = l.group_start()
    if rc != 0:
        return leave(l, c, rc, "GroupStart")
    for peer in range(c.n_ranks):
        rc = l.send(send + peer * nbytes, n, l.dtype_of[a.dtype], peer, c.handle, stream_of(l, a))
        if rc == 0 or code_status(l, rc) == HETCCL_IN_PROGRESS:
            rc = l.recv(recv + peer * nbytes, n, l.dtype_of[a.dtype], peer, c.handle, stream_of(l, a))
        if rc != 0 and code_status(l, rc) != HETCCL_IN_PROGRESS:
            break
    closed = l.group_end()
    return leave(l, c, closed if rc == 0 else rc, "AllToAll by sends")


cdef int send(void *ctx, const hetccl_ccl_args *a) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>a.comm
    cdef int rc = enter(l, c, a, MOVES | HAS_PEER)
    if rc != GO:
        return rc
    return leave(l, c, l.send(a.send, a.count * l.elements_of[a.dtype], l.dtype_of[a.dtype], a.peer, c.handle,
                              stream_of(l, a)), "Send")


cdef int recv(void *ctx, const hetccl_ccl_args *a) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>a.comm
    cdef int rc = enter(l, c, a, MOVES | HAS_PEER)
    if rc != GO:
        return rc
    return leave(l, c, l.recv(a.recv, a.count * l.elements_of[a.dtype], l.dtype_of[a.dtype], a.peer, c.handle,
                              stream_of(l, a)), "Recv")


cdef int group_start(void *ctx) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    global hetccl_nccl_last
    hetccl_nccl_last = NULL
    return settle(l, NULL, l.group_start(), "GroupStart")


cdef int group_end(void *ctx) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = hetccl_nccl_last
    if c != NULL and c.library != l:
        c = NULL
    return settle(l, c, l.group_end(), "GroupEnd")


cdef const char *last_error(void *ctx) noexcept nogil:
    return hetccl_nccl_text


cdef int unique_id(void *ctx, void *id, uint32_t *id_len) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef int rc
    if id_len[0] < l.id_len:
        return explain(HETCCL_INVALID, "GetUniqueId: the buffer for the id is too small")
    rc = l.unique_id(id)
    if rc == 0:
        id_len[0] = l.id_len
    return settle(l, NULL, rc, "GetUniqueId")


cdef int init_post(void *ctx, const hetccl_ccl_init_args *a, void **comm) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c
    cdef int rc
    comm[0] = NULL
    if a.id_len != l.id_len:
        return explain(HETCCL_INVALID, "CommInitRank: the id has another length than this library's ids have")
    if a.n_ranks < 1 or a.rank < 0 or a.rank >= a.n_ranks:
        return explain(HETCCL_INVALID, "CommInitRank: rank must be from 0 to the number of ranks - 1")
    c = <Comm *>calloc(1, sizeof(Comm))
    if c == NULL:
        return explain(HETCCL_NO_MEMORY, "CommInitRank: no memory")
    c.library = l
    c.rank = a.rank
    c.n_ranks = a.n_ranks
    c.pid = getpid()
    c.timeout_s = a.timeout_s
    memcpy(c.id, a.id, a.id_len)
    comm[0] = c
    if l.init_in_thread:
        if hetccl_nccl_thread(join_body, c) == 0:
            return HETCCL_OK
        rc = explain(HETCCL_SYSTEM, "CommInitRank: cannot start a thread")
    else:
        c.code = hetccl_nccl_init(l, c)
        rc = HETCCL_OK if c.code == 0 else code_status(l, c.code)
        if rc == HETCCL_OK:
            atomic_store(&c.state, HETCCL_NCCL_READY)
        if rc == HETCCL_OK or rc == HETCCL_IN_PROGRESS:
            return HETCCL_OK
        rc = settle(l, NULL, c.code, "CommInitRank")
    comm[0] = NULL
    free(c)
    return rc


cdef int init_test(void *ctx, void *comm) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>comm
    cdef int state = atomic_load(&c.state)
    cdef int code = 0
    cdef int rc
    if state == HETCCL_NCCL_READY:
        return HETCCL_OK
    if state == HETCCL_NCCL_FAILED:
        return settle(l, c, c.code, "CommInitRank")
    if l.init_in_thread or l.async_error == NULL:
        return HETCCL_IN_PROGRESS
    rc = l.async_error(c.handle, &code)
    if rc != 0:
        code = rc
    if code == 0:
        atomic_store(&c.state, HETCCL_NCCL_READY)
        return HETCCL_OK
    if code_status(l, code) == HETCCL_IN_PROGRESS:
        return HETCCL_IN_PROGRESS
    return settle(l, c, code, "CommInitRank")


cdef int async_error(void *ctx, void *comm) noexcept nogil:
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>comm
    cdef int code = 0
    cdef int rc
    if atomic_load(&c.aborting):
        return explain(HETCCL_ABORTED, ABORTED)
    rc = l.async_error(c.handle, &code)
    if rc != 0:
        code = rc
    if code == 0 or code_status(l, code) == HETCCL_IN_PROGRESS:
        return HETCCL_OK
    return failed(l, c, code, "CommGetAsyncError")


cdef int abort(void *ctx, void *comm) noexcept nogil:
    cdef Comm *c = <Comm *>comm
    if not atomic_exchange(&c.aborting, 1):
        hetccl_nccl_abort(c)
    return HETCCL_OK


cdef int destroy(void *ctx, void *comm) noexcept nogil:
    """May block in the library until the other ranks of the host leave, too."""
    cdef Lib *l = <Lib *>ctx
    cdef Comm *c = <Comm *>comm
    cdef int state, rc = HETCCL_OK
    if c.pid == getpid():
        if atomic_load(&c.aborting):
            hetccl_nccl_await_abort(c)
        state = atomic_exchange(&c.state, HETCCL_NCCL_LEFT)
        if state == HETCCL_NCCL_JOINING and l.init_in_thread:
            return HETCCL_OK                # join_body frees it, should it ever return
        if c.handle != NULL and not atomic_load(&c.aborting):
            if state == HETCCL_NCCL_JOINING and l.abort != NULL:
                rc = settle(l, NULL, l.abort(c.handle), "CommAbort")
            else:
                rc = close_comm(l, c)
    free(c.scratch)
    free(c)
    return rc


cdef enum:
    GO = -1                                 # no status: make the library's call
    MOVES = 1
    REDUCES = 2
    HAS_PEER = 4

cdef inline int enter(Lib *l, Comm *c, const hetccl_ccl_args *a, int kind) noexcept nogil:
    """GO, with the lock held if there is one, or the status to return at once. `kind` is known to the compiler."""
    if kind & MOVES and not l.ops.move_mask >> (a.dtype & 31) & 1:
        return refuse(l, a, "move")
    if kind & REDUCES and not l.ops.reduce_mask[a.dtype & 31] >> (a.redop & 31) & 1:
        return refuse(l, a, "reduce")
    if kind & HAS_PEER and not 0 <= a.peer < c.n_ranks:
        return explain(HETCCL_INVALID, "root or peer is no rank of the communicator")
    if a.count == 0:
        return HETCCL_OK                    # the same on all ranks, and some libraries fail on it
    if atomic_load(&c.aborting):
        return explain(HETCCL_ABORTED, ABORTED)
    if l.one_at_a_time and hetccl_nccl_lock(l, c.timeout_s) != 0:
        return explain(HETCCL_TIMED_OUT, "the library makes one call at a time, and another one of this process has "
                                         "not returned: has a rank died in it, or do ranks call in different orders?")
    return GO


cdef inline int leave(Lib *l, Comm *c, int code, const char *call) noexcept nogil:
    global hetccl_nccl_last
    if l.one_at_a_time:
        pthread_mutex_unlock(&l.lock)
    hetccl_nccl_last = c
    return HETCCL_OK if code == 0 else settle(l, c, code, call)


cdef inline void *stream_of(Lib *l, const hetccl_ccl_args *a) noexcept nogil:
    return a.stream if l.streams else NULL


cdef inline int code_status(Lib *l, int code) noexcept nogil:
    return l.status_of[code] if 0 <= code < HETCCL_NCCL_CODES else <int>HETCCL_VENDOR


cdef int settle(Lib *l, Comm *c, int code, const char *call) noexcept nogil:
    """The status of a code. "In progress" of a non-blocking communicator is waited for, up to its timeout."""
    cdef double waited = 0
    cdef int rc
    while code != 0:
        if code_status(l, code) != HETCCL_IN_PROGRESS:
            return failed(l, c, code, call)
        if c == NULL or l.async_error == NULL:
            return HETCCL_IN_PROGRESS
        atomic_store(&c.polling, 1)
        if atomic_load(&c.aborting):
            atomic_store(&c.polling, 0)
            return explain(HETCCL_ABORTED, ABORTED)
        rc = l.async_error(c.handle, &code)
        atomic_store(&c.polling, 0)
        if rc != 0:
            code = rc
        elif code != 0:
            if waited > c.timeout_s:
                return explain(HETCCL_TIMED_OUT, "the library has been saying 'in progress' until the deadline")
            usleep(20)
            waited += 80e-6
    return HETCCL_OK


cdef int close_comm(Lib *l, Comm *c) noexcept nogil:
    cdef int rc = HETCCL_OK
    if l.one_at_a_time and hetccl_nccl_lock(l, 5) != 0:
        return explain(HETCCL_TIMED_OUT, "CommDestroy: a call on another communicator of this process is stuck")
    if l.finalize != NULL:
        rc = settle(l, c, l.finalize(c.handle), "CommFinalize")
    if rc == HETCCL_OK:
        rc = settle(l, NULL, l.destroy(c.handle), "CommDestroy")
    if l.one_at_a_time:
        pthread_mutex_unlock(&l.lock)
    return rc


cdef void *join_body(void *arg) noexcept nogil:
    """Thread of init_post: joins, and frees a communicator that nobody waits for any more."""
    cdef Comm *c = <Comm *>arg
    cdef int joining = HETCCL_NCCL_JOINING
    c.code = hetccl_nccl_init(c.library, c)
    if not atomic_compare_exchange_strong(&c.state, &joining,
                                          HETCCL_NCCL_READY if c.code == 0 else HETCCL_NCCL_FAILED):
        free(c)
    return NULL


cdef void *scratch(Comm *c, size_t nbytes) noexcept nogil:
    if nbytes > c.scratch_bytes or c.scratch == NULL:
        free(c.scratch)
        c.scratch_bytes = 0
        c.scratch = malloc(nbytes + nbytes // 4 + 64)
        if c.scratch != NULL:
            c.scratch_bytes = nbytes + nbytes // 4 + 64
    return c.scratch


cdef int failed(Lib *l, Comm *c, int code, const char *call) noexcept nogil:
    """Writes the library's own account of a failure; returns its status."""
    cdef const char *name = ""
    cdef const char *text = NULL
    cdef const char *more = NULL
    cdef int status = code_status(l, code)
    if 0 <= code < HETCCL_NCCL_CODES:
        name = <const char *>l.name_of[code]
    if l.code_text != NULL:
        text = l.code_text(code)
    if l.last_text != NULL:
        more = l.last_text(NULL if c == NULL or atomic_load(&c.aborting) else c.handle)
    if text == NULL:
        text = "no text"
    if more == NULL or more[0] == 0:
        more = "the library says no more"
    snprintf(hetccl_nccl_text, 1024, "%s%s: %s (code %d %s); %s", l.prefix, call, text, code, name, more)
    return status if status != HETCCL_OK else <int>HETCCL_VENDOR


cdef int explain(int status, const char *text) noexcept nogil:
    snprintf(hetccl_nccl_text, 1024, "%s", text)
    return status


cdef int refuse(Lib *l, const hetccl_ccl_args *a, const char *verb) noexcept nogil:
    snprintf(hetccl_nccl_text, 1024, "%s does not %s element type %d (operator %d)", l.prefix, verb, a.dtype, a.redop)
    return HETCCL_UNSUPPORTED
