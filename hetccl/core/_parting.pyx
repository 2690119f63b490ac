# SPDX-License-Identifier: Apache-2.0
"""A vendor's communicator that is being destroyed, in a thread of its own (parting.c says why)."""

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t

from hetccl.core._words cimport nanoseconds
from hetccl.spi cimport HETCCL_CCL_ABORT, HETCCL_OK, hetccl_ccl_ops, hetccl_device_ops
from hetccl.tables.ccl cimport CclTable
from hetccl.tables.device cimport DeviceTable

cdef extern from "parting.h" nogil:
    ctypedef struct hx_parting:
        pass
    hx_parting *hx_part_begin(const hetccl_ccl_ops *, void *, const hetccl_device_ops *, void *, void *)
    int hx_part_wait(hx_parting *, uint64_t)
    void hx_part_drop(hx_parting *)


@cython.final
cdef class Parting:
    """Begins to destroy `comm`, a handle of `ccl` on `device`. Raises `MemoryError` if there is no thread for that.

    `stuck_for_good`: the library cannot be aborted.
    """

    cdef hx_parting *p
    cdef object tables
    cdef readonly bint stuck_for_good

    def __cinit__(self, CclTable ccl not None, DeviceTable device not None, uintptr_t comm):
        self.stuck_for_good = not ccl.ops.caps & HETCCL_CCL_ABORT
        self.p = hx_part_begin(&ccl.ops, ccl.ctx, &device.ops, device.ctx, <void *>comm)
        if self.p == NULL:
            raise MemoryError("no thread to leave a vendor's communicator in")
        self.tables = (ccl, device)
        Py_INCREF(self.tables)  # the thread needs what they hold, whatever becomes of this object

    def __dealloc__(self):
        hx_part_drop(self.p)

    def wait(self, double seconds):
        """Whether it has ended, within `seconds`."""
        cdef uint64_t ns = nanoseconds(seconds)
        cdef int rc
        with nogil:
            rc = hx_part_wait(self.p, ns)
        if rc == HETCCL_OK and self.tables is not None:
            Py_DECREF(self.tables)
            self.tables = None
        return rc == HETCCL_OK
