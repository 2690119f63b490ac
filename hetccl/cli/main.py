# SPDX-License-Identifier: Apache-2.0
"""The console script `hetccl`. Each command is a module of this folder with `add_parser`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import hetccl
from hetccl.errors import HetcclError

__all__ = ["main"]

COMMANDS = ("doctor", "bench", "tune", "plan", "fetch")
DESCRIPTION = """\
Collectives over ranks on accelerators of different vendors.

Start with `hetccl doctor`: it shows what works on this host, and the line that mends what does not.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Exit code: its own; 2 for an error, which is one line on stderr; 130 on Ctrl-C."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    try:
        code: int = args.run(args)
        return code
    except HetcclError as error:
        print(f"hetccl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hetccl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, e.g. head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hetccl", description=DESCRIPTION,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"hetccl {hetccl.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"hetccl.cli.{name}").add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
