# SPDX-License-Identifier: Apache-2.0
# Texts and times between C and Python.
from libc.stdint cimport uint64_t

cdef enum:
    LONG_AGO = 0x4000000000000000  # nanoseconds that never pass


cdef inline uint64_t nanoseconds(double seconds) noexcept nogil:
    return <uint64_t>(max(seconds, 0.0) * 1e9) if seconds < 1e9 else LONG_AGO


cdef inline str text(const char *s):
    return (<bytes>s).decode("utf-8", "replace") if s != NULL else ""
