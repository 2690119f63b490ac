# SPDX-License-Identifier: Apache-2.0
"""Devices of the pretend accelerator: they are made once a process and name, and stopped when the interpreter exits."""

cimport cython
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t

from hetccl.native.island cimport hetccl_island, hetccl_island_destroy
from hetccl.spi cimport *

import atexit
import os
import threading

from hetccl import errors
from hetccl.tables import capsule
from hetccl.types import DType

__all__ = ["SimDevice", "open_device"]

cdef extern from "device.h" nogil:
    ctypedef struct hetccl_sim_registry
    ctypedef struct hetccl_sim_conditions:
        uint64_t seed, delay_ns, rate
        uint32_t adversarial, poison, one_at_a_time
    ctypedef struct hetccl_sim_device:
        char *name
        uint64_t deadline_ns
        hetccl_sim_conditions conditions
    void hetccl_sim_conditions_seed(hetccl_sim_device *d, uint64_t salt)
    const hetccl_device_ops hetccl_sim_device_ops
    hetccl_sim_registry *hetccl_sim_registry_new()
    hetccl_sim_device *hetccl_sim_device_new(hetccl_sim_registry *r, const char *name, int32_t index)
    int hetccl_sim_check(hetccl_sim_device *d)
    int hetccl_sim_stop(hetccl_sim_device *d, uint64_t wait_ns)
    const char *hetccl_sim_last_error(void *ctx)

cdef extern from "ccl.h" nogil:
    ctypedef struct hetccl_sim_comm
    ctypedef struct hetccl_sim_ccl:
        hetccl_ccl_ops ops
    void hetccl_sim_ccl_init(hetccl_sim_ccl *c, hetccl_sim_device *d, const uint32_t *masks)
    hetccl_sim_comm *hetccl_sim_comm_new(hetccl_sim_device *d, hetccl_island *island, int32_t rank, int32_t size)
    void hetccl_sim_abort_all(hetccl_sim_device *d)

cdef hetccl_sim_registry *_registry = NULL  # of this process: every sim device's memory
_devices = {}  # (name, index) -> SimDevice, of this process
_lock = threading.Lock()


@cython.final
cdef class SimDevice:
    """One pretend device with its tables. It lives as long as the process; `stop` ends its threads."""

    cdef hetccl_sim_device *device
    cdef hetccl_sim_ccl ccl
    cdef hetccl_table device_entry, ccl_entry
    cdef readonly str name
    cdef readonly int index
    cdef readonly int pid

    def __init__(self):
        raise TypeError("devices come from open_device()")

    @property
    def device_table(self):
        """Capsule of the device table."""
        return capsule(<uintptr_t>&self.device_entry, HETCCL_DEVICE_CAPSULE.decode(), self)

    @property
    def ccl_table(self):
        """Capsule of the collective library's table."""
        return capsule(<uintptr_t>&self.ccl_entry, HETCCL_CCL_CAPSULE.decode(), self)

    @property
    def deadline(self):
        """Seconds that any wait of this device may last before the device fails (600)."""
        return self.device.deadline_ns * 1e-9

    @deadline.setter
    def deadline(self, double seconds):
        if not 0 < seconds <= 1e6:
            raise errors.UsageError(f"deadline must be positive and at most 1e6 seconds, not {seconds}")
        self.device.deadline_ns = <uint64_t>(seconds * 1e9)

    def create_comm(self, int rank, int size, bytes island_id, double timeout, check=None):
        """Joins an island of `size` ranks; returns the communicator's address. Blocks up to `timeout` seconds, or until
        `check` raises."""
        from hetccl.native import island

        if hetccl_sim_check(self.device) != HETCCL_OK:
            raise errors.ClosedError(_text())
        hetccl_sim_conditions_seed(self.device, <uint64_t>rank)  # ranks of one island draw different numbers
        cdef uintptr_t handle = island.join(island_id, rank, size, timeout, 0, check)
        cdef hetccl_sim_comm *comm = hetccl_sim_comm_new(self.device, <hetccl_island *>handle, rank, size)
        if comm == NULL:
            hetccl_island_destroy(<hetccl_island *>handle)
            raise MemoryError
        return <uintptr_t>comm

    def stop(self, double timeout=5.0):
        """Aborts all work and ends the stream threads. True if they have left within `timeout` seconds. Idempotent."""
        cdef int status
        cdef uint64_t wait_ns = <uint64_t>(timeout * 1e9)
        if os.getpid() != self.pid:
            return True
        with nogil:
            hetccl_sim_abort_all(self.device)
            status = hetccl_sim_stop(self.device, wait_ns)
        return status == HETCCL_OK


def open_device(str name, int index, reduce_masks, conditions=None):
    """The device `index` of vendor `name` in this process. `reduce_masks`: one an element type, bit `operator`.

    `conditions` (of conditions.py) are those of the first opening.
    """
    global _registry
    cdef uint32_t[<int>HETCCL_DTYPE_COUNT] masks
    cdef SimDevice d
    cdef bytes label = name.encode()
    if len(label) > 63:
        raise errors.UsageError(f"a sim vendor's name has at most 63 bytes, not {name!r}")
    for dtype in DType:
        masks[<int>dtype] = <uint32_t>reduce_masks[dtype]
    with _lock:
        if _registry == NULL:
            _registry = hetccl_sim_registry_new()
            if _registry == NULL:
                raise MemoryError
        found = _devices.get((name, index))
        if found is not None:
            return found
        d = SimDevice.__new__(SimDevice)
        d.name, d.index, d.pid = name, index, os.getpid()
        d.device = hetccl_sim_device_new(_registry, label, index)
        if d.device == NULL:
            raise MemoryError
        if conditions is not None:
            d.device.conditions.seed = conditions.seed
            d.device.conditions.delay_ns = <uint64_t>(conditions.delay_us * 1e3)
            d.device.conditions.rate = conditions.rate
            d.device.conditions.adversarial = conditions.adversarial
            d.device.conditions.poison = conditions.poison
            d.device.conditions.one_at_a_time = conditions.one_at_a_time
            hetccl_sim_conditions_seed(d.device, 0)
        hetccl_sim_ccl_init(&d.ccl, d.device, masks)
        d.device_entry.ops = &hetccl_sim_device_ops
        d.device_entry.ctx = d.device
        d.ccl_entry.ops = &d.ccl.ops
        d.ccl_entry.ctx = &d.ccl
        _devices[name, index] = d
        return d


def _stop_all():
    for d in list(_devices.values()):
        d.stop()


def _start_anew():
    """In a forked child: its parent's threads, locks and memory are not its own."""
    global _registry, _lock
    _registry = NULL
    _devices.clear()
    _lock = threading.Lock()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_start_anew)


cdef str _text():
    return hetccl_sim_last_error(NULL).decode(errors="replace")
