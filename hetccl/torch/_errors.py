# SPDX-License-Identifier: Apache-2.0
"""hetccl's errors as torch users expect them: each is also a `torch.distributed.DistBackendError`."""

from __future__ import annotations

import torch.distributed as dist

from hetccl import errors

__all__ = ["for_torch"]

_twins: dict[type, type] = {}

for _name in errors.__all__:
    _base = getattr(errors, _name)
    _twin = type("Torch" + _name, (_base, dist.DistBackendError), {"__module__": __name__, "__doc__": _base.__doc__})
    globals()["Torch" + _name] = _twins[_base] = _twin  # a module attribute, so that it can be pickled


def for_torch(error: BaseException) -> BaseException:
    """The same error as a DistBackendError too. Errors that are not hetccl's come back as they are."""
    twin = _twins.get(type(error))
    if twin is None:
        return error
    new = twin(str(error), **error.facts)  # type: ignore[attr-defined]
    new.__cause__ = error.__cause__
    return new.with_traceback(error.__traceback__)
