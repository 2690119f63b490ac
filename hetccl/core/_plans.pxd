# SPDX-License-Identifier: Apache-2.0
from hetccl.core._engine cimport hx_flow, hx_plan, hx_step


cdef class CompiledPlan:
    cdef hx_plan p
    cdef readonly object plan
    cdef fill_step(self, hx_step *to, step, bint signal)
    cdef fill_flow(self, hx_flow *to, flow)


cdef class PlanCache:
    cdef dict plans, shaped
    cdef object planner
    cdef readonly int hits, misses
    cdef CompiledPlan find(self, int op, int dtype, int redop, int root, bint small, shape)
