# SPDX-License-Identifier: Apache-2.0
"""Python's hold on the rings of one communicator (`ring.h`). Set-up only: messages go through the C table."""
cimport cython
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_New, PyCapsule_SetContext
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t

from hetccl.spi cimport HETCCL_NO_MEMORY, HETCCL_OK, HETCCL_TRANSPORT_CAPSULE, hetccl_table, hetccl_transport_ops

from hetccl import errors

cdef extern from "ring.h" nogil:
    enum:
        HETCCL_SHM_INLINE
        HETCCL_SHM_MIN_SLOT
        HETCCL_SHM_MAX_SLOT
        HETCCL_SHM_MIN_SLOTS
        HETCCL_SHM_MAX_SLOTS
    ctypedef struct hetccl_shm:
        pass
    ctypedef struct hetccl_shm_ep:
        pass
    ctypedef struct hetccl_shm_link:
        uint32_t dialer
        uint32_t acceptor
        int32_t create
        int32_t region_fd
        int32_t peer_doorbell
    hetccl_shm *hetccl_shm_new(uint32_t rank, uint32_t slots, uint32_t slot_bytes, int doorbell)
    const hetccl_table *hetccl_shm_table(hetccl_shm *shm)
    int hetccl_shm_valid(uint64_t slots, uint64_t slot_bytes)
    size_t hetccl_shm_region_bytes(uint32_t slots, uint32_t slot_bytes)
    int hetccl_shm_attach(hetccl_shm *shm, const hetccl_shm_link *link, hetccl_shm_ep **ep)
    void hetccl_shm_close(hetccl_shm *shm)
    void hetccl_shm_free(hetccl_shm *shm)

INLINE_BYTES = HETCCL_SHM_INLINE


@cython.final
cdef class Rings:
    """One rank's endpoints in one communicator.

    `slots` and `slot_bytes` are powers of two (checked: `ConfigError`); `doorbell` is an eventfd that the caller keeps
    open until `close`.
    """

    cdef hetccl_shm *shm
    cdef uint32_t rank
    cdef readonly size_t region_bytes  # size of one link's region

    def __cinit__(self, uint32_t rank, uint64_t slots, uint64_t slot_bytes, int doorbell):
        check_sizes(slots, slot_bytes)
        self.rank = rank
        self.region_bytes = hetccl_shm_region_bytes(<uint32_t>slots, <uint32_t>slot_bytes)
        self.shm = hetccl_shm_new(rank, <uint32_t>slots, <uint32_t>slot_bytes, doorbell)
        if self.shm is NULL:
            raise MemoryError("no memory for the state of the shared-memory transport")

    def __dealloc__(self):
        if self.shm is not NULL:
            hetccl_shm_free(self.shm)

    def table(self):
        """A new capsule of the transport table. It keeps this object, but not its links, alive."""
        capsule = PyCapsule_New(<void *>hetccl_shm_table(self.shm), HETCCL_TRANSPORT_CAPSULE, _drop)
        PyCapsule_SetContext(capsule, <void *>self)
        Py_INCREF(self)
        return capsule

    def attach(self, uint32_t peer, bint dialer, int region_fd, int peer_doorbell):
        """Address of a new endpoint. Maps the region (whose descriptor stays the caller's) and takes `peer_doorbell`.

        The dialer lays the region out and must have attached before it sends the descriptor.
        """
        cdef hetccl_shm_link link
        cdef hetccl_shm_ep *ep = NULL
        cdef int status
        link.dialer = self.rank if dialer else peer
        link.acceptor = peer if dialer else self.rank
        link.create = dialer
        link.region_fd = region_fd
        link.peer_doorbell = peer_doorbell
        with nogil:
            status = hetccl_shm_attach(self.shm, &link, &ep)
        if status != HETCCL_OK:
            text = (<const hetccl_transport_ops *>hetccl_shm_table(self.shm).ops).last_error(self.shm).decode()
            if status == HETCCL_NO_MEMORY:
                text += f"; a link needs {self.region_bytes} bytes: lower HETCCL_SHM_SLOTS or HETCCL_SHM_SLOT_BYTES"
            raise errors.TransportError(f"shared-memory link between ranks {self.rank} and {peer}: {text}", peer=peer,
                                        transport="shm")
        return <uintptr_t>ep

    def drop(self, uintptr_t endpoint):
        """Closes one endpoint, whose peer then finds it lost."""
        (<const hetccl_transport_ops *>hetccl_shm_table(self.shm).ops).ep_close(self.shm, <void *>endpoint)

    def close(self):
        """Closes every endpoint and unmaps its memory. No call of the table may be running. Idempotent."""
        hetccl_shm_close(self.shm)


def check_sizes(slots, slot_bytes):
    """Raises `ConfigError` unless rings can have these sizes."""
    if slots < 0 or slot_bytes < 0 or not hetccl_shm_valid(min(slots, 1 << 40), min(slot_bytes, 1 << 40)):
        raise errors.ConfigError(
            f"HETCCL_SHM_SLOTS={slots} with HETCCL_SHM_SLOT_BYTES={slot_bytes} cannot be used: slots must be a power of "
            f"two from {HETCCL_SHM_MIN_SLOTS} to {HETCCL_SHM_MAX_SLOTS}, slot bytes one from {HETCCL_SHM_MIN_SLOT} to "
            f"{HETCCL_SHM_MAX_SLOT}")


cdef void _drop(object capsule) noexcept:
    Py_DECREF(<object>PyCapsule_GetContext(capsule))
