# SPDX-License-Identifier: Apache-2.0
"""torch.compile over collectives, and torch's own debug mode, on ranks of three vendors."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from torch_job import assert_passed, same

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(320)

THREE = "host:1,oneccl:1,sim-a:1"


def functional(dist: Any, rank: int, size: int) -> None:
    import torch
    import torch.distributed._functional_collectives as funcol

    def step(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        same(compiled(torch.full((4,), rank + 1.0)), torch.full((4,), size * (size + 1) + 1.0))


def in_place(dist: Any, rank: int, size: int) -> None:
    import torch

    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    same(compiled(torch.full((4,), rank + 1.0)), torch.full((4,), size * (size + 1) / 2 + 1))


def inductor(dist: Any, rank: int, size: int) -> None:
    """Compiled to C++, once for all ranks; a gather and a scatter in one graph, without a break."""
    import shutil
    import tempfile

    import torch
    import torch._inductor.config as inductor
    import torch.distributed._functional_collectives as funcol

    def step(x: torch.Tensor) -> torch.Tensor:
        gathered = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        return gathered + funcol.reduce_scatter_tensor(torch.cat([gathered * 2] * size), "sum", 0, dist.group.WORLD)

    place = [tempfile.mkdtemp(prefix="hetccl-test-") if rank == 0 else None]
    dist.broadcast_object_list(place, 0)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = place[0]
    inductor.compile_threads = 1
    inductor.cpp.simdlen = 1  # no trial compilations to find out what this CPU has
    inductor.cpp_cache_precompile_headers = False
    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    gathered = torch.arange(1.0, size + 1).repeat_interleave(4)
    same(compiled(torch.full((4,), rank + 1.0)), gathered + gathered * 2 * size)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(place[0], ignore_errors=True)


def debugged(dist: Any, rank: int, size: int) -> None:
    """Under TORCH_DISTRIBUTED_DEBUG=DETAIL. torch wraps the groups of newer torch and compares calls over Gloo."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    t = torch.full((4,), rank + 1.0)
    for _ in range(3):
        dist.all_reduce(t.fill_(rank + 1.0))
        same(t, torch.full((4,), size * (size + 1) / 2))
    out = torch.zeros(2 * size)
    dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    same(out, torch.arange(float(size)).repeat_interleave(2))
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        work = dist.broadcast(t.fill_(rank), 0, group=group, async_op=True)
        work.wait()
        same(t, torch.zeros(4))
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    ddp(torch.full((3, 4), float(rank))).sum().backward()
    same(ddp.module.weight.grad, torch.full((2, 4), 3.0 * (size - 1) / 2))
    dist.barrier()


COMPILED = (functional, in_place)


@pytest.mark.parametrize("check", COMPILED, ids=lambda check: check.__name__)
def test_compiled(check: Any) -> None:
    assert_passed(check, COMPILED, THREE)


def test_compiled_to_machine_code() -> None:
    assert_passed(inductor, (inductor,), "oneccl:1,sim-a:1")


def test_debug_detail() -> None:
    assert_passed(debugged, (debugged,), THREE, TORCH_DISTRIBUTED_DEBUG="DETAIL")
