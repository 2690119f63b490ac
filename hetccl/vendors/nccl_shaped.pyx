# SPDX-License-Identifier: Apache-2.0
"""The ccl table of every library that is shaped like NCCL, filled from data (nccl_shape.NcclShape) at run time."""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy

from hetccl.dynlib cimport Library
from hetccl.spi cimport (
    HETCCL_CCL_CAPSULE, HETCCL_DEVICE_CAPSULE, HETCCL_OK, HETCCL_VENDOR, hetccl_device_ops, hetccl_table)
from hetccl.vendors.nccl_calls cimport *

from hetccl.errors import ConfigError
from hetccl.types import DType, RedOp
from hetccl.vendors.nccl_shape import Caps

__all__ = ["NcclShapedCcl"]

ctypedef hetccl_nccl_library Lib


@cython.final
cdef class NcclShapedCcl:
    """A library of NCCL's shape, ready for use. `table` is the PyCapsule for `Vendor.ccl_table`.

    `device` is the vendor's device table where a communicator belongs to a device. The table lives as long as the
    process. Raises `PluginLoadError` if the library lacks a call that no library of the
    family lacks, `ConfigError` if the data cannot be right.
    """

    def __cinit__(self, shape, Library library not None, device=None):
        cdef hetccl_table *table
        self.shape = shape
        self.library = library
        self.lib = <Lib *>calloc(1, sizeof(Lib))
        if self.lib == NULL:
            raise MemoryError()
        pthread_mutex_init(&self.lib.lock, NULL)
        fill_data(self.lib, shape)
        if device is not None:
            table = <hetccl_table *>PyCapsule_GetPointer(device, HETCCL_DEVICE_CAPSULE)
            self.lib.bind = (<const hetccl_device_ops *>table.ops).bind_thread
            self.lib.bind_ctx = table.ctx
        self.lib.ops.caps = <int>shape.caps
        fill_calls(self, self.lib)
        fill_masks(self.lib, shape)
        nccl_fill_table(self.lib)
        self.table = PyCapsule_New(&self.lib.table, HETCCL_CCL_CAPSULE, NULL)

    def version(self):
        """The number that GetVersion answers, or None where there is no such call."""
        cdef int number = 0
        if self.lib.version == NULL or self.lib.version(&number) != 0:
            return None
        return number

    cdef void *find(self, str call, bint required=False) except? NULL:
        """The library's function for `call` ("AllReduce"), under the first of its spellings."""
        return self.library.find_call(self.shape, call, required)


cdef int fill_data(Lib *l, shape) except -1:
    """Copies the data into C; refuses what the shapes of calls do not cover."""
    cdef bytes config = shape.config
    cdef bytes text = shape.prefix.encode()
    if not (1 <= shape.id_bytes <= HETCCL_NCCL_ID_MAX if shape.id_by_pointer else shape.id_bytes in (128, 136, 4096)):
        raise ConfigError(f"{shape.name}: an id of {shape.id_bytes} bytes is not covered; by value there are 128, 136 "
                          f"and 4096, by pointer up to {HETCCL_NCCL_ID_MAX}")
    if len(config) > HETCCL_NCCL_CONFIG_MAX or len(text) > 31:
        raise ConfigError(f"{shape.name}: config may have {HETCCL_NCCL_CONFIG_MAX} bytes, prefix 31")
    memcpy(l.config, <const char *>config, len(config))
    memcpy(l.prefix, <const char *>text, len(text))
    l.id_len = shape.id_bytes
    l.config_len = <uint32_t>len(config)
    l.id_by_pointer = shape.id_by_pointer
    l.ranks_are_size_t = shape.ranks_are_size_t
    l.init_in_thread = shape.init_in_thread
    l.streams = shape.streams
    l.recv_on_all_ranks = shape.recv_on_all_ranks
    l.one_at_a_time = bool(shape.caps & Caps.ONE_AT_A_TIME)
    for code in range(HETCCL_NCCL_CODES):
        l.status_of[<int>code] = HETCCL_VENDOR
    for code, result in shape.results.items():
        if not 0 <= code < HETCCL_NCCL_CODES or (code == 0) != (result.status == HETCCL_OK):
            raise ConfigError(f"{shape.name}: result {code} as {result.status!r} is not covered; 0 is OK and codes are "
                              f"below {HETCCL_NCCL_CODES}")
        l.status_of[<int>code] = result.status
        text = result.name.encode()[:31]
        memcpy(&l.name_of[<int>code][0], <const char *>text, len(text))
    return 0


cdef int fill_calls(NcclShapedCcl self, Lib *l) except -1:
    l.unique_id = <hetccl_nccl_id_fn>self.find("GetUniqueId", True)
    if l.config_len:
        l.init = self.find("CommInitRankConfig")
    if l.init == NULL:
        l.config_len = 0
        l.init = self.find("CommInitRank", True)
    l.destroy = <hetccl_nccl_comm_fn>self.find("CommDestroy", True)
    l.all_reduce = <hetccl_nccl_reduce_fn>self.find("AllReduce", True)
    l.reduce_scatter = <hetccl_nccl_reduce_fn>self.find("ReduceScatter", True)
    l.all_gather = <hetccl_nccl_move_fn>self.find("AllGather", True)
    l.broadcast = <hetccl_nccl_root_fn>self.find("Broadcast", True)
    l.reduce = <hetccl_nccl_root_reduce_fn>self.find("Reduce")
    l.all_to_all = <hetccl_nccl_move_fn>self.find("AllToAll")
    l.send = <hetccl_nccl_send_fn>self.find("Send")
    l.recv = <hetccl_nccl_recv_fn>self.find("Recv")
    l.group_start = <hetccl_nccl_plain_fn>self.find("GroupStart")
    l.group_end = <hetccl_nccl_plain_fn>self.find("GroupEnd")
    l.finalize = <hetccl_nccl_comm_fn>self.find("CommFinalize")
    l.abort = <hetccl_nccl_comm_fn>self.find("CommAbort")
    l.async_error = <hetccl_nccl_async_fn>self.find("CommGetAsyncError")
    l.version = <hetccl_nccl_version_fn>self.find("GetVersion")
    l.code_text = <hetccl_nccl_code_text_fn>self.find("GetErrorString")
    l.last_text = <hetccl_nccl_last_text_fn>self.find("GetLastError")
    return 0


cdef int fill_masks(Lib *l, shape) except -1:
    """Which types are moved and reduced. A type the library lacks is moved as one of its size."""
    cdef int d, r
    carriers = {dtype.itemsize: number for dtype, number in reversed(shape.dtypes.items())}
    halves = {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}
    sums = (RedOp.SUM, RedOp.AVG)
    for r in range(16):
        l.redop_of[r] = shape.redops[RedOp(r)] if r in shape.redops else -1
    for dtype in DType:
        d = dtype.value
        real = halves.get(dtype, dtype)
        l.item_bytes[d] = dtype.itemsize
        l.elements_of[d] = dtype.itemsize // real.itemsize
        number = shape.dtypes.get(real)
        if number is None and real is dtype:
            number = carriers.get(dtype.itemsize)
        if number is None:
            continue
        l.dtype_of[d] = number
        l.ops.move_mask |= <uint64_t>1 << d
        if real in shape.dtypes:
            for redop in shape.redops if real is dtype else [redop for redop in sums if redop in shape.redops]:
                if (real, redop) not in shape.not_reduced:
                    l.ops.reduce_mask[d] |= <uint32_t>1 << <int>redop.value
    return 0
