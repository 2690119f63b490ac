# SPDX-License-Identifier: Apache-2.0
"""YAML that is checked against declared keys, with errors that say file, line and column.

PyYAML's nodes know where they stand, its values do not; so values are read from nodes, by the `parse` of the key's
declaration. Whatever is wrong raises `ConfigError`: "hetccl.yaml:4:5: islands.amd.rnks is no key; did you mean
ranks?".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hetccl.errors import ConfigError

__all__ = ["Document", "Found", "Key", "Wrong", "parse_rate_text", "parse_time_text", "render_keys"]

MAX_FILE = 16 << 20
ANY = "*"


@dataclass(frozen=True)
class Key:
    """One key. In `path` a "*" is a name of the user's and "[]" an entry of a list; `parse` takes the node."""

    path: str
    accepts: str
    default: str
    text: str
    parse: Callable[[Any], Any] | None = None  # None: a mapping or list whose keys are declared on their own
    required: bool = False


@dataclass
class Found:
    """A value and where it stands."""

    value: Any
    node: Any


class Wrong(Exception):
    """Raised by a `parse`: what is wrong with a node; `node` may be an inner one."""

    def __init__(self, node: Any, what: str) -> None:
        super().__init__(what)
        self.node = node


@dataclass
class Document:
    """A YAML file as nodes. `sets` are overrides, "islands.amd.rails=8", that count as written in the file."""

    path: str
    text: str
    keys: Sequence[Key]
    sets: Sequence[str] = ()
    root: Any = field(init=False)

    def __post_init__(self) -> None:
        import yaml  # not at import: `import hetccl` stays light

        try:
            self.root = yaml.compose(self.text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
            where = f"{self.path}:{line}:{column}" if line else self.path
            raise ConfigError(
                f"{where}: is no YAML: {error.problem or error}", path=self.path, line=line, column=column
            ) from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.path}: is no YAML: {error}", path=self.path) from None
        if self.root is None:
            self.root = yaml.MappingNode("tag:yaml.org,2002:map", [], None, None)
        for text in self.sets:
            self._set(text)

    def fail(self, node: Any, what: str) -> NoReturn:
        mark = getattr(node, "start_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        place = mark.name if mark and mark.name.startswith("--set") else self.path
        where = f"{place}:{line}:{column}" if line and place == self.path else place
        raise ConfigError(f"{where}: {what}", path=self.path, line=line, column=column)

    def where(self, node: Any) -> str:
        mark = getattr(node, "start_mark", None)
        return f"{self.path}:{mark.line + 1}:{mark.column + 1}" if mark else self.path

    def mapping(self, node: Any, path: str, shown: str = "") -> dict[str, Found]:
        """The keys of a mapping that is declared as `path` ("" is the whole file), each parsed. `shown` is its path
        with the user's names."""
        shown = shown or path
        values: dict[str, Found] = {}
        known = {k.path[len(path) + 1 if path else 0 :]: k for k in self.keys if _parent(k.path) == path}
        for key, value in self.pairs(node, shown or "the file", known):
            if key.value not in known:
                near = difflib.get_close_matches(key.value, list(known), 1)
                self.fail(
                    key,
                    f"{'.'.join(filter(None, [shown, key.value]))} is no key; "
                    + (f"did you mean {near[0]}? " if near else "")
                    + f"There are {', '.join(known)}",
                )
            declared = known[key.value]
            values[key.value] = Found(
                self.value(value, declared, ".".join(filter(None, [shown, key.value]))) if declared.parse else value,
                value,
            )
        for name, declared in known.items():
            if declared.required and name not in values:
                self.fail(node, f"{shown or 'the file'} lacks {name}: {declared.accepts}")
        return values

    def pairs(self, node: Any, what: str, known: Iterable[str] = ()) -> list[tuple[Any, Any]]:
        """(key, value) nodes of a mapping. Keys are plain text and stand there once."""
        if _kind(node) != "mapping":
            hint = f" with {', '.join(known)}" if known else ""
            self.fail(node, f"{what} is {_shown(node)}; expected keys and values{hint}")
        seen: dict[str, Any] = {}
        for key, _ in node.value:
            if _kind(key) != "scalar":
                self.fail(key, f"a key of {what} is {_shown(key)}; expected a name")
            if key.value in seen:
                self.fail(key, f"{key.value} stands there twice, first in line {seen[key.value].start_mark.line + 1}")
            seen[key.value] = key
        return list(node.value)

    def items(self, node: Any, what: str) -> list[Any]:
        if _kind(node) != "sequence":
            self.fail(node, f"{what} is {_shown(node)}; expected a list")
        return list(node.value)

    def value(self, node: Any, key: Key, shown: str) -> Any:
        assert key.parse is not None
        try:
            return key.parse(node)
        except Wrong as wrong:
            text = str(wrong) or f"{_shown(wrong.node)} cannot be used"
            self.fail(wrong.node, f"{shown}: {text}; it accepts {key.accepts}")

    def _set(self, text: str) -> None:
        import yaml

        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"--set {text}: write path=value, as in islands.amd.rails=8", path=self.path)
        node = self.root
        *outer, last = path.strip().split(".")
        for part in outer:
            node = self._inner(node, part, text)
        if _kind(node) != "mapping":
            raise ConfigError(f"--set {text}: {'.'.join(outer)} has no keys in {self.path}", path=self.path)
        try:
            new = yaml.compose(value, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {text}: {value!r} is no YAML: {error}", path=self.path) from None
        if new is None:
            raise ConfigError(f"--set {text}: there is no value", path=self.path)
        _name_marks(new, f"--set {text}")
        for i, (key, _) in enumerate(node.value):
            if key.value == last:
                node.value[i] = (key, new)
                return
        key = yaml.ScalarNode("tag:yaml.org,2002:str", last, new.start_mark, new.end_mark)
        node.value.append((key, new))

    def _inner(self, node: Any, part: str, text: str) -> Any:
        """A key's value, or the entry of a list by its number (from 0)."""
        if _kind(node) == "sequence" and part.isdigit() and int(part) < len(node.value):
            return node.value[int(part)]
        found = [value for key, value in node.value if key.value == part] if _kind(node) == "mapping" else []
        if not found:
            names = [key.value for key, _ in node.value] if _kind(node) == "mapping" else []
            near = difflib.get_close_matches(part, names, 1)
            raise ConfigError(
                f"--set {text}: {self.path} has no {part} there"
                + (f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}" if names else ""),
                path=self.path,
            )
        return found[0]


# ---- how values are written


def text_of(node: Any, what: str = "a word") -> str:
    if _kind(node) != "scalar" or node.tag == "tag:yaml.org,2002:null":
        raise Wrong(node, f"{_shown(node)} is not {what}")
    return str(node.value).strip()


def a_name(node: Any) -> str:
    name = text_of(node, "a name")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise Wrong(node, f"{name!r} is no name (letters, digits, _ . and -)")
    return name


def a_number(least: int, most: int) -> Callable[[Any], int]:
    def parse(node: Any) -> int:
        text = text_of(node, "a number").replace("_", "")
        if not (text.isascii() and text.isdigit()):
            raise Wrong(node, f"{text!r} is no whole number")
        if not least <= int(text[:20]) <= most:
            raise Wrong(node, f"{text} is not within {least} .. {most}")
        return int(text)

    return parse


def one_of(*words: str) -> Callable[[Any], str]:
    def parse(node: Any) -> str:
        word = text_of(node).lower()
        if word not in words:
            near = difflib.get_close_matches(word, words, 1)
            raise Wrong(node, f"{word!r} is none of them" + (f", did you mean {near[0]}?" if near else ""))
        return word

    return parse


def a_rate(node: Any) -> float:
    text = text_of(node, "a rate")
    try:
        return parse_rate_text(text)
    except ValueError:
        raise Wrong(node, f"{text!r} is no rate") from None


def a_time(node: Any) -> float:
    text = text_of(node, "a time")
    try:
        return parse_time_text(text)
    except ValueError:
        raise Wrong(node, f"{text!r} is no time") from None


def parse_rate_text(text: str) -> float:
    """Bytes a second: "50GB/s", "400Gbit/s" (or Gb/s), "100M" are powers of 1000. Raises `ValueError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KkMGT]?)(B/s|B|b/s|bit/s|bps|)", text.strip())
    if not match:
        raise ValueError(text)
    rate = float(match[1]) * float(1000 ** " KMGT".index(match[2].upper() or " "))
    rate = rate / 8 if match[3] in ("b/s", "bit/s", "bps") else rate
    if not 0 < rate < 1e18:
        raise ValueError(text)
    return rate


def parse_time_text(text: str) -> float:
    """Seconds: "5us", "1.5ms", "200ns", "1s". Raises `ValueError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)", text.strip())
    if not match:
        raise ValueError(text)
    return float(match[1]) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def render_keys(keys: Sequence[Key]) -> str:
    """The declared keys as a markdown table."""
    head = ("key", "accepts", "default", "meaning")
    rows = [(f"`{k.path}`", k.accepts, "required" if k.required else k.default or "-", k.text) for k in keys]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    lines.insert(1, "|" + " --- |" * len(head))
    return "\n".join(lines) + "\n"


def _parent(path: str) -> str:
    """Of "islands.*.ranks" it is "islands.*", of "links[].rate" "links[]"; a "*" or "[]" itself is no key of its
    parent."""
    return path.rpartition(".")[0]


def _kind(node: Any) -> str:
    return str(getattr(node, "id", ""))


def _shown(node: Any) -> str:
    kind = _kind(node)
    if kind == "scalar":
        return repr(node.value) if node.value != "" else "empty"
    return {"mapping": "keys and values", "sequence": "a list"}.get(kind, kind)


def _name_marks(node: Any, name: str) -> None:
    for mark in (node.start_mark, node.end_mark):
        mark.name = name
    for inner in node.value if _kind(node) != "scalar" else ():
        for one in inner if isinstance(inner, tuple) else (inner,):
            _name_marks(one, name)
