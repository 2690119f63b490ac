# SPDX-License-Identifier: Apache-2.0
"""hetccl as a back end of `torch.distributed`: `dist.init_process_group("hetccl")`.

Installed, it is found by torch's own autoload. Where autoload is off, `import hetccl.torch` registers it as well.
This module runs inside `import torch`: it imports nothing heavy, and a broken core shows only when a group is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetccl.torch._hooks import WeightedAverage, weighted_average_hook

__all__ = ["HetcclOptions", "WeightedAverage", "communicator", "register", "weighted_average_hook"]


@dataclass(frozen=True)
class HetcclOptions:
    """What a process group may be given as `pg_options`. A dict with the same keys is taken too.

    ranks: vendor of every rank of the job, e.g. "oneccl:2,host:2" (default: `HETCCL_RANKS`)
    topology: path of a topology file (default: `HETCCL_TOPOLOGY`)
    transports: transports by name, best first, e.g. "shm,tcp" (default: `HETCCL_TRANSPORTS`)
    timeout: seconds for every operation (default: the timeout of the process group)
    """

    ranks: str | None = None
    topology: str | None = None
    transports: str | None = None
    timeout: float | None = None


def register() -> None:
    """Makes "hetccl" known to torch.distributed. Calling it again does nothing."""
    import torch.distributed as dist

    backend = dist.Backend
    if "HETCCL" in backend._plugins:
        return
    # One device list with "cpu" first on every rank; and the defaults of other devices stay as they were, because
    # torch makes a newly registered back end the default of every device type that has none yet.
    defaults = backend.default_device_backend_map
    before = dict(defaults)
    backend.register_backend("hetccl", _create, extended_api=True, devices=["cpu", "cuda", "xpu"])
    defaults.clear()
    defaults.update(before)


def communicator(group: Any = None) -> Any:
    """The `Communicator` under a process group (default: the default group), for `explain()`, `stats()` and the like.

    Raises `UsageError` if the group is not hetccl's.
    """
    from hetccl.torch._group import communicator_of

    return communicator_of(group)


def __getattr__(name: str) -> Any:
    """What needs torch.distributed whole is imported when it is asked for."""
    if name in ("WeightedAverage", "weighted_average_hook"):
        from hetccl.torch import _hooks

        return getattr(_hooks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _create(group_options: Any, pg_options: Any) -> Any:
    """Called by torch for every new group; here, and only here, the core is imported."""
    from hetccl.torch._group import make_group

    return make_group(group_options, pg_options)


def _autoload() -> None:
    """Entry point `torch.backends`. An exception here would make `import torch` fail, so none leaves it."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            register()
    except Exception as error:
        import warnings

        warnings.warn(f"hetccl: the torch back end was not registered: {error}", stacklevel=2)


_autoload()  # `import hetccl.torch` is enough where torch's autoload is switched off
