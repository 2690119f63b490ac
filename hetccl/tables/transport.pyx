# SPDX-License-Identifier: Apache-2.0
"""Wrapper of `hetccl_transport_ops`."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from hetccl.spi cimport *
from hetccl.tables.common cimport check_head, table_in, text_of

from hetccl import errors
from hetccl.tables.common import raise_for_status

cdef extern from "normalize.h" nogil:
    int hetccl_normalize_transport(hetccl_transport_ops *out, const hetccl_transport_ops *table)


@cython.final
cdef class TransportTable:
    """Moves messages over endpoints (addresses from `Link.endpoint`). Nothing here blocks.

    Where a method takes `data`, that is a bytes-like object, or an address together with `nbytes`.
    """

    def __cinit__(self, table):
        cdef hetccl_table *found = table_in(table, HETCCL_TRANSPORT_CAPSULE)
        cdef const hetccl_transport_ops *ops = <const hetccl_transport_ops *>found.ops
        check_head(hetccl_normalize_transport(&self.ops, ops), "transport", ops.version, ops.size)
        self.ctx = found.ctx
        self.owner = table

    @property
    def caps(self):
        """Bits HETCCL_TRANSPORT_* of spi.h."""
        return self.ops.caps

    @property
    def max_message(self):
        """Largest message in bytes."""
        return self.ops.max_message

    @property
    def slots(self):
        """True if reserve, commit, peek and release work in memory that the peer sees."""
        return bool(self.ops.caps & HETCCL_TRANSPORT_SLOTS)

    def last_error(self):
        """Text of this thread's last failure."""
        return text_of(self.ops.last_error(self.ctx))

    def send(self, uintptr_t ep, data, int channel=0, uint32_t fingerprint=0, nbytes=None):
        """True when the message is handed over; False: call again with the same arguments."""
        return self._whole(True, ep, data, channel, fingerprint, nbytes)

    def recv(self, uintptr_t ep, data, int channel=0, uint32_t fingerprint=0, nbytes=None):
        """True when the message lies in `data`; False: call again. `MismatchError` if another one was sent."""
        return self._whole(False, ep, data, channel, fingerprint, nbytes)

    def _whole(self, bint sending, uintptr_t ep, data, int channel, uint32_t fingerprint, nbytes):
        cdef hetccl_message m
        cdef Py_buffer view
        cdef int status
        cdef bint viewed = not isinstance(data, int)
        _message(&m, channel, fingerprint)
        if viewed:
            PyObject_GetBuffer(data, &view, PyBUF_SIMPLE if sending else PyBUF_WRITABLE)
            m.ptr = view.buf
            m.nbytes = <size_t>view.len
        elif nbytes is None:
            raise errors.UsageError("an address needs nbytes beside it")
        else:
            m.ptr = <void *><uintptr_t>data
        try:
            if nbytes is not None:
                if viewed and <size_t>nbytes > m.nbytes:
                    raise errors.UsageError(f"nbytes is {nbytes}, but the buffer has {m.nbytes}")
                m.nbytes = nbytes
            with nogil:
                if sending:
                    status = self.ops.send(self.ctx, <void *>ep, &m)
                else:
                    status = self.ops.recv(self.ctx, <void *>ep, &m)
        finally:
            if viewed:
                PyBuffer_Release(&view)
        return self.check(status, "send" if sending else "recv") == HETCCL_OK

    def reserve(self, uintptr_t ep, int channel, size_t nbytes):
        """Address of room for `nbytes` in the outgoing stream, or None if there is none now."""
        cdef hetccl_message m
        _message(&m, channel, 0)
        m.nbytes = nbytes
        if self.check(self.ops.reserve(self.ctx, <void *>ep, &m), "reserve") == HETCCL_IN_PROGRESS:
            return None
        return <uintptr_t>m.ptr

    def commit(self, uintptr_t ep, int channel, size_t nbytes, uint32_t fingerprint=0):
        """Hands the oldest reserved message over."""
        cdef hetccl_message m
        _message(&m, channel, fingerprint)
        m.nbytes = nbytes
        return self.check(self.ops.commit(self.ctx, <void *>ep, &m), "commit") == HETCCL_OK

    def peek(self, uintptr_t ep, int channel, uint32_t index=0, size_t nbytes=0, uint32_t fingerprint=0):
        """(address, nbytes) of the `index`-th unreleased incoming message, or None. `nbytes` 0 accepts any length."""
        cdef hetccl_message m
        _message(&m, channel, fingerprint)
        m.nbytes = nbytes
        if self.check(self.ops.peek(self.ctx, <void *>ep, &m, index), "peek") == HETCCL_IN_PROGRESS:
            return None
        return <uintptr_t>m.ptr, m.nbytes

    def release(self, uintptr_t ep, int channel):
        """Frees the oldest incoming message."""
        self.check(self.ops.release(self.ctx, <void *>ep, channel), "release")

    def answer(self, uintptr_t ep, size_t nbytes, uint32_t fingerprint=0):
        """Hands the oldest contribution, as it now stands in its slot, back as a result. False: no room; call again."""
        cdef hetccl_message m
        _message(&m, 1, fingerprint)  # HETCCL_CHANNEL_RESULT
        m.nbytes = nbytes
        return self.check(self.ops.answer(self.ctx, <void *>ep, &m), "answer") == HETCCL_OK

    def progress(self, uintptr_t ep):
        """Pushes pending work along."""
        cdef int status
        with nogil:
            status = self.ops.progress(self.ctx, <void *>ep)
        self.check(status, "progress")

    def wait_fds(self):
        """Descriptors to poll, as (fd, writable) pairs."""
        cdef int[64] fds
        cdef uint32_t n = 0, i
        self.check(self.ops.wait_fds(self.ctx, fds, 64, &n), "wait_fds")
        return [(fds[i] & ~HETCCL_WAIT_WRITABLE, bool(fds[i] & HETCCL_WAIT_WRITABLE)) for i in range(n)]

    def arm(self):
        """True: sleep on `wait_fds` now. False: something arrived meanwhile."""
        return self.check(self.ops.arm(self.ctx), "arm") == HETCCL_OK

    def disarm(self):
        """Takes `arm` back and drains wake-ups."""
        self.check(self.ops.disarm(self.ctx), "disarm")

    def counters(self, uintptr_t ep):
        """dict of bytes_sent, bytes_received, messages_sent, messages_received: payload only."""
        cdef hetccl_transport_counters c
        memset(&c, 0, sizeof(c))
        c.size = sizeof(c)
        self.check(self.ops.counters(self.ctx, <void *>ep, &c), "counters")
        return {"bytes_sent": c.bytes_sent, "bytes_received": c.bytes_received,
                "messages_sent": c.messages_sent, "messages_received": c.messages_received}

    def put_threads(self, uintptr_t ep):
        """dict of how many threads carry this end's puts and for how long, in ns together, they sent, received and had
        nothing to send; zeros without HETCCL_TRANSPORT_PUT."""
        cdef hetccl_transport_counters c
        memset(&c, 0, sizeof(c))
        c.size = sizeof(c)
        self.check(self.ops.counters(self.ctx, <void *>ep, &c), "counters")
        return {"threads": c.put_threads, "send_ns": c.put_send_ns, "receive_ns": c.put_receive_ns,
                "idle_ns": c.put_idle_ns}

    @property
    def copies(self):
        """True if each rank of a link may have its own copy of the window, with `window_put`."""
        return bool(self.ops.caps & HETCCL_TRANSPORT_PUT)

    def window(self, uintptr_t ep, size_t nbytes):
        """(address, side, whether each rank has a copy) of the link's window."""
        cdef hetccl_window_args a
        memset(&a, 0, sizeof(a))
        a.size = sizeof(a)
        a.nbytes = nbytes
        self.check(self.ops.window(self.ctx, <void *>ep, &a), "window")
        return <uintptr_t>a.ptr, a.side, bool(a.copies)

    def window_put(self, uintptr_t ep, uint64_t at, uint64_t nbytes, words=()):
        """Puts bytes of the own copy into the peer's, then up to two `words`: (offset, value). False: call again."""
        cdef hetccl_window_put p
        memset(&p, 0, sizeof(p))
        p.size = sizeof(p)
        p.at, p.nbytes, p.n_words = at, nbytes, len(words)
        for i, (where, value) in enumerate(words[:2]):
            p.word[i].at, p.word[i].value = where, value
        return self.check(self.ops.window_put(self.ctx, <void *>ep, &p), "window_put") == HETCCL_OK

    def window_test(self, uintptr_t ep):
        """Moves puts of both directions along. True when all of this rank's have left."""
        return self.check(self.ops.window_test(self.ctx, <void *>ep), "window_test") == HETCCL_OK

    def ep_error(self, uintptr_t ep):
        """Raises the endpoint's error, if it has one (`PeerLostError` when the peer has gone)."""
        self.check(self.ops.ep_error(self.ctx, <void *>ep), "ep_error")

    def ep_close(self, uintptr_t ep):
        """Closes the endpoint and drops what is unsent."""
        self.check(self.ops.ep_close(self.ctx, <void *>ep), "ep_close")

    cdef int check(self, int status, str call) except? -1:
        if status > HETCCL_IN_PROGRESS or status < 0:
            raise_for_status(status, call, self.last_error(), "transport")
        return status


cdef void _message(hetccl_message *m, int channel, uint32_t fingerprint) noexcept:
    memset(m, 0, sizeof(m[0]))
    m.size = sizeof(m[0])
    m.channel = channel
    m.fingerprint = fingerprint
