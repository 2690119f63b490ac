# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs and NCCL, as a vendor of hetccl."""

__all__: list[str] = []
