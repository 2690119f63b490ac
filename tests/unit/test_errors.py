# SPDX-License-Identifier: Apache-2.0
"""Errors keep their facts, travel between processes and are what a reader expects them to be."""

from __future__ import annotations

import copy
import pickle

import pytest

from hetccl import errors

ALL = [getattr(errors, name) for name in errors.__all__]
FACTS = {"vendor": "foo", "code": 3, "ranks": (1, 2)}


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
def test_has_the_root_and_its_facts(kind: type[errors.HetcclError]) -> None:
    error = kind("what was asked", **FACTS)
    assert isinstance(error, errors.HetcclError)
    assert str(error) == "what was asked"
    assert error.facts == FACTS
    assert (error.vendor, error.code, error.ranks) == ("foo", 3, (1, 2))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(kind: type[errors.HetcclError], protocol: int) -> None:
    again = pickle.loads(pickle.dumps(kind("text", **FACTS), protocol))
    assert type(again) is kind and str(again) == "text" and again.facts == FACTS and again.code == 3


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
def test_copies(kind: type[errors.HetcclError]) -> None:
    again = copy.copy(kind("text", **FACTS))
    assert type(again) is kind and str(again) == "text" and again.facts == FACTS


def test_without_text_and_facts() -> None:
    again = pickle.loads(pickle.dumps(errors.HetcclError()))
    assert str(again) == "" and again.facts == {}


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.UsageError, ValueError),
        (errors.ConfigError, ValueError),
        (errors.MismatchError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.TransportError, ConnectionError),
        (errors.PeerLostError, OSError),
        (errors.TimedOutError, TimeoutError),
    ],
)
def test_is_the_builtin_as_well(kind: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="text"):
        raise kind("text")


def test_the_package_offers_every_error() -> None:
    import hetccl

    assert all(getattr(hetccl, name) is getattr(errors, name) for name in errors.__all__)
    assert set(errors.__all__) <= set(hetccl.__all__)


def test_the_package_names_what_it_does_not_have() -> None:
    import hetccl

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hetccl.nonsense
