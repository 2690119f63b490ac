# SPDX-License-Identifier: Apache-2.0
"""A short selection of PyTorch's own tests (`tox -e torch-suite` runs all), and that the lists can fail."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import suite
from suite import Ended

from hetccl.testing.usable import require_vendor

torch = pytest.importorskip("torch")

# About twenty: each kind of operation once, the tests that need a detail of ours, and each kind of exclusion.
SHORT = {
    "gloo": "^test_("
    + "|".join(
        [
            "DistributedDataParallelCPU",
            "accumulate_gradients_no_sync_allreduce_with_then_hook",
            "all_gather_coalesced_with_empty",
            "all_gather_object_subgroup",
            "all_reduce_coalesced_full_group_product",
            "all_reduce_complex_unsupported_ops",
            "all_reduce_sum_async",
            "all_reduce_sum_cuda",
            "barrier_timeout_full_group",
            "batch_isend_irecv_gloo_tags",
            "broadcast_group",
            "ddp_logging_data_cpu",
            "destroy_group",
            "gather_checks",
            "get_backend",
            "monitored_barrier_gloo_rank_0_timeout",
            "reduce_full_group_min",
            "scatter_object_list",
            "send_recv_any_source_torch_profiler",
            "sparse_all_reduce_sum",
        ]
    )
    + ")$",
    "mpi": "^test_all_to_all_single_unequal_split_group$|^test_all_to_all_complex$",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_selection_ends_as_listed(require: object) -> None:
    require(importlib.util.find_spec("expecttest"), "expecttest", "pip install expecttest")  # type: ignore[operator]
    require_vendor("oneccl")
    listed = suite.read_list(suite.list_path("three"))
    if not listed:
        pytest.skip(f"there is no list for torch {torch.__version__}; to make it: suite.py three --update")
    found = suite.run("three", "hetccl", only=SHORT)
    assert len(found) == 22
    stay, _ = suite.settled("three", found, listed, whole=False)
    assert not stay, "\n".join(stay)


def test_what_is_not_as_listed_is_found() -> None:
    listed = [
        Ended("gloo", "test_a", "passed"),
        Ended("gloo", "test_b", "failed", "why"),
        Ended("gloo", "test_c", "skipped", "x"),
    ]
    assert suite.differences(listed, listed) == []
    newly_fails = [Ended("gloo", "test_a", "failed", "boom"), *listed[1:]]
    newly_passes = [listed[0], Ended("gloo", "test_b", "passed"), listed[2]]
    unknown = [*listed, Ended("mpi", "test_a", "passed")]
    for found in (newly_fails, newly_passes, unknown, listed[:2]):
        assert len(suite.differences(found, listed)) == 1


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "lists" / "three-torch-0.1.txt"
    found = [
        Ended("gloo", "test_a", "passed"),
        Ended("gloo", "test_b", "failed", "Error: x"),
        Ended("mpi", "test_a", "passed"),
    ]
    suite.write_list(path, "three", found)
    assert suite.read_list(path) == found
    path.write_text(path.read_text().replace("Error: x", "for a reason"))
    suite.write_list(path, "three", found)  # what is written by hand stays
    assert suite.read_list(path)[1].reason == "for a reason"


def test_every_exclusion_has_a_reason() -> None:
    lists = list((Path(__file__).parent / "lists").glob("*.txt"))
    assert lists
    for path in lists:
        listed = suite.read_list(path)
        assert len(listed) > 250 and all(old.outcome == "passed" or old.reason for old in listed), path
