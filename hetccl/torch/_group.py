# SPDX-License-Identifier: Apache-2.0
"""Makes the communicator and the process group for one call of init_process_group or new_group."""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import Any

from torch._C import _distributed_c10d as c10d

from hetccl.core.communicator import Communicator
from hetccl.core.config import Config
from hetccl.core.ranks import check_size, format_ranks, parse_ranks
from hetccl.core.topology_file import TopologyFile, load_topology
from hetccl.errors import ConfigError, UsageError
from hetccl.torch import HetcclOptions
from hetccl.torch._compat import warn_if_untried
from hetccl.torch._errors import for_torch
from hetccl.torch._glue import GROUP_CLASS, _live
from hetccl.torch._streams import device_type

__all__ = ["communicator_of", "make_group"]

JOIN_AT_LEAST_S = 15.0  # a shorter timeout is meant for operations; processes that come up need longer


def make_group(group: Any, pg_options: Any) -> Any:
    """A process group (torch before 2.14) or back end. `group` has torch's description of it.

    Blocks until all members have joined or the group's timeout, at least 15 s, has passed. Raises hetccl's errors,
    which are also DistBackendError.
    """
    warn_if_untried()
    if getattr(getattr(group, "process_group", None), "bound_device_id", None) is not None:
        warnings.warn(
            "hetccl: leave device_id out: ranks without an accelerator cannot give one, and torch then takes "
            "other paths on each kind of rank; set HETCCL_DEVICE instead",
            stacklevel=2,
        )
    try:
        options = _options(pg_options)
        members = list(group.global_ranks_in_group)
        ranks = _member_ranks(options.ranks or os.environ.get("HETCCL_RANKS", ""), members)
        timeout = options.timeout if options.timeout is not None else group.timeout.total_seconds()
        store, name = _own_corner(group.store, group.group_id, members, group.group_size)
        comm = Communicator(
            store,
            group.group_rank,
            group.group_size,
            name=name,
            ranks=ranks,
            transports=options.transports,
            timeout=max(timeout, JOIN_AT_LEAST_S),
            device_type=device_type(),
            topology=_member_topology(options.topology or Config.from_env().topology, members),
        )
        if timeout < JOIN_AT_LEAST_S:
            comm.set_timeout(timeout)
    except Exception as error:
        raise for_torch(error) from error.__cause__
    return GROUP_CLASS(comm, store, group.group_rank, group.group_size, group.group_id, group.timeout)


def communicator_of(group: Any) -> Communicator:
    """The communicator of a process group that hetccl serves."""
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    if group is None:
        raise for_torch(UsageError("there is no process group yet; call torch.distributed.init_process_group first"))
    ours = [live for live in _live if live is group or live._name == group.group_name]
    if not ours:
        raise for_torch(UsageError(f"hetccl does not serve the process group {group.group_name!r}"))
    return ours[-1]._comm


def _options(given: Any) -> HetcclOptions:
    if given is None:
        return HetcclOptions()
    if isinstance(given, HetcclOptions):
        return given
    try:
        return HetcclOptions(**given)
    except TypeError:
        raise ConfigError(
            f"pg_options of hetccl must be HetcclOptions or a dict of its fields, got {given!r}"
        ) from None


def _member_ranks(spec: str, members: list[int]) -> str | None:
    """The part of the job's make-up that belongs to a group. `members`: its global ranks, empty for the whole job."""
    if not spec:
        return None
    whole = parse_ranks(spec)
    world = _world_size()
    if world is not None:
        check_size(whole, world)
    return format_ranks([whole[rank] for rank in members]) if members else spec


def _member_topology(path: str, members: list[int]) -> TopologyFile | None:
    """The part of the topology file that belongs to a group."""
    if not path:
        return None
    whole = load_topology(path)
    return whole.part(members) if members and len(members) != whole.size else whole


def _world_size() -> int | None:
    """Ranks of the job, once there is a default group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else None


def _own_corner(store: Any, group: str, members: list[int], size: int) -> tuple[Any, str]:
    """(store, name) for one life of one group, the same on all its members and used by nobody else.

    torch's outermost prefix is the first device type that this rank registered, so it goes: ranks may differ in that.
    Group names repeat, with other members, when a program leaves all groups and joins again on the same store. So the
    members are part of the name, and arrivals are counted.
    """
    if isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    listed = ",".join(map(str, members)) or "all"
    if len(listed) > 40:
        listed = hashlib.sha256(listed.encode()).hexdigest()[:16]
    key = f"hetccl/{size}/{listed}"
    life = (store.add(f"{key}/arrivals", 1) - 1) // size
    name = f"{group} (ranks {listed})" + (f" life {life + 1}" if life else "")
    return c10d.PrefixStore(f"{key}/{life}/", store), name
