# SPDX-License-Identifier: Apache-2.0
"""Which torch device a rank's vendor serves, and the stream that the caller is on. "cuda" may be NVIDIA's or AMD's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["complete_on", "current_stream_of", "device_of", "device_type"]


def device_type() -> str:
    """The device type that a rank of this process is for, where HETCCL_RANKS does not say: "cuda" if there is one."""
    if not torch.cuda.is_available():
        return "cpu"
    from hetccl.core import registry

    takers = [v for v in registry.vendors() if v.driver is not None and v.availability.ok]
    return "cuda" if any("cuda" in getattr(v.driver, "torch_device_types", ()) for v in takers) else "cpu"


def device_of(comm: Any) -> Any:
    """The torch.device whose memory the communicator takes directly, or None if that is the CPU."""
    if "cuda" not in comm.device_types or not torch.cuda.is_available():
        return None
    return torch.device("cuda", comm.device_index)


def current_stream_of(device: Any) -> Callable[[], int]:
    """A function that returns the caller's current stream on `device` as a number; -1 where there is none."""
    if device is None:
        return _no_stream
    index = device.index
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if quick is not None:
        return lambda: quick(index)
    return lambda: torch.cuda.current_stream(device).cuda_stream


def complete_on(device: Any, stream: int, future: Any, value: Any) -> None:
    """Completes a future of `device` behind what `stream` holds now, without another stream in between."""
    own = _own.get((device.index, stream))
    if own is None:
        own = torch.cuda.ExternalStream(stream, device=device)
        own = _own[device.index, stream] = (own.stream_id, own.device_index, own.device_type)
    # torch's own functions for this make an object for each stream that they name, which takes longer than all the rest
    place, before = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(device.index)
    _set_stream(own)
    try:
        future.set_result(value)
    finally:
        _set_stream(before)
        if place != device.index:
            torch.cuda.set_device(place)


_own: dict[tuple[int, int], tuple[int, int, int]] = {}  # streams of communicators as torch numbers them


def _set_stream(number: tuple[int, int, int]) -> None:
    torch._C._cuda_setStream(stream_id=number[0], device_index=number[1], device_type=number[2])


def _no_stream() -> int:
    return -1
