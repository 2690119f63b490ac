# SPDX-License-Identifier: Apache-2.0
"""Intel oneCCL on CPUs, as a vendor of hetccl."""

__all__: list[str] = []
