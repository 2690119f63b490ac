# SPDX-License-Identifier: Apache-2.0
"""Communication hooks for DistributedDataParallel. Annotations are objects here: DDP compares them with its own."""

from typing import Any

import torch
import torch.distributed as dist

from hetccl.errors import UsageError
from hetccl.torch._errors import for_torch

__all__ = ["WeightedAverage", "weighted_average_hook"]


class WeightedAverage:
    """State of `weighted_average_hook`: how many rows each rank's gradient is the mean of.

    ddp: the `DistributedDataParallel` module that the hook is for; gives the group and the device
    share: this rank's part of every batch, from 0 to 1, if that never changes; the shares of all ranks make 1, which
        nobody checks. Without it each rank says `state.batch = rows` before the backward pass, and the ranks add
        their rows up on the device, beside the forward pass. Once is enough while no rank's number changes; when one
        does, all ranks have to say theirs.
    """

    def __init__(self, ddp: Any, share: float | None = None) -> None:
        if share is not None and not 0.0 <= share <= 1.0:
            raise for_torch(UsageError(f"a rank's share of a batch is from 0 to 1, not {share}"))
        self._group = ddp.process_group
        self._device = next(ddp.parameters()).device
        self._rows: int | None = None
        self._factor: Any = share
        self._total: Any = None
        self._adding: Any = None

    @property
    def batch(self) -> int | None:
        """Rows of this rank's batch that the next gradients are the mean of, 0 if it has none; None with a share."""
        return self._rows

    @batch.setter
    def batch(self, rows: int) -> None:
        if self._rows is None and self._factor is not None:
            raise for_torch(UsageError("this rank was given a fixed share of every batch, so no batch can be set"))
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise for_torch(UsageError(f"a batch has a whole number of rows, not {rows!r}"))
        self._rows = rows
        self._total = torch.full((1,), rows, dtype=torch.float64, device=self._device)
        self._adding = dist.all_reduce(self._total, group=self._group, async_op=True)

    def _weigh(self, gradients: Any) -> None:
        """Scales this rank's gradients by its part of all rows, in place, on the current stream."""
        if self._factor is None and self._adding is None:
            raise for_torch(
                UsageError("weighted_average_hook: set state.batch to this rank's number of rows before backward()")
            )
        if self._adding is not None:
            self._adding.wait()
            self._adding = None
            self._factor = self._rows / self._total.clamp(min=1.0)
        if self._rows == 0 or (self._rows is None and self._factor == 0.0):
            gradients.zero_()  # the mean of no rows is not a number, and would stay one
        else:
            gradients.mul_(self._factor)


def weighted_average_hook(state: WeightedAverage, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients over rows instead of over ranks, so that uneven batches give the gradient of one big batch.

    state = hetccl.torch.WeightedAverage(ddp)
    ddp.register_comm_hook(state, hetccl.torch.weighted_average_hook)
    ...
    state.batch = len(rows)
    loss(ddp(rows)).backward()      # loss: the mean over this rank's rows

    Rank r's gradients are scaled by its rows / all rows, then summed; DDP's own averaging is off. Works with every
    back end. Raises `UsageError` out of `backward()` if no batch was set.
    """
    gradients = bucket.buffer()
    state._weigh(gradients)
    work = dist.all_reduce(gradients, group=state._group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
