# SPDX-License-Identifier: Apache-2.0
"""AMD GPUs and RCCL, as a vendor of hetccl."""

__all__: list[str] = []
