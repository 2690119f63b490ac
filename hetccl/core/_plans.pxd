# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint64_t

from hetccl.core._engine cimport hx_flow, hx_plan, hx_step

cdef enum:
    OPS = 16
    LIMITS = 31


cdef class CompiledPlan:
    cdef hx_plan p
    cdef readonly object plan
    cdef fill_step(self, hx_step *to, step, bint signal)
    cdef fill_flow(self, hx_flow *to, flow)


cdef class PlanCache:
    cdef dict plans, shaped
    cdef CompiledPlan last
    cdef uint64_t last_key
    cdef object planner
    cdef uint64_t limits[OPS][LIMITS]
    cdef int n_limits[OPS]
    cdef int learn(self, int op) except -1
    cdef readonly int hits, misses
    cdef CompiledPlan find(self, int op, int dtype, int redop, int root, uint64_t nbytes, shape)
