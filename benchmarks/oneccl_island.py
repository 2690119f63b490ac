# SPDX-License-Identifier: Apache-2.0
"""Inside one oneCCL island: hetccl against the same library called straight from C, by turns, ranks pinned alike.

    python benchmarks/oneccl_island.py [--rounds 5] [--ranks 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {4: 2000, 1024: 2000, 65536: 1000, 1 << 20: 200, 16 << 20: 20}


def ours() -> None:
    """One rank of the hetccl side; prints "bytes median_us" on rank 0."""
    import numpy as np

    import hetccl
    from hetccl.types import DType, Op, RedOp

    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    with hetccl.init() as comm:
        for nbytes, iters in SIZES.items():
            block = np.zeros(nbytes + 4096, np.uint8)
            x = block[-block.ctypes.data % 4096 :][:nbytes].view(np.float32)
            args = (Op.ALL_REDUCE, x.ctypes.data, x.ctypes.data, x.size, DType.FLOAT32, RedOp.SUM, 0, 0.0)
            for _ in range(iters // 5 + 2):
                comm.run(*args)
            taken = []
            for _ in range(iters):
                start = time.perf_counter_ns()
                comm.run(*args)
                taken.append(time.perf_counter_ns() - start)
            if rank == 0:
                print(nbytes, statistics.median(taken) / 1e3, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    from hetccl_vendor_oneccl.driver import library_folder

    folder = str(library_folder()[0])
    found: dict[str, dict[int, list[float]]] = {"hetccl": {s: [] for s in SIZES}, "direct": {s: [] for s in SIZES}}
    with tempfile.TemporaryDirectory() as work:
        program = f"{work}/oneccl_direct"
        source = Path(__file__).with_name("oneccl_direct.c")
        subprocess.run(["gcc", "-O2", "-o", program, str(source), "-ldl"], check=True)
        for number in range(args.rounds):
            sides = ["hetccl", "direct"] if number % 2 == 0 else ["direct", "hetccl"]
            for side in sides:
                for nbytes, micros in run(side, args.ranks, work, program, folder, number):
                    found[side][nbytes].append(micros)
    print(f"{args.ranks} ranks in one oneCCL island, all_reduce float32 in place, medians of {args.rounds} rounds, us")
    print(f"{'bytes':>10} {'hetccl':>10} {'direct':>10} {'more us':>8} {'ratio':>6}")
    for nbytes in SIZES:
        a, b = statistics.median(found["hetccl"][nbytes]), statistics.median(found["direct"][nbytes])
        print(f"{nbytes:>10} {a:>10.2f} {b:>10.2f} {a - b:>8.2f} {a / b:>6.3f}")
    return 0


def run(side: str, n: int, work: str, program: str, folder: str, number: int) -> list[tuple[int, float]]:
    plan = [str(v) for pair in SIZES.items() for v in pair]
    procs = []
    for rank in range(n):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(n), "HETCCL_RANKS": f"oneccl:{n}"}
        env["HETCCL_STORE"] = f"file://{work}/store{number}"
        settings = {"CCL_WORKER_OFFLOAD": "0", "CCL_ATL_SHM": "1", "CCL_LOG_LEVEL": "error", "CCL_KVS_IFACE": "lo"}
        env |= {**settings, "FI_PROVIDER_PATH": folder, "FI_TCP_IFACE": "lo"}
        command = [sys.executable, __file__, "--one-rank"]
        if side == "direct":
            command = [program, folder, str(rank), str(n), f"{work}/id{number}", *plan]
        procs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [p.communicate(timeout=120)[0] for p in procs]
    if any(p.returncode for p in procs):
        sys.exit(f"{side}: {outputs}")
    lines = [line.split() for line in outputs[0].splitlines() if line[:1].isdigit() and len(line.split()) == 2]
    return [(int(nbytes), float(micros)) for nbytes, micros in lines]


if __name__ == "__main__":
    if sys.argv[1:] == ["--one-rank"]:
        ours()
    else:
        sys.exit(main())
