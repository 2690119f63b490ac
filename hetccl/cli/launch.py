# SPDX-License-Identifier: Apache-2.0
"""Starting ranks on this host, for programs: the body is in the core because the test kit uses it too."""

from hetccl.core.launch import Job, LaunchError, RankOutput, run_ranks

__all__ = ["Job", "LaunchError", "RankOutput", "run_ranks"]
