# SPDX-License-Identifier: Apache-2.0
"""Every environment variable: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from hetccl.core import config as module
from hetccl.core.config import VARIABLES, Config, Variable, parse_bytes, render, variables
from hetccl.core.ranks import RankSpec
from hetccl.errors import ConfigError


def test_each_variable_is_an_attribute() -> None:
    attributes = {f.name for f in dataclasses.fields(Config)}
    assert {v.name.removeprefix("HETCCL_").lower() for v in VARIABLES} == attributes
    assert all(v.text and v.accepts for v in VARIABLES)


def test_defaults_are_those_that_the_table_shows() -> None:
    assert dataclasses.replace(Config.from_env({}), home="") == Config()
    assert Config.from_env({}).home.endswith("/.cache/hetccl")


def test_reads_everything() -> None:
    found = Config.from_env(
        {
            "HETCCL_RANKS": "host,sim-a",
            "HETCCL_TRANSPORTS": "shm, tcp",
            "HETCCL_LOG": "DEBUG",
            "HETCCL_TIMEOUT": "2.5",
            "HETCCL_SECRET": "s" * 32,
            "HETCCL_REQUIRE_SECRET": "1",
            "HETCCL_CHECK": "async",
            "HETCCL_HOME": "/x",
            "HETCCL_DEVICE": "3",
            "HETCCL_ALGORITHM": "all_reduce=owners, broadcast=chain",
            "HETCCL_CHUNK_BYTES": "512K",
            "HETCCL_STORE": "tcp://[::1]:29500",
            "HETCCL_VERIFY": "off",
            "HETCCL_SOCKET_IFNAME": "eth0",
        }
    )
    assert found == Config(
        ranks=[RankSpec("host"), RankSpec("sim-a")],
        transports=("shm", "tcp"),
        log="debug",
        timeout=2.5,
        secret="s" * 32,
        require_secret=True,
        check="async",
        home="/x",
        device=3,
        algorithm={"all_reduce": "owners", "broadcast": "chain"},
        chunk_bytes=512 << 10,
        store="tcp://[::1]:29500",
        verify="off",
        socket_ifname="eth0",
    )
    assert "ssss" not in repr(found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HETCCL_RANKS", "host:0"),
        ("HETCCL_TRANSPORTS", "shm,,tcp"),
        ("HETCCL_TRANSPORTS", "shm,shm"),
        ("HETCCL_LOG", "loud"),
        ("HETCCL_TIMEOUT", "0"),
        ("HETCCL_TIMEOUT", "nan"),
        ("HETCCL_TIMEOUT", "soon"),
        ("HETCCL_REQUIRE_SECRET", "maybe"),
        ("HETCCL_CHECK", "sometimes"),
        ("HETCCL_DEVICE", "-1"),
        ("HETCCL_ALGORITHM", "owners"),
        ("HETCCL_ALGORITHM", "all_reduce=a,all_reduce=b"),
        ("HETCCL_CHUNK_BYTES", "1"),
        ("HETCCL_CHUNK_BYTES", "big"),
        ("HETCCL_STORE", "/tmp/x"),
        ("HETCCL_STORE", "tcp://host"),
        ("HETCCL_VERIFY", "1"),
    ],
)
def test_refuses_by_name_value_and_what_is_accepted(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({name: value})
    text, variable = str(caught.value), next(v for v in VARIABLES if v.name == name)
    assert name in text and value in text
    assert variable.accepts in text or "e.g." in text
    assert caught.value.facts == {"variable": name, "value": value}


def test_an_empty_variable_is_unset() -> None:
    assert Config.from_env({"HETCCL_TIMEOUT": " ", "HETCCL_RANKS": ""}) == Config.from_env({})


def test_an_unknown_variable_is_named_once_with_the_nearest(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_warned", set())
    env = {"HETCCL_TRANSPROTS": "shm", "HETCCL_ZZZZZZ": "1", "OTHER": "1", "HETCCL_TEST_STRICT": "1"}
    with caplog.at_level(logging.WARNING, "hetccl"):
        Config.from_env(env)
        Config.from_env(env)
    assert [r.getMessage() for r in caplog.records] == [
        "HETCCL_TRANSPROTS is no variable of hetccl or of an installed plug-in; did you mean HETCCL_TRANSPORTS?",
        "HETCCL_ZZZZZZ is no variable of hetccl or of an installed plug-in",
    ]


def test_a_plug_ins_variable_is_known(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warned", set())
    extra = Variable("HETCCL_FOO_BAR", "", "", "of a plug-in", owner="vendor foo")
    monkeypatch.setattr(module, "variables", lambda: [*VARIABLES, extra])
    with caplog.at_level(logging.WARNING, "hetccl"):
        Config.from_env({"HETCCL_FOO_BAR": "1"})
    assert caplog.records == []


def test_secret_from_file_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("f" * 64 + "\n")
    both = {"HETCCL_SECRET_FILE": str(file), "HETCCL_SECRET": "e" * 64}
    assert Config.from_env(both).read_secret() == b"f" * 64
    assert Config.from_env({"HETCCL_SECRET": "e" * 64}).read_secret() == b"e" * 64
    assert Config.from_env({}).read_secret() is None


@pytest.mark.parametrize("content", [None, "", "x" * 5000])
def test_an_unusable_secret_file_is_an_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="HETCCL_SECRET_FILE"):
        Config.from_env({"HETCCL_SECRET_FILE": str(file)}).read_secret()


def test_a_required_secret_must_be_there() -> None:
    with pytest.raises(ConfigError, match="there is no secret"):
        Config.from_env({"HETCCL_REQUIRE_SECRET": "yes"}).read_secret()


def test_a_short_secret_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hetccl"):
        assert Config.from_env({"HETCCL_SECRET": "short"}).read_secret() == b"short"
    assert "only 5 bytes" in caplog.text and "short" not in caplog.text


def test_sizes() -> None:
    found = [parse_bytes(t) for t in ("0", "4", "64K", "1M", "2G", "3MiB", "5 kb")]
    assert found == [0, 4, 65536, 1 << 20, 2 << 30, 3 << 20, 5120]
    for wrong in ("", "K", "1.5M", "-1", "1T"):
        with pytest.raises(ValueError, match="^" + wrong.replace(".", r"\.") + "$"):
            parse_bytes(wrong)


def test_the_table_can_be_rendered() -> None:
    table = [*variables(plugins=False), Variable("HETCCL_X", "a|b", "a", "text", owner="vendor x")]
    markdown, rst = render(table), render(table, "rst")
    lines = markdown.splitlines()
    assert len(lines) == len(table) + 2 and all(line.startswith("| ") or line.startswith("|-") for line in lines[2:])
    assert r"| `HETCCL_X` | a\|b | a | text | vendor x |" in lines
    assert rst.count("   * - ") == len(table) + 1 and "``HETCCL_X``" in rst
    with pytest.raises(ConfigError, match="markdown and rst"):
        render(table, "html")
