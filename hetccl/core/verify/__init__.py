# SPDX-License-Identifier: Apache-2.0
"""Proves that the plans of all ranks together do what an operation promises, before any of them runs. See
docs/design/verification.md."""

from __future__ import annotations

from hetccl.core.verify.checker import Proof, representative_counts, verify_class, verify_plans
from hetccl.core.verify.machine import PlanFault

__all__ = ["PlanFault", "Proof", "representative_counts", "verify_class", "verify_plans"]
