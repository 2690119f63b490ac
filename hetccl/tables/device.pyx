# SPDX-License-Identifier: Apache-2.0
"""Wrapper of `hetccl_device_ops`."""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uint32_t, uintptr_t
from libc.string cimport memset

from hetccl.spi cimport *
from hetccl.tables.common cimport check_head, dtype_number, redop_number, table_in, text_of

from hetccl.tables.common import raise_for_status
from hetccl.types import RedOp

cdef extern from "normalize.h" nogil:
    int hetccl_normalize_device(hetccl_device_ops *out, const hetccl_device_ops *table)


@cython.final
cdef class DeviceTable:
    """Memory, streams and events of one device, all as addresses (int); stream 0 is the default stream."""

    def __cinit__(self, table):
        cdef hetccl_table *found = table_in(table, HETCCL_DEVICE_CAPSULE)
        cdef const hetccl_device_ops *ops = <const hetccl_device_ops *>found.ops
        check_head(hetccl_normalize_device(&self.ops, ops), "device", ops.version, ops.size)
        self.ctx = found.ctx
        self.owner = table

    @property
    def caps(self):
        """Bits HETCCL_DEVICE_* of spi.h."""
        return self.ops.caps

    @property
    def host_memory(self):
        """True if the device's memory is ordinary host memory."""
        return bool(self.ops.caps & HETCCL_DEVICE_HOST_MEMORY)

    def last_error(self):
        """Text of this thread's last failure."""
        return text_of(self.ops.last_error(self.ctx))

    def bind_thread(self):
        """Makes the device current for the calling thread."""
        cdef int status
        with nogil:
            status = self.ops.bind_thread(self.ctx)
        self.check(status, "bind_thread")

    def alloc(self, size_t nbytes):
        """Address of `nbytes` of device memory. May synchronise the device."""
        cdef void *ptr = NULL
        cdef int status
        with nogil:
            status = self.ops.alloc(self.ctx, nbytes, &ptr)
        self.check(status, "alloc")
        return <uintptr_t>ptr

    def free(self, uintptr_t ptr):
        """Frees what `alloc` gave."""
        cdef int status
        with nogil:
            status = self.ops.free(self.ctx, <void *>ptr)
        self.check(status, "free")

    def owns(self, uintptr_t ptr, size_t nbytes=1):
        """True: memory of this device. False: ordinary host memory. `UsageError`: memory of another device."""
        cdef int status = self.ops.owns(self.ctx, <const void *>ptr, nbytes)
        if status == HETCCL_UNSUPPORTED:
            return False
        self.check(status, "owns")
        return True

    def host_alloc(self, size_t nbytes):
        """Address of `nbytes` of page-locked host memory."""
        cdef void *ptr = NULL
        cdef int status
        with nogil:
            status = self.ops.host_alloc(self.ctx, nbytes, &ptr)
        self.check(status, "host_alloc")
        return <uintptr_t>ptr

    def host_free(self, uintptr_t ptr):
        """Frees what `host_alloc` gave."""
        cdef int status
        with nogil:
            status = self.ops.host_free(self.ctx, <void *>ptr)
        self.check(status, "host_free")

    def host_register(self, uintptr_t ptr, size_t nbytes):
        """Page-locks existing host memory."""
        cdef int status
        with nogil:
            status = self.ops.host_register(self.ctx, <void *>ptr, nbytes)
        self.check(status, "host_register")

    def host_unregister(self, uintptr_t ptr):
        """Undoes `host_register`."""
        cdef int status
        with nogil:
            status = self.ops.host_unregister(self.ctx, <void *>ptr)
        self.check(status, "host_unregister")

    def copy(self, uintptr_t dst, uintptr_t src, size_t nbytes, uintptr_t stream=0):
        """Enqueues a copy; either side may be host or device memory."""
        cdef int status
        with nogil:
            status = self.ops.copy_async(self.ctx, <void *>dst, <const void *>src, nbytes, <void *>stream)
        self.check(status, "copy_async")

    def memset(self, uintptr_t dst, int byte, size_t nbytes, uintptr_t stream=0):
        """Enqueues filling `nbytes` with one byte value."""
        cdef int status
        with nogil:
            status = self.ops.memset_async(self.ctx, <void *>dst, byte, nbytes, <void *>stream)
        self.check(status, "memset_async")

    def stream_create(self):
        """A new stream."""
        cdef void *stream = NULL
        self.check(self.ops.stream_create(self.ctx, &stream), "stream_create")
        return <uintptr_t>stream

    def stream_destroy(self, uintptr_t stream):
        """Ends a stream; may block until it is empty."""
        cdef int status
        with nogil:
            status = self.ops.stream_destroy(self.ctx, <void *>stream)
        self.check(status, "stream_destroy")

    def stream_sync(self, uintptr_t stream=0):
        """Blocks until the stream is empty."""
        cdef int status
        with nogil:
            status = self.ops.stream_sync(self.ctx, <void *>stream)
        self.check(status, "stream_sync")

    def stream_query(self, uintptr_t stream=0):
        """Whether all that the stream held has ended. Raises `UnsupportedError` where the device cannot tell."""
        return self.check(self.ops.stream_query(self.ctx, <void *>stream), "stream_query") == HETCCL_OK

    def stream_wait_event(self, uintptr_t stream, uintptr_t event):
        """Makes later work of the stream wait for the event."""
        self.check(self.ops.stream_wait_event(self.ctx, <void *>stream, <void *>event), "stream_wait_event")

    def event_create(self):
        """A new event."""
        cdef void *event = NULL
        self.check(self.ops.event_create(self.ctx, &event), "event_create")
        return <uintptr_t>event

    def event_destroy(self, uintptr_t event):
        """Ends an event."""
        self.check(self.ops.event_destroy(self.ctx, <void *>event), "event_destroy")

    def event_record(self, uintptr_t event, uintptr_t stream=0):
        """The event is reached when what the stream holds now is done."""
        self.check(self.ops.event_record(self.ctx, <void *>event, <void *>stream), "event_record")

    def event_query(self, uintptr_t event):
        """True when reached."""
        return self.check(self.ops.event_query(self.ctx, <void *>event), "event_query") == HETCCL_OK

    def event_sync(self, uintptr_t event):
        """Blocks until the event is reached."""
        cdef int status
        with nogil:
            status = self.ops.event_sync(self.ctx, <void *>event)
        self.check(status, "event_sync")

    def flag_alloc(self):
        """Address of a 32-bit word that host and device see (HETCCL_DEVICE_FLAGS)."""
        cdef void *flag = NULL
        self.check(self.ops.flag_alloc(self.ctx, &flag), "flag_alloc")
        return <uintptr_t>flag

    def flag_free(self, uintptr_t flag):
        """Frees a flag."""
        self.check(self.ops.flag_free(self.ctx, <void *>flag), "flag_free")

    def flag_set(self, uintptr_t flag, uint32_t value, uintptr_t stream=0):
        """Enqueues writing `value` to the flag."""
        self.check(self.ops.flag_set(self.ctx, <void *>flag, value, <void *>stream), "flag_set")

    def stream_wait_flag(self, uintptr_t flag, uint32_t at_least, uintptr_t stream=0):
        """Makes later work of the stream wait until the flag is at least `at_least`."""
        self.check(self.ops.stream_wait_flag(self.ctx, <void *>flag, at_least, <void *>stream), "stream_wait_flag")

    def reduce(self, uintptr_t dst, sources, size_t count, dtype, redop, double divisor=1.0, uintptr_t stream=0):
        """Enqueues dst = (src[0] op src[1] op ...) / divisor over `count` elements (HETCCL_DEVICE_KERNELS)."""
        self._combine(False, dst, sources, count, dtype, redop, divisor, stream)

    def scale(self, uintptr_t dst, uintptr_t src, size_t count, dtype, double divisor, uintptr_t stream=0):
        """Enqueues dst = src / divisor (HETCCL_DEVICE_KERNELS)."""
        self._combine(True, dst, (src,), count, dtype, RedOp.SUM, divisor, stream)

    def _combine(self, bint scale, uintptr_t dst, sources, size_t count, dtype, redop, double divisor,
                 uintptr_t stream):
        cdef hetccl_reduce_args args
        cdef int status
        cdef size_t i, n = len(sources)
        cdef const void **pointers = <const void **>PyMem_Malloc((n + 1) * sizeof(void *))
        if pointers == NULL:
            raise MemoryError
        try:
            for i in range(n):
                pointers[i] = <const void *><uintptr_t>sources[i]
            memset(&args, 0, sizeof(args))
            args.size = sizeof(args)
            args.dtype = dtype_number(dtype)
            args.redop = redop_number(redop)
            args.n_src = <uint32_t>n
            args.dst = <void *>dst
            args.src = pointers
            args.count = count
            args.scale = divisor
            args.stream = <void *>stream
            with nogil:
                if scale:
                    status = self.ops.scale_async(self.ctx, &args)
                else:
                    status = self.ops.reduce_async(self.ctx, &args)
            self.check(status, "scale_async" if scale else "reduce_async")
        finally:
            PyMem_Free(<void *>pointers)

    def is_capturing(self, uintptr_t stream=0):
        """True while the stream is captured into a graph (HETCCL_DEVICE_CAPTURE)."""
        return self.check(self.ops.is_capturing(self.ctx, <void *>stream), "is_capturing") == HETCCL_IN_PROGRESS

    def dmabuf_export(self, uintptr_t ptr, size_t nbytes):
        """A dma-buf descriptor of device memory; the caller closes it (HETCCL_DEVICE_DMABUF)."""
        cdef int fd = -1
        self.check(self.ops.dmabuf_export(self.ctx, <void *>ptr, nbytes, &fd), "dmabuf_export")
        return fd

    cdef int check(self, int status, str call) except? -1:
        """`status` if it is OK or IN_PROGRESS, else the exception that fits."""
        if status > HETCCL_IN_PROGRESS or status < 0:
            raise_for_status(status, call, self.last_error(), "device")
        return status
