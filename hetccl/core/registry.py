# SPDX-License-Identifier: Apache-2.0
"""Finds the drivers of vendors and transports by entry point, ours as well as foreign ones.

A driver asked for by name that is missing or unusable is an error with its own reason. One that was only met while
listing is shown as unavailable, whatever is wrong with it. Drivers found once are held for the life of the process.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetccl.core.log import get_logger
from hetccl.errors import HetcclError, PluginConflictError, PluginLoadError, PluginNotFoundError, UsageError
from hetccl.transports.base import TransportDriver
from hetccl.vendors.base import Availability, VendorDriver

__all__ = ["Listed", "NamedVendor", "best_vendor", "install_hint", "transport", "transports", "vendor", "vendors"]

VENDORS = "hetccl.vendors"
TRANSPORTS = "hetccl.transports"


class NamedVendor(NamedTuple):
    """A vendor as the user named it: "sim-a" is the driver "sim" with the variant "a"."""

    name: str
    driver: VendorDriver
    variant: str


@dataclass(frozen=True)
class Listed:
    """One installed driver, usable or not. `driver` is None when not even its module could be imported."""

    name: str
    kind: str  # "vendor" or "transport"
    distribution: str  # the installed package that brings it, "" if unknown
    driver: VendorDriver | TransportDriver | None
    availability: Availability


def vendor(name: str, probe: bool = True) -> NamedVendor:
    """The driver of vendor `name`, and its variant.

    Raises `PluginNotFoundError` if it is not installed, `PluginLoadError` if it cannot be loaded or, with `probe`,
    is not usable here, `PluginConflictError` if two packages offer it.
    """
    driver_name, variant = name, ""
    names = _names(VENDORS)
    if name not in names and "-" in name:
        driver_name, variant = name.split("-", 1)
    if driver_name not in names:
        raise _not_found(VENDORS, driver_name if variant else name)
    driver = _driver(VENDORS, driver_name)
    if variant and not driver.variants:
        raise UsageError(
            f"vendor {name!r}: {driver_name!r} has no variants; write {driver_name!r} and, to split its ranks "
            f"into islands, a label: {driver_name}@{variant}",
            vendor=name,
        )
    if probe:
        _require(name, "vendor", _probe(driver))
    return NamedVendor(name, driver, variant)


def transport(name: str, probe: bool = True) -> TransportDriver:
    """The driver of transport `name`. Raises as `vendor` does."""
    if name not in _names(TRANSPORTS):
        raise _not_found(TRANSPORTS, name)
    driver: TransportDriver = _driver(TRANSPORTS, name)
    if probe:
        _require(name, "transport", _probe(driver))
    return driver


def vendors() -> list[Listed]:
    """All installed vendor drivers by name, each probed. Never raises for a broken one."""
    return _listed(VENDORS)


def transports() -> list[Listed]:
    """All installed transport drivers by name, each probed. Never raises for a broken one."""
    return _listed(TRANSPORTS)


def best_vendor(torch_device_type: str = "cpu") -> NamedVendor:
    """What a rank takes when HETCCL_RANKS does not say: the usable automatic driver of the highest preference.

    Raises `PluginLoadError` that lists every candidate with its reason.
    """
    candidates = []
    refused: list[str] = []
    for name in sorted(set(_names(VENDORS))):
        try:
            driver = _driver(VENDORS, name)
        except HetcclError as error:
            get_logger("registry").debug("vendor %s: %s", name, error)
            refused.append(f"{name}: {error}")
            continue
        if driver.automatic and torch_device_type in driver.torch_device_types:
            candidates.append((-driver.preference, name, driver))
    for _, name, driver in sorted(candidates, key=lambda c: c[:2]):
        found = _probe(driver)
        if found.ok:
            return NamedVendor(name, driver, "")
        get_logger("registry").debug("vendor %s is not usable: %s", name, found.reason)
        refused.append(f"{name}: {found.reason}" + (f" ({found.remedy})" if found.remedy else ""))
    tried = "; ".join(refused) if refused else f"installed are only {_said(_names(VENDORS))}"
    raise PluginLoadError(f"no usable vendor takes {torch_device_type} tensors. {tried}", device_type=torch_device_type)


def install_hint(kind: str, name: str) -> str:
    """The line that installs a driver: a plug-in's package is named by a rule, so no table of names is needed; what is
    part of hetccl comes with hetccl."""
    if _built_in(kind, name):
        return (
            f"pip install -e {_ROOT}" if os.path.exists(os.path.join(_ROOT, "pyproject.toml")) else "pip install hetccl"
        )
    return f"pip install hetccl-{kind}-{name}"


_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_lock = threading.RLock()
_drivers: dict[tuple[str, str], Any] = {}
_entry_names: dict[str, list[str]] = {}


def _names(namespace: str) -> list[str]:
    """Names of the namespace's entry points, without importing any of their modules."""
    with _lock:
        if namespace not in _entry_names:
            from stevedore.named import NamedExtensionManager

            manager: NamedExtensionManager[Any] = NamedExtensionManager(
                namespace, names=[], on_missing_entrypoints_callback=None
            )
            _entry_names[namespace] = manager.entry_points_names()
        return _entry_names[namespace]


def _driver(namespace: str, name: str) -> Any:
    """The driver object, made at its first use."""
    with _lock:
        if (namespace, name) not in _drivers:
            _drivers[namespace, name] = _load(namespace, name)
        return _drivers[namespace, name]


def _load(namespace: str, name: str) -> Any:
    kind = _kind(namespace)
    if _names(namespace).count(name) > 1:
        raise _conflict(namespace, name)
    from stevedore.driver import DriverManager
    from stevedore.exception import MultipleMatches

    base = VendorDriver if namespace == VENDORS else TransportDriver
    try:
        # Two of one name are an error for it, by default.
        manager: DriverManager[Any] = DriverManager(namespace, name, invoke_on_load=True)
        driver: Any = manager.driver
    except MultipleMatches:
        raise _conflict(namespace, name) from None
    except Exception as error:  # a plug-in's module may raise anything
        raise PluginLoadError(
            f"{kind} {name!r} is installed{_from(namespace, name)}, but its driver cannot be loaded: "
            f"{type(error).__name__}: {error}. Reinstall it, or remove it",
            name=name,
        ) from error
    if not isinstance(driver, base):
        raise PluginLoadError(
            f"{kind} {name!r}{_from(namespace, name)}: its entry point makes a {type(driver).__name__}, "
            f"not a {base.__name__} of hetccl.{kind}s.base",
            name=name,
        )
    return driver


def _listed(namespace: str) -> list[Listed]:
    found = []
    for name in sorted(set(_names(namespace))):
        try:
            driver = _driver(namespace, name)
            availability = _probe(driver)
        except HetcclError as error:
            driver, availability = None, Availability(False, str(error))
        if not availability.ok:
            get_logger("registry").debug("%s %s is not usable: %s", _kind(namespace), name, availability.reason)
        package = ", ".join(_distributions(namespace, name))
        found.append(Listed(name, _kind(namespace), package, driver, availability))
    return found


def _probe(driver: Any) -> Availability:
    """The driver's own answer; a probe promises not to raise, so one that does is described, not trusted."""
    try:
        found = driver.probe()
    except Exception as error:
        return Availability(False, f"its probe failed: {type(error).__name__}: {error}")
    if not isinstance(found, Availability):
        return Availability(False, f"its probe answered {found!r}, not an Availability")
    return found


def _require(name: str, kind: str, found: Availability) -> None:
    if not found.ok:
        remedy = f". {found.remedy}" if found.remedy else ""
        raise PluginLoadError(
            f"{kind} {name!r} is installed but cannot be used: {found.reason}{remedy}",
            name=name,
            reason=found.reason,
            remedy=found.remedy,
        )


def _not_found(namespace: str, name: str) -> PluginNotFoundError:
    kind = _kind(namespace)
    names = _names(namespace)
    if _distributions(namespace, name):
        # stevedore keeps its list on disk and can miss a package that was installed a moment ago.
        return PluginNotFoundError(
            f"{kind} {name!r} is installed, but stevedore's cached list does not have it yet; "
            "remove the folder ~/.cache/python-entrypoints",
            name=name,
        )
    if not names or _built_in(kind, name):
        found = f"installed are only {_said(names)}" if names else "nor any other"
        return PluginNotFoundError(
            f"{kind} {name!r} cannot be found, {found}: hetccl itself is not installed, only on the path. "
            f"Run:  pip install -e {_ROOT}",
            name=name,
            installed=tuple(sorted(set(names))),
        )
    return PluginNotFoundError(
        f"{kind} {name!r} is not installed; installed are {_said(names)}. Run:  {install_hint(kind, name)}",
        name=name,
        installed=tuple(sorted(set(names))),
    )


def _built_in(kind: str, name: str) -> bool:
    """Whether hetccl itself has this driver, whatever is installed: they lie in folders of their names."""
    return name.isidentifier() and os.path.exists(os.path.join(_ROOT, "hetccl", f"{kind}s", name, "driver.py"))


def _conflict(namespace: str, name: str) -> PluginConflictError:
    owners = _distributions(namespace, name)
    return PluginConflictError(
        f"{_kind(namespace)} {name!r} is offered by {len(owners)} packages: {_said(owners)}. Uninstall one of them",
        name=name,
        distributions=tuple(owners),
    )


def _distributions(namespace: str, name: str) -> list[str]:
    """Packages that declare the entry point: "hetccl-vendor-x 1.0"."""
    import importlib.metadata

    found = []
    for distribution in importlib.metadata.distributions():
        if any(e.group == namespace and e.name == name for e in distribution.entry_points):
            found.append(f"{distribution.metadata['Name']} {distribution.version}")
    return sorted(set(found))


def _from(namespace: str, name: str) -> str:
    owners = _distributions(namespace, name)
    return f" (package {owners[0]})" if owners else ""


def _kind(namespace: str) -> str:
    return "vendor" if namespace == VENDORS else "transport"


def _said(names: list[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"
