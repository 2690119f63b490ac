# SPDX-License-Identifier: Apache-2.0
"""What Python reads of a communicator's C half, and sets in it once, by its address (`Core.address`)."""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc

from hetccl.core._engine cimport hx_comm, hx_direct_sent, hx_direct_waits, hx_group, hx_identity
from hetccl.native.combine cimport hetccl_dtype_size

from hetccl.errors import UnsupportedError

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "transfer")


def counters(uintptr_t address):
    """Counters of this rank, by name."""
    cdef hx_comm *c = <hx_comm *>address
    cdef int i
    return {
        "operations": {op: c.n_ops[op] for op in range(16) if c.n_ops[op]},
        "vendor_calls": {name: c.vendor_calls[i] for i, name in enumerate(NAMES)},
        "group_calls": c.group_calls,
        "device_sums": c.device_sums,
        "border_sent": c.border_sent,
        "staged_bytes": c.staged_bytes,
        "past_bytes": c.past_bytes,
    }


def direct_sent(uintptr_t address, int peer):
    """Bytes sent to `peer` through the memory that both ranks share with their devices: no transport counts them."""
    return hx_direct_sent(<hx_comm *>address, peer)


def direct_waits(uintptr_t address, int peer):
    """What this rank has waited for on the direct path to a peer that shares no memory with it, in ns by name, or
    None. Several things can be waited for at once."""
    cdef uint64_t[6] ns
    if not hx_direct_waits(<hx_comm *>address, peer, ns):
        return None
    return dict(zip(("all", "copy_out", "room", "data", "copy_in", "sum"), (ns[i] for i in range(6)), strict=True))


def set_groups(uintptr_t address, groups):
    """`groups`: for each group of my island's ranks its vendor communicator (0: I am not in it) and its island ranks.

    Before the first operation.
    """
    cdef hx_comm *c = <hx_comm *>address
    cdef int i
    c.groups = <hx_group *>calloc(max(1, len(groups)), sizeof(hx_group))
    if c.groups == NULL:
        raise MemoryError
    for i, (comm, members) in enumerate(groups):
        c.groups[i].comm = <void *><uintptr_t>comm
        c.groups[i].first, c.groups[i].size = members[0], len(members)
    c.n_groups = len(groups)


def identity(int dtype, int redop, int count=1):
    """The bytes of `count` elements that leave the operator's other side as it is. Raises `UnsupportedError` if there are
    none."""
    cdef bytearray held = bytearray(count * hetccl_dtype_size(dtype))
    cdef unsigned char[::1] view = held
    if hx_identity(&view[0], count, dtype, redop):
        raise UnsupportedError(f"operator {redop} has no neutral element in element type {dtype}")
    return bytes(held)
