# SPDX-License-Identifier: Apache-2.0
"""The arrival board, by its address: for the control plane."""

from libc.stdint cimport uintptr_t

from hetccl.core._engine cimport hx_board, hx_board_abort, hx_board_bytes, hx_board_mark


def nbytes(int size):
    return hx_board_bytes(size)


def init(uintptr_t address, int size):
    (<hx_board *>address).size = size


def mark(uintptr_t address, int rank, int state):
    """state 1: left, 2: lost"""
    hx_board_mark(<hx_board *>address, rank, state)


def abort(uintptr_t address, int rank):
    hx_board_abort(<hx_board *>address, rank)


def state(uintptr_t address, int rank):
    return (<hx_board *>address).entry[rank].state


def set_direct(uintptr_t address, int rank, int answer):
    (<hx_board *>address).entry[rank].direct = answer


def direct(uintptr_t address, int rank):
    return (<hx_board *>address).entry[rank].direct


def calls(uintptr_t address):
    """What each rank of this host called last: (rank, op, dtype, redop, root, count, sequence)."""
    cdef hx_board *b = <hx_board *>address
    return [(r, b.entry[r].now.op, b.entry[r].now.dtype, b.entry[r].now.redop, b.entry[r].now.root, b.entry[r].now.count,
             b.entry[r].now.sequence) for r in range(b.size)]


def aborted_by(uintptr_t address):
    """Rank that aborted, or -1."""
    return <int>(<hx_board *>address).aborted_by - 1
