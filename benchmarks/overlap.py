# SPDX-License-Identifier: Apache-2.0
"""Do the stages of an all_reduce overlap? Over links of a given speed, its time against its slowest stage.

    python benchmarks/overlap.py [--bytes 64M] [--inside 400M,100M] [--border 100M] [--ranks 2+2,2+1+1]

A stage takes its bytes through its busiest rank over the rate of the link. With equal rates, stages that run one after
the other take three times as long as one of them.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import numpy as np

from hetccl.testing.launch import run

NAMES = ("sim-a", "sim-b", "sim-c", "sim-d")


def body(rank: int, size: int, nbytes: int, rounds: int) -> tuple[list[float], float, str, list[float]]:
    """Seconds of each round, the share of a core that this rank used meanwhile, the algorithm, and the share of the
    elements that each island owns in it."""
    import hetccl
    from hetccl.vendors.sim.array import SimArray

    with hetccl.init() as comm:
        host = np.full(nbytes // 4, rank + 1.0, np.float32)
        data = SimArray.from_numpy(comm._joined.vendor, host)
        taken, busy = [], 0.0
        for number in range(rounds + 1):
            data.copy_from(host)
            comm.barrier()
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            comm.all_reduce(data)
            took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
            if number:  # the first makes links, plans and scratch memory
                taken.append(took)
                busy += after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        assert (data.to_numpy() == size * (size + 1) / 2).all(), "wrong sum"
        found = comm.explain("all_reduce", nbytes)
        owners = comm.topology.border.owners if found.algorithm == "owners" else [1] * len(comm.topology.islands)
        how = f"{found.algorithm}, {found.segments} segments"
        return taken, busy / sum(taken), how, [part / sum(owners) for part in owners]


def stages(sizes: list[int], owned: list[float], nbytes: int, inside: float, border: float) -> dict[str, float]:
    """Seconds of each stage: bytes through its busiest rank over the rate. C islands, the owner form: a rank of an
    island of m carries S/m; of that it sends, and receives, what others own, and C-1 times what its island owns."""
    c = len(sizes)
    ring = max((m - 1) / m for m in sizes) * nbytes / inside
    crossing = max((1 + (c - 2) * w) / m for m, w in zip(sizes, owned, strict=True)) * nbytes / border
    return {"island reduce": ring, "border": crossing, "spread": ring}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="64M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", default="400M,100M", help="rates inside an island, bytes a second")
    parser.add_argument("--border", default="100M")
    parser.add_argument("--ranks", default="2+2,2+1+1")
    given = parser.parse_args()
    nbytes = number(given.bytes, 1024)
    print(f"all_reduce of {nbytes} bytes, float32, medians of {given.rounds}; CPU: of the busiest rank, 1 is a core")
    head = ("islands", 8), ("inside", 7), ("border", 7), ("seconds", 8), ("slowest stage", 22), ("ratio", 6), ("CPU", 5)
    print(" ".join(name.rjust(width) for name, width in head) + "  how")
    for ranks in given.ranks.split(","):
        sizes = [int(n) for n in ranks.split("+")]
        spec = ",".join(f"{name}:{n}" for name, n in zip(NAMES, sizes, strict=False))
        for inside in given.inside.split(","):
            env = {"HETCCL_SIM_RATE": inside, "HETCCL_BORDER_RATE": given.border}
            got = run(body, spec, timeout=600, env=env, args=(nbytes, given.rounds))
            took = statistics.median(max(one) for one in zip(*(one[0] for one in got), strict=True))
            all_stages = stages(sizes, got[0][3], nbytes, number(inside), number(given.border))
            name, longest = max(all_stages.items(), key=lambda s: s[1])
            print(f"{ranks:>8} {inside:>7} {given.border:>7} {took:>8.3f} {name:>14} {longest:>7.3f} "
                  f"{took / longest:>6.3f} {max(one[1] for one in got):>5.2f}  {got[0][2]}", flush=True)  # fmt: skip
    return 0


def number(text: str, kilo: int = 1000) -> int:
    scale = {"K": kilo, "M": kilo**2, "G": kilo**3}.get(text[-1].upper(), 1)
    return int(text.rstrip("KMGkmg")) * scale


if __name__ == "__main__":
    raise SystemExit(main())
