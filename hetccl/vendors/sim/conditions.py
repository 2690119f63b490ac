# SPDX-License-Identifier: Apache-2.0
"""Under which conditions a pretend accelerator runs: slow links, poisoned memory, streams in the worst order.

Without any of these variables it runs as fast and as orderly as the machine lets it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetccl.errors import ConfigError
from hetccl.vendors.base import Option

__all__ = ["OPTIONS", "Conditions"]

SEED = Option(
    "HETCCL_SIM_SEED",
    "Seed of random delays and orders (a number). Unset: drawn, and shown at log level debug and by doctor.",
)
DELAY = Option(
    "HETCCL_SIM_DELAY_US", "Longest random delay, in microseconds, before each piece of work of a stream.", "0"
)
ORDER = Option(
    "HETCCL_SIM_ORDER",
    '"fair", or "adversarial": one stream after another is favoured and the others are held back, up to 2 ms a piece '
    "of work, so that independent streams overtake each other in every way.",
    "fair",
)
POISON = Option(
    "HETCCL_SIM_POISON", "1: fresh and freed memory of the device, and pinned host memory, is overwritten by NaNs.", "0"
)
RATE = Option(
    "HETCCL_SIM_RATE",
    "Bytes a second that one rank's link inside the island carries, each way: 400M is 400 million. Equal on all ranks "
    "of an island. 0: as fast as the machine is.",
    "0",
)
ONE_AT_A_TIME = Option(
    "HETCCL_SIM_ONE_AT_A_TIME",
    "1: a device runs one collective at a time, as real ones may, so that two communicators can lock each other.",
    "0",
)
SEGMENT = Option(
    "HETCCL_SIM_SEGMENT_BYTES",
    "Most bytes that one call of the library carries where stages overlap, e.g. 64K: small ones test long pipelines "
    "with little data. Equal on all ranks.",
    "32M",
)
OPTIONS = (SEED, DELAY, ORDER, POISON, RATE, ONE_AT_A_TIME, SEGMENT)


@dataclass(frozen=True)
class Conditions:
    """`delay_us` in microseconds, `rate` in bytes a second (0: free)."""

    seed: int = 0
    delay_us: int = 0
    adversarial: bool = False
    poison: bool = False
    rate: int = 0
    one_at_a_time: bool = False
    segment_bytes: int = 32 << 20

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Conditions:
        """Raises `ConfigError` that names the variable and what it accepts."""
        env = os.environ if environ is None else environ
        delay = _read(env, DELAY, _number(10_000_000), "0 to 10000000")
        adversarial = _read(env, ORDER, ("fair", "adversarial").index, "fair or adversarial") == 1
        seed = _read(env, SEED, _number((1 << 63) - 1), "a number, 0 or more") or 0
        if not seed and (delay or adversarial):
            seed = secrets.randbits(31) + 1
        return cls(
            seed,
            delay,
            adversarial,
            _read(env, POISON, _flag, "0 or 1"),
            _read(env, RATE, _quantity(1000), "a number, with K, M or G for thousands, millions or milliards"),
            _read(env, ONE_AT_A_TIME, _flag, "0 or 1"),
            max(1024, _read(env, SEGMENT, _quantity(1024), "a number of bytes, with K or M")),
        )

    @property
    def disorderly(self) -> bool:
        return bool(self.delay_us or self.adversarial)

    def describe(self) -> str:
        """What is set, as "; seed 7, delay up to 100 us", or ""."""
        said = []
        if self.disorderly:
            said.append(f"seed {self.seed}")
        if self.delay_us:
            said.append(f"delay up to {self.delay_us} us")
        if self.adversarial:
            said.append("adversarial order")
        if self.poison:
            said.append("poisoned memory")
        if self.rate:
            said.append(f"{self.rate / 1e6:g} MB/s")
        if self.one_at_a_time:
            said.append("one collective at a time")
        return "; " + ", ".join(said) if said else ""


def _read(env: Mapping[str, str], option: Option, parse: Callable[[str], Any], accepts: str) -> Any:
    text = env.get(option.name, "").strip() or option.default
    if not text:
        return None
    try:
        return parse(text.lower())
    except ValueError:
        raise ConfigError(
            f"{option.name}={text} cannot be used; it accepts {accepts}", variable=option.name, value=text
        ) from None


def _number(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not 0 <= value <= most:
            raise ValueError
        return value

    return parse


def _quantity(base: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d+)([kmg]?)", text)
        if not match:
            raise ValueError
        return int(match[1]) * int(base ** " kmg".index(match[2] or " "))

    return parse


def _flag(text: str) -> bool:
    return ("0", "1").index(text) == 1
