# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed calls: process groups and back ends over a hetccl Communicator.

Plain Python classes, compiled only because that halves the cost of a call; no torch header is used, so one build
serves every torch. The operations that the core has are here; those made of them are in `_composed.py`.

Two flavours share the method bodies: torch before 2.14 takes a ProcessGroup written in Python, newer ones a Backend.
"""

import torch
from torch._C import _distributed_c10d as c10d

from hetccl.torch import _streams, _tensors
from hetccl.torch._compat import HAS_PYTHON_BACKEND
from hetccl.torch._composed import ComposedOps
from hetccl.torch._errors import for_torch
from hetccl.torch._monitored import monitored_barrier
from hetccl.torch._sparse import SparseOps
from hetccl.torch._work import HetWork, join
from hetccl.types import DType, Op, RedOp

__all__ = ["GROUP_CLASS", "HetcclBackend", "HetcclProcessGroup"]

cdef object DTYPES = _tensors.DTYPES
cdef object REDOPS = _tensors.REDOPS
cdef object STRIDED = torch.strided
cdef int ALL_REDUCE = Op.ALL_REDUCE, BARRIER = Op.BARRIER, BROADCAST = Op.BROADCAST, ALL_GATHER = Op.ALL_GATHER
cdef int REDUCE_SCATTER = Op.REDUCE_SCATTER, SEND = Op.SEND, RECV = Op.RECV
cdef int ALL_TO_ALL = Op.ALL_TO_ALL
cdef enum:
    ODD, HOSTS, OURS  # where a tensor is: it needs thought, in host memory, in our device's
cdef int SUM = RedOp.SUM, INT32 = DType.INT32, UINT8 = DType.UINT8

# Groups and back ends in use. torch does not always keep the Python half of one alive.
_live = []


class HetcclOps(ComposedOps, SparseOps):
    """The operations. `self._comm` is the communicator, `self._rank` and `self._size` the place in it."""

    # Whether an operation that has ended may give no work: making and waiting for one costs a quarter of a small call.
    ENDS_SILENTLY = False

    def _setup(self, comm, store, int rank, int size, name, timeout):
        self._name = name
        self._timeout = timeout
        self._monitored = 0
        self._comm = comm
        self._run = comm._run
        self._post = comm.post
        self._store = store
        self._rank = rank
        self._size = size
        self._coalescing = None
        # The device whose tensors go to the core by address, with the stream that the caller is on.
        self._device = _streams.device_of(comm)
        self._index = -1 if self._device is None else self._device.index
        self._current_stream = _streams.current_stream_of(self._device)
        _live.append(self)

    # -- collectives that the core has

    def allreduce(self, tensors, opts=None):
        if opts is None:
            opts = c10d.AllreduceOptions()
        tensor = tensors[0]
        code = REDOPS.get(hash(opts.reduceOp))
        dtype = DTYPES.get(tensor.dtype)
        cdef int place = plain(tensor, self._index)
        if code is None or dtype is None or len(tensors) != 1 or place == ODD:
            return self._allreduce_slow(tensors, opts)
        pointer = tensor.data_ptr()
        return self._start(ALL_REDUCE, pointer, pointer, tensor.numel(), dtype, code, 0, opts, tensors, tensors, None, place == OURS)

    def _allreduce_slow(self, tensors, opts):
        """Everything that is not one contiguous CPU tensor of a known dtype with a plain operator."""
        try:
            tensor = _tensors.one(tensors, "all_reduce")
            if tensor.layout is not STRIDED and (tensor.is_cpu or tensor.device == self._device):
                return self._allreduce_sparse(tensors, opts)
            _tensors.check_tensor(tensor, self._device)
            dtype = _tensors.dtype_code(tensor)
            code, factor = _tensors.reduction(opts.reduceOp)
        except Exception as error:
            raise for_torch(error)
        flat = tensor.detach().contiguous() if factor is None else (tensor.detach() * factor).contiguous()
        pointer = flat.data_ptr()
        finish = None if flat.data_ptr() == tensor.data_ptr() else _tensors.copier([(tensor, flat)])
        return self._start(ALL_REDUCE, pointer, pointer, flat.numel(), dtype, code, 0, opts, tensors, (tensors, flat), finish)

    def broadcast(self, tensors, opts=None):
        if opts is None:
            opts = c10d.BroadcastOptions()
        tensor, root = tensors[0], opts.rootRank
        dtype = DTYPES.get(tensor.dtype)
        cdef int place = plain(tensor, self._index)
        if dtype is not None and len(tensors) == 1 and place != ODD:
            pointer = tensor.data_ptr()
            return self._start(BROADCAST, pointer, pointer, tensor.numel(), dtype, SUM, root, opts, tensors, tensors, None, place == OURS)
        tensor = self._checked(tensors, "broadcast")
        flat = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        finish = None if flat is tensor or root == self._rank else _tensors.copier([(tensor, flat)])
        pointer = flat.data_ptr()
        return self._start(BROADCAST, pointer, pointer, flat.numel(), self._dtype(tensor), SUM, root, opts, tensors,
                           (tensors, flat), finish)

    def all_gather_single(self, out, inp, opts=None):
        if opts is None:
            opts = c10d.AllgatherOptions()
        cdef int place = self._side_by_side(out, inp)
        if place != ODD:
            return self._start(ALL_GATHER, inp.data_ptr(), out.data_ptr(), inp.numel(), DTYPES[out.dtype], SUM, 0, opts, [out],
                               (out, inp), None, place == OURS)
        self._checked((out,), "all_gather_into_tensor")
        self._checked((inp,), "all_gather_into_tensor")
        self._sizes("all_gather_into_tensor", out, inp, inp.numel() * self._size)
        source = inp if inp.is_contiguous() else inp.detach().contiguous()
        flat, finish = out, None
        if not out.is_contiguous():
            flat = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            finish = _tensors.copier([(out, flat)])
        return self._gather_into(flat, source, opts, [out], finish)

    def reduce_scatter_single(self, out, inp, opts=None):
        if opts is None:
            opts = c10d.ReduceScatterOptions()
        code = REDOPS.get(hash(opts.reduceOp))
        cdef int place = self._side_by_side(inp, out)
        if place != ODD and code is not None:
            return self._start(REDUCE_SCATTER, inp.data_ptr(), out.data_ptr(), out.numel(), DTYPES[out.dtype], code, 0, opts, [out],
                               (out, inp), None, place == OURS)
        self._checked((out,), "reduce_scatter_tensor")
        self._checked((inp,), "reduce_scatter_tensor")
        self._sizes("reduce_scatter_tensor", inp, out, out.numel() * self._size)
        return self._reduce_scatter_flat(out, inp.detach().contiguous(), opts)

    def all_to_all_single(self, out, inp, out_splits, in_splits, opts=None):
        if opts is None:
            opts = c10d.AllToAllOptions()
        cdef int place = plain(out, self._index)
        dtype = DTYPES.get(out.dtype)
        if (out_splits or in_splits or dtype is None or place == ODD or plain(inp, self._index) != place
                or inp.dtype is not out.dtype or inp.shape != out.shape or not inp.dim() or inp.shape[0] % self._size):
            return ComposedOps.all_to_all_single(self, out, inp, out_splits, in_splits, opts)
        source, target, nbytes = inp.data_ptr(), out.data_ptr(), inp.nbytes
        if nbytes and source < target + nbytes and target < source + nbytes:
            return ComposedOps.all_to_all_single(self, out, inp, out_splits, in_splits, opts)
        return self._start(ALL_TO_ALL, source, target, inp.numel() // self._size, dtype, SUM, 0, opts, [out], (out, inp), None,
                           place == OURS)

    def barrier(self, opts=None):
        if opts is None:
            opts = c10d.BarrierOptions()
        token = torch.zeros(1, dtype=torch.int32)  # operations run in order, so the barrier comes after what was posted
        pointer = token.data_ptr()
        return self._start(BARRIER, pointer, pointer, 1, INT32, SUM, 0, opts, [], token)

    def _monitored_barrier(self, timeout, wait_all_ranks):
        """`timeout`: a timedelta, negative for the group's own."""
        self._monitored += 1
        seconds = (timeout if timeout.days >= 0 else self._timeout).total_seconds()
        monitored_barrier(self._store, self._rank, self._size, self._monitored, seconds, wait_all_ranks)

    # -- point to point. A send never blocks the caller, so that torch may post them in any order.

    def send(self, tensors, dst, tag=0):
        tensor = self._checked(tensors, "send")
        flat = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        count, dtype = self._moved(flat)
        return self._posted(SEND, flat.data_ptr(), 0, count, dtype, dst, tag, tensors, (tensors, flat), None)

    def recv(self, tensors, src, tag=0):
        tensor = self._checked(tensors, "recv")
        flat, finish = tensor, None
        if not tensor.is_contiguous():
            flat = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            finish = _tensors.copier([(tensor, flat)])
        count, dtype = self._moved(flat)
        return self._posted(RECV, 0, flat.data_ptr(), count, dtype, src, tag, tensors, (tensors, flat), finish)

    def recv_anysource(self, tensors, tag=0):
        return self.recv(tensors, -1, tag)

    # -- coalescing: torch drops every work handed out between start and end, so the last one covers them all

    def start_coalescing(self, *device):
        self._coalescing = []

    def end_coalescing(self, *device):
        works, self._coalescing = self._coalescing, None
        return join(works or [], [], None, self._device)

    # -- life of the group

    def set_timeout(self, timeout):
        self._timeout = timeout
        self._comm.set_timeout(timeout.total_seconds())

    def shutdown(self):
        self._comm.close()
        if self in _live:
            _live.remove(self)

    def abort(self):
        self._comm.abort()

    def name(self):
        return "hetccl"

    def getBackendName(self):
        return "hetccl"

    def _get_sequence_number_for_group(self):
        return 0

    def _set_sequence_number_for_group(self):
        pass

    # -- how an operation is started

    def _start(self, int op, in_ptr, out_ptr, count, int dtype, int redop, int root, opts, outputs, keep, finish=None,
               bint ours=False):
        """Runs the operation here if the caller wants to block, else posts it. `ours`: in memory of our device. Returns its work."""
        timeout = _seconds(opts.timeout)
        try:
            if opts.asyncOp or self._coalescing is not None:
                stream = self._current_stream()
                work = self._work((self._post(op, in_ptr, out_ptr, count, dtype, redop, root, 0, timeout, keep, None, 1.0, stream,
                                             ours),), outputs, finish)
                if self._coalescing is not None:
                    self._coalescing.append(work)
                return work
            self._run(op, in_ptr, out_ptr, count, dtype, redop, root, timeout, 1.0, None, self._current_stream(), ours)
        except Exception as error:
            raise for_torch(error)
        if finish is not None:
            finish()
        return None if self.ENDS_SILENTLY else HetWork((), outputs)

    def _work(self, works, outputs, finish=None):
        """What torch gets: with the device and streams of this group."""
        return HetWork(works, outputs, finish, self._device)

    def _posted(self, int op, in_ptr, out_ptr, count, int dtype, int peer, tag, outputs, keep, finish):
        """Posts a send or a receive. Returns its work."""
        try:
            stream = self._current_stream()
            work = self._work((self._post(op, in_ptr, out_ptr, count, dtype, SUM, peer, tag, 0.0, keep, None, 1.0, stream),), outputs, finish)
        except Exception as error:
            raise for_torch(error)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _gather_into(self, flat, source, opts, outputs, finish):
        """all_gather of contiguous `source` into contiguous `flat`."""
        pointer, place = source.data_ptr(), flat.data_ptr() + self._rank * source.nbytes
        if pointer != place and _tensors.overlap(flat, source):
            source = source.detach().clone()
            pointer = source.data_ptr()
        return self._start(ALL_GATHER, pointer, flat.data_ptr(), source.numel(), self._dtype(source), SUM, 0, opts, outputs,
                           (flat, source, outputs), finish)

    def _reduce_scatter_flat(self, out, flat, opts):
        """reduce_scatter of contiguous `flat` into `out`."""
        try:
            dtype = _tensors.dtype_code(out)
            code, factor = _tensors.reduction(opts.reduceOp)
        except Exception as error:
            raise for_torch(error)
        if factor is not None:
            flat = flat * factor
        target, finish = out, None
        if not out.is_contiguous() or _tensors.overlap(out, flat):
            target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            finish = _tensors.copier([(out, target)])
        return self._start(REDUCE_SCATTER, flat.data_ptr(), target.data_ptr(), out.numel(), dtype, code, 0, opts, [out],
                           (flat, target, out), finish)

    # -- checks

    def _side_by_side(self, whole, part):
        """Where both are, if they need no copy: plain, of one known dtype, `whole` a block a rank, apart or in place."""
        cdef int place = plain(whole, self._index)
        cdef size_t a, b, n, more
        if (place == ODD or plain(part, self._index) != place or part.dtype is not whole.dtype or whole.dtype not in DTYPES
                or whole.numel() != part.numel() * self._size):
            return ODD
        a, b, n = whole.data_ptr(), part.data_ptr(), part.nbytes
        more = n * <size_t>self._size
        return place if n == 0 or b == a + n * <size_t>self._rank or b + n <= a or a + more <= b else ODD

    def _checked(self, tensors, call):
        try:
            tensor = _tensors.one(tensors, call)
            if not (tensor.is_cpu or tensor.device == self._device) or tensor.layout is not STRIDED:
                _tensors.check_tensor(tensor, self._device)
        except Exception as error:
            raise for_torch(error)
        return tensor

    def _sizes(self, call, whole, part, expected):
        try:
            _tensors.same_dtype(call, whole, part)
            if whole.numel() != expected:
                raise _tensors.UsageError(
                    f"{call}: the larger tensor must have {expected} elements ({part.numel()} for each of {self._size} ranks), "
                    f"it has {whole.numel()}")
        except Exception as error:
            raise for_torch(error)

    def _dtype(self, tensor):
        code = DTYPES.get(tensor.dtype)
        if code is None:
            try:
                _tensors.dtype_code(tensor)
            except Exception as error:
                raise for_torch(error)
        return code

    def _moved(self, tensor):
        """(count, dtype) for data that is only moved: bytes, where the core has no name for the dtype."""
        code = DTYPES.get(tensor.dtype)
        return (tensor.nbytes, UINT8) if code is None else (tensor.numel(), code)

    # older and newer names of the same calls
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    recvAnysource = recv_anysource
    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing


cdef int plain(tensor, int index) except? -1:
    """Whether a tensor is dense and contiguous, on the CPU or on our device, number `index`."""
    cdef int place = HOSTS if tensor.is_cpu else OURS if index >= 0 and tensor.is_cuda and tensor.get_device() == index else ODD
    return place if place != ODD and tensor.layout is STRIDED and tensor.is_contiguous() else ODD


cdef double _seconds(timeout) except? -1.0:
    """Seconds of a timedelta of torch's options; 0 (the group's own) for its mark "unset", which is negative."""
    return timeout.total_seconds() if timeout.days >= 0 else 0.0


class HetcclProcessGroup(HetcclOps, c10d.ProcessGroup):
    """For torch before 2.14, where a Python class can be a process group but not a back end.

    torch.distributed's functions, the only callers that ask to block, take None for "has ended" ("the backend has sync'ed")."""

    ENDS_SILENTLY = True

    def __init__(self, comm, store, rank, size, name, timeout):
        c10d.ProcessGroup.__init__(self, rank, size)  # the form with a store cannot be subclassed in 2.13
        self._description = "undefined"
        self._setup(comm, store, rank, size, name, timeout)

    def getRank(self):
        return self._rank

    def getSize(self):
        return self._size

    # Asked for by functional collectives, DTensor, FSDP2 and torch.compile; the base class has no answer.
    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = name

    def getGroupDesc(self):
        return self._description

    def setGroupDesc(self, description):
        self._description = description

    def get_group_store(self):
        return self._store

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        self._monitored_barrier(self._timeout if timeout is None else timeout, wait_all_ranks)


if HAS_PYTHON_BACKEND:

    class HetcclBackend(HetcclOps, c10d.Backend):
        """For torch 2.14 and newer. Every property must be overridden: reading one of the base class recurses for ever."""

        def __init__(self, comm, store, rank, size, name, timeout):
            c10d.Backend.__init__(self, rank, size)
            self._options = c10d.Backend.Options("hetccl", timeout)
            self._setup(comm, store, rank, size, name, timeout)

        @property
        def options(self):
            return self._options

        @property
        def supports_coalescing(self):
            return True

        @property
        def supports_splitting(self):
            return False

        @property
        def supports_time_estimate(self):
            return False

        @property
        def supports_shrinking(self):
            return False

        @property
        def supports_reconfigure(self):
            return False

        @property
        def supports_window(self):
            return False

        def supports_tensor_alloc(self, device):
            return False

        def monitored_barrier(self, opts=None, wait_all_ranks=False):
            self._monitored_barrier((opts or c10d.BarrierOptions()).timeout, wait_all_ranks)

    GROUP_CLASS = HetcclBackend
else:
    HetcclBackend = None
    GROUP_CLASS = HetcclProcessGroup
