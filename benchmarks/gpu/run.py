# SPDX-License-Identifier: Apache-2.0
"""Builds, checks and measures hetccl on a machine with one or two NVIDIA GPUs, in stages that can be resumed.

    python3 benchmarks/gpu/run.py --out results inspect build correctness two_islands one_island mixed gpt overlap

Each part of a stage leaves a JSON file in the folder; a part whose file is there is not run again (`--again` runs it).
Every stage ends within 8 minutes. Wheels in .whl/ of the repository are used for what the machine lacks.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mixed_stage
import tcp_stage

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
PLUGINS = ("hetccl-vendor-nccl", "hetccl-transport-tcp")
TWO_ISLANDS, ONE_ISLAND, MIXED = "nccl@a:1,nccl@b:1", "nccl:2", "nccl:2,host:2"
STAGE_SECONDS = 480.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=sorted(STAGES))
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-results"), help="folder (default: $OUT)")
    parser.add_argument("--again", action="store_true", help="run parts that have been run before, too")
    parser.add_argument("--only", default="", help="only parts whose name has this word")
    parser.add_argument("--tests", default="", help="-k of the stages that run pytest")
    given = parser.parse_args()
    out = Path(given.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in given.stages:
        started = time.monotonic()
        print(f"=== {name}", flush=True)
        run = Run(out, given.again, started + STAGE_SECONDS, given.only, given.tests)
        try:
            STAGES[name](run)
        except Exception as error:
            run.faults.append(f"{type(error).__name__}: {error}")
        for fault in run.faults:
            print(f"FAULT {fault}", flush=True)
        print(f"=== {name}: {len(run.faults)} faults, {time.monotonic() - started:.0f} s", flush=True)
        failed += [name] if run.faults else []
        if failed and name in ("inspect", "build"):
            break
    return 1 if failed else 0


class Run:
    """One stage's folder, deadline and faults."""

    def __init__(self, out: Path, again: bool, deadline: float, only: str = "", tests: str = "") -> None:
        self.out, self.again, self.deadline, self.only, self.tests = out, again, deadline, only, tests
        self.faults: list[str] = []

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, saved; or what an earlier run saved."""
        file = self.out / f"{name}.json"
        if file.exists() and not self.again:
            print(f"{name}: have it", flush=True)
            return json.loads(file.read_text())
        if self.left() < 20:
            self.faults.append(f"{name}: no time left in this stage; run it once more to go on")
            return None
        found = make()
        if found is not None:
            file.write_text(json.dumps(found, indent=1))
        return found


# ---- stages


def inspect(run: Run) -> None:
    def look() -> dict[str, Any]:
        found = {"python": sys.version, "cpus": os.cpu_count()}
        for name, command in {
            "gpus": "nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max --format=csv",
            "topology": "nvidia-smi topo -m", "cpu": "lscpu", "kernel": "uname -a", "memory": "free -g",
            "gcc": "gcc --version",
            "packages": f"{sys.executable} -m pip list", "loaded": f"{sys.executable} -c '{LOADED}'",
        }.items():  # fmt: skip
            found[name] = output(command)
        found["variables"] = {k: v for k, v in os.environ.items() if k.startswith(("NCCL", "CUDA", "TORCH"))}
        return found

    found = run.part("inspect", look)
    for name in ("gpus", "topology", "gcc", "loaded"):
        print(f"--- {name}\n{found[name].strip()}", flush=True)
    print("--- " + ", ".join(p for p in found["packages"].lower().split("\n") if p.split(" ")[0] in WANTED))


WANTED = (
    "torch",
    "cython",
    "setuptools",
    "pytest",
    "pyyaml",
    "stevedore",
    "numpy",
    "nvidia-nccl-cu13",
    "pytest-timeout",
)
LOADED = (
    "import torch; torch.cuda.init(); print(torch.__version__, torch.cuda.nccl.version(), torch.cuda.device_count()); "
    'names = {l.split()[-1] for l in open("/proc/self/maps") if "libcudart" in l or "nccl" in l or "nvrtc" in l}; '
    "print(*sorted(names))"
)


def build(run: Run) -> None:
    wheels = glob.glob(str(ROOT / ".whl" / "*.whl"))
    if wheels:
        step(
            run,
            [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(SITE), *wheels],
            ROOT,
        )
    step(run, [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], ROOT)
    for folder in (ROOT, *(ROOT / "plugins" / name for name in PLUGINS)):
        if folder != ROOT and (folder / "setup.py").exists():
            step(run, [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], folder)
        describe(folder)
    code = (
        "import torch, hetccl, time; from hetccl.core import registry\n"  # torch first: its libraries are to be shared
        "from hetccl.vendors.base import VendorRequest\n"
        "for v in registry.vendors(): print(v.name, v.availability)\n"
        "for t in registry.transports(): print(t.name, t.availability)\n"
        "t = time.time(); v = registry.vendor('nccl').driver.open(VendorRequest())\n"
        "print(v.describe(), v.island_key, 'opened in', round(time.time() - t, 2), 's')\n"
        "assert not v.device.no_kernels\n"
    )
    step(run, [sys.executable, "-c", code], ROOT)


def describe(folder: Path) -> None:
    """Leaves the metadata by which plug-ins are found, as an installation would."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / (project["name"].replace("-", "_") + ".egg-info")
    info.mkdir(exist_ok=True)
    (info / "PKG-INFO").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project.get('version', '0')}\n"
    )
    groups = project.get("entry-points", {})
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def correctness(run: Run) -> None:
    seen = devices()
    for label, spec in (("two_islands", TWO_ISLANDS), ("one_island", ONE_ISLAND)):
        if label == "one_island" and seen < 2:
            run.faults.append("one island of two ranks needs two GPUs, this machine has one")
            continue
        for body in ("matrix", "torch_ops"):
            report(run, f"correctness_{label}_{body}", ranks(run, body, spec, 150))


def conformance(run: Run) -> None:
    """The public suites of hetccl.testing, on the real libraries."""
    code = (
        "from hetccl.testing.ccl_suite import CclSuite\nfrom hetccl.testing.device_suite import DeviceSuite\n"
        "class TestDevice(DeviceSuite):\n    vendor = 'nccl'\n"
        "class TestCcl(CclSuite):\n    vendor = 'nccl'\n"
    )
    file = run.out / "test_real_nccl.py"
    file.write_text(code)
    chosen = "not 4 and not 3" if devices() < 4 else ""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        str(file),
    ]
    step(run, [*command, *(["-k", chosen] if chosen else [])], ROOT)


def two_islands(run: Run) -> None:
    """all_reduce float32 between two GPUs, synchronised with the host at each call: us and GB/s of the slower rank."""
    ways: dict[str, tuple[str, dict[str, str]]] = {"hetccl": (TWO_ISLANDS, {}), "gloo": ("", {})}
    if devices() > 1:
        ways |= {"nccl": ("", {}), "nccl_no_p2p": ("", {"NCCL_P2P_DISABLE": "1"})}
    table = {name: report(run, f"two_islands_{name}", ranks(run, "synchronised", spec, 200, name, env))
             for name, (spec, env) in ways.items()}  # fmt: skip
    for nbytes in SIZES:
        cells = [f"{n} {t[0]['us'][str(nbytes)]:.1f} us {nbytes / t[0]['us'][str(nbytes)] / 1e3:.2f} GB/s"
                 for n, t in table.items() if t and str(nbytes) in t[0]["us"]]  # fmt: skip
        print(f"{nbytes:>11}  " + "   ".join(cells), flush=True)


def direct(run: Run) -> None:
    """The direct path between two GPUs: bits first, then times of a call in C, alone and beside a matrix product."""
    spec = TWO_ISLANDS
    report(run, "direct_bits", ranks(run, "bits", spec, 100))
    for op, kind in (("all_reduce", "float32"), ("all_reduce", "bfloat16"), ("all_gather", "float32"),
                     ("reduce_scatter", "float32"), ("broadcast", "float32"), ("send", "float32")):  # fmt: skip
        found = report(run, f"direct_{op}_{kind}", ranks(run, "times", spec, 60, op, kind))
        for nbytes, us in (found[0]["us"] if found else {}).items():
            low, high = found[0]["p5_p95"][nbytes]
            rate = int(nbytes) / us / 1e3
            print(f"{op:>15} {kind} {nbytes:>11} B {us:10.1f} us {rate:7.2f} GB/s  p5 {low:.1f} p95 {high:.1f}")
        if op == "all_reduce" and kind == "float32":
            found = report(run, "direct_beside", ranks(run, "beside", spec, 60))
            print(json.dumps(found[0] if found else None))
    for body in ("matrix", "streams"):
        report(run, f"direct_{body}", ranks(run, body, spec, 100))


def direct_cpu(run: Run) -> None:
    """One GPU beside one CPU rank, which copies and sums with so many threads. Its tensors lie on pages of 4 KiB or, as
    torch's allocator gives them with THP_MEM_ALLOC_ENABLE=1, on huge ones: a thread then waits less for addresses."""
    print("huge pages: " + Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(), flush=True)
    for pages in ("huge", "small"):
        for threads in ("1", "2", "4"):
            env = {"HETCCL_CPU_THREADS": threads, "DIRECT_CPU_RANK": "1", "HETCCL_DEVICE": "0"}
            env["THP_MEM_ALLOC_ENABLE"] = "1" if pages == "huge" else "0"
            sizes = [str(n) for n in (4, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)]
            make = ranks(run, "times", "nccl:1,host:1", 60, "all_reduce", "float32", *sizes, env)
            found = report(run, f"direct_cpu_{pages}_{threads}", make, show=False)
            for nbytes, us in (found[0]["us"] if found else {}).items():
                print(f"GPU and CPU, {threads} threads, {pages} pages {nbytes:>11} B {us:10.1f} us "
                      f"{int(nbytes) / us / 1e3:7.2f} GB/s", flush=True)  # fmt: skip


def direct_ways(run: Run) -> None:
    """The ways to combine, each forced: bits, and times of all_reduce."""
    for way in ("kernel", "host", "staged"):
        env = {"HETCCL_DEVICE_PATH": way}
        found = report(run, f"direct_{way}", ranks(run, "times", TWO_ISLANDS, 60, "all_reduce", "float32", env))
        for nbytes, us in (found[0]["us"] if found else {}).items():
            print(f"{way:>8} {nbytes:>11} B {us:10.1f} us {int(nbytes) / us / 1e3:7.2f} GB/s")


def one_island(run: Run) -> None:
    """hetccl and torch's NCCL on one island of two, taking turns, 50 calls between two events: us a call."""
    if not two(run):
        return
    report(run, "one_island_host_cost", ranks(run, "host_cost", ONE_ISLAND, 60), show=True)
    found = report(run, "one_island", ranks(run, "interleaved", ONE_ISLAND, 300))
    for op, sizes in (found[0]["us"] if found else {}).items():
        for nbytes, ((ours, nccl), sync, host) in sizes.items():
            print(f"{op:>15} {nbytes:>11}  hetccl {ours:9.2f}  nccl {nccl:9.2f} us  {ours - nccl:+7.2f} us  ratio "
                  f"{nccl / ours:.4f}   synchronised {sync[0]:9.1f} {sync[1]:9.1f}   "
                  f"host {host[0]:6.2f} {host[1]:6.2f}", flush=True)  # fmt: skip


def mixed(run: Run) -> None:
    """Two GPUs in one NCCL island beside a CPU island of two ranks."""
    if not two(run):
        return
    report(run, "mixed_matrix", ranks(run, "matrix", MIXED, 120, cpus=2))
    report(run, "mixed_same_bits", ranks(run, "same_bits", MIXED, 60, cpus=2))
    report(run, "mixed_core_matrix", ranks(run, "core_matrix", MIXED, 120, "0.1", "1", cpus=2))
    found = report(run, "mixed_speed", ranks(run, "mixed_speed", MIXED, 120, cpus=2))
    for nbytes, gloo in (found[0]["us"]["gloo"] if found else {}).items():
        ours, size = found[0]["us"]["hetccl"][nbytes], int(nbytes)
        print(f"{size:>11}  hetccl {ours:9.1f} us {size / ours / 1e3:6.2f} GB/s   gloo {gloo:9.1f} us "
              f"{size / gloo / 1e3:6.2f} GB/s   {gloo / ours:.1f} times", flush=True)  # fmt: skip


def gpt(run: Run) -> None:
    """A GPT of 124 million parameters: steps of hetccl in one island and of NCCL by turns; whole trainings with hetccl
    in one and in two islands, NCCL, Gloo."""
    if not two(run):
        return
    report(run, "gpt_steps", ranks(run, "steps", ONE_ISLAND, 100))
    if run.only and run.only not in "gpt":
        return
    found = report(run, "gpt", ranks(run, "gpt", ONE_ISLAND, 200), show=False)
    for name, one in (found[0]["found"] if found else {}).items():
        print(f"{name:>12} {one['seconds'] * 1e3:8.2f} ms a step {one['tokens_per_second']:9.0f} tokens/s   "
              f"loss {one['losses'][0]:.4f} -> {one['losses'][-1]:.4f}   turns {one['turns']}", flush=True)  # fmt: skip
    if found:
        print(found[0]["loss_differs_by"], f"{found[0]['found']['nccl']['parameters'] / 1e6:.1f} million parameters")


def overlap(run: Run) -> None:
    """How much of a DDP step's communication runs beside computation, in one island; keeps the traces."""
    if two(run):
        report(run, "overlap", ranks(run, "overlap", ONE_ISLAND, 120))


def gpu_tests(run: Run) -> None:
    """pytest -m gpu."""
    hardware(run, {})


def variables(run: Run) -> None:
    """pytest -m gpu with one hardware queue and with kernels that are loaded at their first launch."""
    hardware(run, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "LAZY"})


def hardware(run: Run, more: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/hardware"]
    step(run, [*command, "-k", run.tests] if run.tests else command, ROOT, more)


def streams(run: Run) -> None:
    """Writes right before and after the calls, works dropped at once, captured graphs."""
    for label, spec in (("one_island", ONE_ISLAND), ("two_islands", TWO_ISLANDS)):
        if label == "two_islands" or two(run):
            report(run, f"streams_{label}", ranks(run, "streams", spec, 120))


def two(run: Run) -> bool:
    if devices() < 2:
        run.faults.append("one island of two ranks needs two GPUs, this machine has one")
    return devices() > 1


STAGES: dict[str, Callable[[Run], None]] = {
    "inspect": inspect, "build": build, "correctness": correctness, "conformance": conformance,
    "two_islands": two_islands, "one_island": one_island, "streams": streams, "direct": direct,
    "direct_ways": direct_ways, "direct_cpu": direct_cpu,
    "tcp": lambda run: tcp_stage.tcp(run, report, ranks, TWO_ISLANDS),
    "mixed_stages": lambda run: mixed_stage.mixed_stages(run, report, ranks, MIXED),
    "mixed": mixed, "gpt": gpt, "overlap": overlap, "gpu_tests": gpu_tests, "variables": variables,
}  # fmt: skip
SIZES = (4, 4096, 65536, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)


# ---- running commands and ranks


def report(run: Run, name: str, make: Callable[[], Any], show: bool = True) -> Any:
    if run.only not in name:
        return None
    found = run.part(name, make)
    for one in found or ():
        run.faults += [f"{name}: {fault}" for fault in one.get("faults", ())][:10]
    if found and show:
        rest = [{k: v for k, v in one.items() if k not in ("faults", "us")} for one in found]
        print(f"{name}: {json.dumps(rest)[:1500]}", flush=True)
    return found


def ranks(run: Run, body: str, spec: str, seconds: float, *arguments: Any, cpus: int = 0) -> Callable[[], Any]:
    """A function that runs `body` of rank.py on two GPU ranks and `cpus` CPU ranks and returns what each reported, or
    None."""

    def start() -> Any:
        env: dict[str, str] = next((a for a in arguments if isinstance(a, dict)), {})
        words = [a for a in arguments if isinstance(a, str)]
        limit, size = min(seconds, run.left() - 5), 2 + cpus
        started = [rank_process(run, rank, size, body, spec, words, env, limit) for rank in range(size)]
        until, texts, bad = time.monotonic() + limit, [], False
        for rank, process in enumerate(started):
            try:
                text, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                running = [p for p in started if p.poll() is None]  # before one's end releases another
                which = ", ".join(str(started.index(p)) for p in running)
                for one in running:
                    os.killpg(one.pid, signal.SIGKILL)
                text, _ = process.communicate()
                text += f"\nstopped after {limit:.0f} s, when ranks {which} were running"
            bad |= process.returncode != 0
            texts.append(f"--- rank {rank}, exit {process.returncode}\n{text}")
        found = [run.out / f"rank{rank}.tmp" for rank in range(size)]
        results = [json.loads(file.read_text()) for file in found if file.exists()]
        for file in found:
            file.unlink(missing_ok=True)
        if bad or len(results) < size:
            run.faults.append(f"{body} {spec} {' '.join(words)} failed")
            print("\n".join(text[-3500:] for text in texts), flush=True)
            return None
        return results

    return start


def rank_process(
    run: Run, rank: int, size: int, body: str, spec: str, words: list[str], env: dict[str, str], limit: float
) -> Any:
    device = str(rank if devices() > 1 else 0)
    job = {
        **environment(), **env, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": device, "HETCCL_RANKS": spec,
        "HETCCL_DEVICE": device, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 400),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as torchrun does (docs/guide/tuning.md)
        "HETCCL_TIMEOUT": "60", "GPU_LIMIT": str(int(limit - 3)), "GPU_OUT": str(run.out),
    }  # fmt: skip
    if rank > 1:
        job |= {"CUDA_VISIBLE_DEVICES": "", "GPU_DEVICE": "cpu", "HETCCL_DEVICE": "0"}
    if not spec:
        del job["HETCCL_RANKS"]
    (run.out / f"rank{rank}.tmp").unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), body, str(run.out / f"rank{rank}.tmp"), *words]
    return subprocess.Popen(
        command, env=job, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def environment() -> dict[str, str]:
    paths = [ROOT, *(ROOT / "plugins" / name for name in PLUGINS), SITE, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in paths if str(p))}


def step(run: Run, command: list[str], folder: Path, more: dict[str, str] | None = None) -> None:
    """Runs one command; a failure is a fault, with its last lines."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment() | (more or {}),
        text=True,
        capture_output=True,
        timeout=max(10, run.left()),
    )
    text = (done.stdout + done.stderr).strip()
    print(f"$ {' '.join(command)[:150]}\n{text[-3000:]}", flush=True)
    if done.returncode:
        run.faults.append(f"exit {done.returncode} of {' '.join(command)[:100]}")


def output(command: str) -> str:
    try:
        done = subprocess.run(command, shell=True, text=True, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "no answer"
    return done.stdout + done.stderr


def devices() -> int:
    return output("nvidia-smi -L").count("GPU ")


if __name__ == "__main__":
    sys.exit(main())
