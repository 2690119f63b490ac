# SPDX-License-Identifier: Apache-2.0
cdef extern from "combine.h" nogil:
    size_t hetccl_dtype_size(int dtype)
    int hetccl_can_combine(int dtype, int redop)
    int hetccl_combine(void *const *dst, int n_dst, const void *const *src, int n_src, size_t count, int dtype,
                       int redop, double divisor)
    int hetccl_can_scale(int dtype, double factor)
    int hetccl_scale(void *dst, const void *src, size_t count, int dtype, double factor)
