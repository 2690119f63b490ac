# SPDX-License-Identifier: Apache-2.0
"""What the soak draws: a make-up of ranks and its settings, sets of communicators, and jobs. All of it follows from the
seed and from numbers that a fault is reported with, so any one draw can be repeated alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hetccl.core.planner import ALGORITHMS, REDUCING, reducible
from hetccl.types import DType, Op, RedOp

EPOCH = 40  # draws that use one set of communicators
TAGS = 4  # few, so that messages of one tag queue up behind each other
COLLECTIVES = tuple(op for op in Op if op not in (Op.SEND, Op.RECV))
WHOLE = (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE)  # their count is of the whole buffer, not of a rank's block
# Operations that also have a form with a count for each rank; all_to_all: for each pair.
UNEVEN = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL)
PAIRS = tuple((dtype, redop) for dtype in DType for redop in RedOp if reducible(dtype, redop))


@dataclass(frozen=True)
class Topology:
    """Vendors in rank order, and the environment of the ranks."""

    ranks: tuple[str, ...]
    env: dict[str, str]

    @property
    def spec(self) -> str:
        return ",".join(self.ranks)


@dataclass(frozen=True)
class Collective:
    comm: int
    op: Op
    dtype: DType
    redop: RedOp
    count: int
    root: int  # of the communicator
    in_place: bool
    shift: int  # elements between an aligned address and the data
    device: bool  # where the vendor has memory of its own: there
    salt: int
    blocking: bool
    counts: tuple[int, ...] = ()  # of the v form: a rank's block, or a pair's, row by row
    gaps: bool = False  # between the blocks of the v form
    parts: tuple[int, ...] = ()  # lengths of the tensors of all_reduce_coalesced


@dataclass(frozen=True)
class Message:
    comm: int
    source: int  # ranks of the communicator
    target: int
    tag: int
    dtype: DType
    count: int
    shift: int
    device: bool
    salt: int
    late: bool  # the receive is posted after everything else
    anybody: bool  # the receive does not say from whom


@dataclass(frozen=True)
class Draw:
    number: int
    depth: int  # collectives in flight at most, a communicator
    threads: bool  # each communicator's jobs in a thread of their own
    jobs: tuple[Collective | Message, ...] = field(repr=False)

    def describe(self) -> str:
        lines = [f"draw {self.number}: depth {self.depth}{', a thread a communicator' if self.threads else ''}"]
        return "\n".join([*lines, *(f"  {i}: {describe(job)}" for i, job in enumerate(self.jobs))])


def describe(job: Collective | Message) -> str:
    if isinstance(job, Message):
        how = f"{' from anybody' * job.anybody}{' late' * job.late}{' device' * job.device}"
        return (
            f"comm {job.comm} message {job.source}->{job.target} tag {job.tag} {job.count} {job.dtype.label} "
            f"shift {job.shift}{how}"
        )
    how = f"{' in place' * job.in_place}{' device' * job.device}{' blocking' * job.blocking}{' gaps' * job.gaps}"
    redop = f" {job.redop.label}" if job.op in REDUCING else ""
    form = f"_v {list(job.counts)}" if job.counts else f"_coalesced {list(job.parts)}" if job.parts else ""
    return (
        f"comm {job.comm} {job.op.label}{form}{redop} {job.count} {job.dtype.label} root {job.root} shift {job.shift}"
        f"{how}"
    )


def topology(seed: int, number: int, vendors: tuple[str, ...]) -> Topology:
    """The make-up number `number`, of these vendors."""
    r = random.Random(f"{seed}/{number}")
    islands = []
    left = 6
    for i in range(r.choice((1, 2, 2, 2, 3, 3, 4))):
        vendor = r.choice(vendors)
        n = min(r.choice((1, 1, 2, 2, 3)), left)
        label = f"@{'abcd'[i]}" if any(v.split("@")[0] == vendor for island in islands for v in island) else ""
        islands.append([vendor + label] * n)
        left -= n
    ranks = [vendor for island in islands for vendor in island]
    if r.random() < 0.4:  # ranks of one vendor need not stand side by side
        r.shuffle(ranks)
    env = {
        "HETCCL_SIM_SEED": str(r.randrange(1, 1 << 30)),
        "HETCCL_SIM_ORDER": "adversarial",
        "HETCCL_SIM_POISON": "1",
        "HETCCL_SIM_DELAY_US": r.choice(("0", "30", "300")),
        "HETCCL_TRANSPORTS": r.choice(("shm", "shm", "shm,tcp", "tcp")),
        "HETCCL_CHECK": r.choice(("always", "always", "async", "off")),
    }
    optional = {
        "HETCCL_SHM_SLOTS": r.choice(("", "2", "8")),
        "HETCCL_SHM_SLOT_BYTES": r.choice(("", "", "4096")),
        "HETCCL_CHUNK_BYTES": r.choice(("", "", "4K", "20000")),
        "HETCCL_SIM_SEGMENT_BYTES": r.choice(("", "4K", "64K")),
        "HETCCL_ORDER": r.choice(("", "", "", "island")),
        "HETCCL_VERIFY": r.choice(("", "", "", "always", "off")),
        "HETCCL_COMBINE": r.choice(("", "", "host", "device", "border")),
        "HETCCL_ALGORITHM": _forced(r),
    }
    return Topology(tuple(ranks), env | {name: value for name, value in optional.items() if value})


def _forced(r: random.Random) -> str:
    """No algorithm half the time, else one of each of some operations."""
    if r.random() < 0.5:
        return ""
    chosen = ((op.label, r.choice(list(named))) for op, named in ALGORITHMS.items() if len(named) > 1)
    return ",".join(f"{op}={name}" for op, name in chosen if r.random() < 0.6)


def communicators(seed: int, number: int, epoch: int, size: int) -> list[tuple[int, ...]]:
    """World ranks of each communicator. The first is the world."""
    r = random.Random(f"{seed}/{number}/comms{epoch}")
    found = [tuple(range(size))]
    for _ in range(r.choice((0, 0, 1, 2, 3))):
        members = r.sample(range(size), r.randint(1, size))  # in any order: rank 0 of a group may be anybody
        found.append(tuple(members if r.random() < 0.5 else sorted(members)))
    return found


def draw(seed: int, number: int, n: int, size: int) -> Draw:
    """Draw `n` on make-up `number`."""
    comms = communicators(seed, number, n // EPOCH, size)
    r = random.Random(f"{seed}/{number}/{n}")
    large = r.random() < 0.1
    jobs: list[Collective | Message] = []
    for i in range(r.choice((1, 2, 4, 8)) if large else r.choice((1, 3, 8, 16, 30))):
        comm = r.randrange(len(comms))
        members = len(comms[comm])
        if members > 1 and r.random() < 0.3:
            jobs += _messages(r, comm, members, n, i, large)
        else:
            jobs.append(_collective(r, comm, members, large))
    return Draw(n, r.choice((1, 2, 8, 64)), len(comms) > 1 and r.random() < 0.3, tuple(jobs))


def _collective(r: random.Random, comm: int, members: int, large: bool) -> Collective:
    op = r.choice(COLLECTIVES)
    dtype, redop = r.choice(PAIRS) if op in REDUCING else (r.choice(list(DType)), RedOp.SUM)
    count = _count(r, dtype, large)
    if op not in WHOLE:
        count //= members
    counts: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    if op in UNEVEN and r.random() < 0.4:
        counts = _blocks(r, count, members if op == Op.ALL_TO_ALL else 1, members)
    if op == Op.ALL_REDUCE and r.random() < 0.15:
        parts = tuple(count * r.randint(0, 4) // 8 for _ in range(r.randint(1, 5)))
    return Collective(
        comm, op, dtype, redop, count, r.randrange(members), r.random() < 0.4, r.choice((0, 0, 1, 3)), r.random() < 0.5,
        r.randrange(1 << 20), r.random() < 0.2, counts, bool(counts) and r.random() < 0.5, parts,
    )  # fmt: skip


def _blocks(r: random.Random, count: int, rows: int, members: int) -> tuple[int, ...]:
    """Lengths of blocks, some of them empty, `count` on average. Few shapes, so that plans are used again."""
    shape = random.Random(r.randrange(3))
    return tuple(count * shape.choice((0, 1, 1, 2, 2, 4)) // 2 + shape.choice((0, 0, 1)) for _ in range(rows * members))


def _messages(r: random.Random, comm: int, members: int, n: int, i: int, large: bool) -> list[Message]:
    """One message, a burst of one tag, or one from each of several ranks to whoever asks."""
    source, target = r.sample(range(members), 2)
    kind = r.choice(("one", "one", "one", "burst", "burst", "anybody", "anybody", "flood"))
    tag = r.randrange(TAGS)
    sources = [source] * {"one": 1, "burst": r.randint(2, 12), "flood": r.randint(60, 150)}.get(kind, 1)
    if kind == "anybody":  # a tag of their own: another draw's message must not be taken for one of these
        sources = r.sample([s for s in range(members) if s != target], r.randint(1, members - 1))
        tag = 1000 + n * 32 + i
    dtype = r.choice(list(DType))
    count = _count(r, dtype, large)
    device = r.random() < 0.4
    late = (comm + 7 * source + 3 * target + tag + n) % 3 == 0  # alike for all of one tag: they are in order
    found = []
    for s in sources:
        if kind == "burst":
            count = _count(r, dtype, False)
        if kind == "flood":  # more than any list of records holds, and too long or too short to be sent unasked
            count = r.choice((16, 40_000, 70_000)) // dtype.itemsize
        found.append(
            Message(comm, s, target, tag, dtype, count, r.choice((0, 1)), device, r.randrange(1 << 20), late,
                    kind == "anybody")
        )  # fmt: skip
    return found


def _count(r: random.Random, dtype: DType, large: bool) -> int:
    """Elements: mostly few, with the edges of chunks, slots and segments among them."""
    if large:
        nbytes = r.choice((r.randint(1 << 16, 1 << 20), r.randint(1 << 20, 3 << 20), 1 << 20))
    else:
        edge = r.choice((4096, 8192, 16384, 32768, 65536)) + r.choice((-16, -1, 0, 1, 16)) * dtype.itemsize
        nbytes = r.choice((0, dtype.itemsize, r.randint(0, 256), r.randint(0, 8192), r.randint(0, 100_000), edge))
    return nbytes // dtype.itemsize
