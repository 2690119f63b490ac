# SPDX-License-Identifier: Apache-2.0
"""The stage `tcp` of run.py; what a rank does in it is in tcp.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def tcp(run: Any, report: Callable[..., Any], ranks: Callable[..., Any], spec: str) -> None:
    """Two islands without shared memory: all_reduce float32 by number of sockets, and what else these carry."""
    wire = {"HETCCL_TRANSPORTS": "tcp", "HETCCL_SOCKET_IFNAME": "lo"}
    for sockets in ("1", "2", "4", "8"):
        bare = report(run, f"tcp_loopback_{sockets}", ranks(run, "loopback", "", 30, sockets), show=False)
        rate = f"bare loopback {bare[0]['gbps']:.2f} GB/s" if bare else ""
        for part in ("", "262144", "1048576" if sockets == "8" else "524288", "2097152"):
            env = {**wire, "HETCCL_TCP_SOCKETS": sockets} | ({"HETCCL_TCP_CHUNK_BYTES": part} if part else {})
            sizes = [str(64 << 20), str(256 << 20)] if part else []
            name = f"tcp_{sockets}" + (f"_part{part}" if part else "")
            found = report(run, name, ranks(run, "tcp", spec, 40, *sizes, env), show=False)
            for nbytes, us in (found[0]["us"] if found else {}).items():
                print(f"{sockets} sockets {part:>8} {nbytes:>11} B {us:10.1f} us {int(nbytes) / us / 1e3:7.2f} GB/s "
                      f"{rate}  {json.dumps(found[0]['where'][nbytes])}", flush=True)  # fmt: skip
    for name, body, islands in (("tcp_staged", "tcp", spec), ("tcp_gloo", "gloo", "")):
        sizes = [str(n) for n in (4, 1 << 20, 64 << 20, 256 << 20)]
        env = {**wire, "HETCCL_DEVICE_PATH": "staged", "GLOO_SOCKET_IFNAME": "lo"}
        found = report(run, name, ranks(run, body, islands, 60, *sizes, env), show=False)
        for nbytes, us in (found[0]["us"] if found else {}).items():
            print(f"{name} {nbytes:>11} B {us:10.1f} us {int(nbytes) / us / 1e3:7.2f} GB/s", flush=True)
