# SPDX-License-Identifier: Apache-2.0
"""Writes docs/algorithms/: one page an algorithm, its picture drawn by `hetccl plan`. Run it after a change of an
algorithm or of the cost model, and commit what it writes:

    python docs/make_algorithms.py
"""

from __future__ import annotations

from pathlib import Path

from hetccl.cli.main import main as hetccl

HERE = Path(__file__).parent / "algorithms"
CLUSTER = """\
# SPDX-License-Identifier: Apache-2.0
# The cluster of the pictures: four islands of two ranks.
islands:
  a: {vendor: nccl, ranks: 2, hosts: 1, rails: 2, rate: 25GB/s, latency: 5us, inside: {rate: 200GB/s, latency: 12us}}
  b: {vendor: rccl, ranks: 2, hosts: 1, rails: 2, rate: 25GB/s, latency: 5us, inside: {rate: 200GB/s, latency: 12us}}
  c: {vendor: nccl, ranks: 2, hosts: 1, rails: 2, rate: 25GB/s, latency: 5us, inside: {rate: 200GB/s, latency: 12us}}
  d: {vendor: rccl, ranks: 2, hosts: 1, rails: 2, rate: 25GB/s, latency: 5us, inside: {rate: 200GB/s, latency: 12us}}
"""
# The picture of what takes place on one host.
HOST = """\
# SPDX-License-Identifier: Apache-2.0
# One host: two GPUs, and two ranks on its CPUs.
islands:
  gpus: {vendor: nccl, ranks: 2, hosts: [node], inside: {rate: 200GB/s, latency: 12us}}
  cpus: {vendor: host, ranks: 2, hosts: [node]}
"""
ON_HOST = {("all_reduce", "star")}
WORDS = """\
C islands, n_c ranks in island c, n in all; S bytes in the buffer, s in one rank's block; a is the latency of a border
message, b the seconds a byte takes over one rank's link, R, G, B and A are calls of the vendor's library:
reduce_scatter, all_gather, broadcast, reduce. All islands have m ranks in the formulas of time, which leave out what
overlaps.
"""
# (operation, algorithm): (picture's bytes, how it goes, volume, time, where it wins)
PAGES: dict[tuple[str, str], tuple[str, str, str, str, str]] = {
    ("all_reduce", "exchange"): (
        "64K",
        "The vendor's library reduces to the head of each island. Heads send each other everything, and each combines "
        "all partials in island order with the same code, so all get the same bits. The library broadcasts them.",
        "C(C-1)S leave all islands together, (C-1)S each. Latency class.",
        "A(S) + a + (C-1)Sb + B(S)",
        "Small messages: one border hop and two calls of the library.",
    ),
    ("all_reduce", "owners"): (
        "16M",
        "reduce_scatter inside. Each element has an owner, an island: the other islands' partials of it go there, are "
        "combined once, and the sum goes back. all_gather inside. Shares follow the islands' border rates.",
        "2(C-1)S leave all islands together; S(1 + (C-2)w_c) through island c each way, w_c its share.",
        "R(S/m) + 2a + 2(C-1)/C (S/m)b + G(S/m)",
        "Large messages, and middle ones where a hop costs more than a message.",
    ),
    ("all_reduce", "ring"): (
        "16M",
        "As owners, but partials travel around a ring of islands: each adds its own and passes on. Sums go around once "
        "more. A rank talks to the islands before and after its own only.",
        "2(C-1)S leave all islands together, 2(C-1)/C S through each.",
        "R(S/m) + 2(C-1)(a + (S/mC)b) + G(S/m)",
        "Large messages where many messages at once cost much, or where only neighbours are near.",
    ),
    ("all_reduce", "star"): (
        "64M",
        "One island of devices on the direct path is the hub; all other ranks have their data in the host's memory. "
        "reduce_scatter inside the hub. Every other rank sends each device its shard and gets the sum back, without a "
        "call of its own library; the device combines. all_gather inside the hub.",
        "2S for each rank in host memory, h in all: hS out of the hub and hS into it.",
        "R(S/m) + 2a + hSb/m + G(S/m), and for each rank in host memory two copies of S bytes",
        "Large messages of few CPU ranks beside GPUs on one host: sums among the CPU ranks cost more than the copies.",
    ),
    ("all_reduce", "tree"): (
        "16M",
        "As owners, but in rounds: partials for islands 1, 2, 4, ... away go there together, the farthest first, and "
        "are added to what is there; sums come back the same way, the nearest first. C need not be a power of two.",
        "2(C-1)S leave all islands together, 2(C-1)/C S through each.",
        "R(S/m) + 2 ceil(log2 C) a + 2(C-1)/C (S/m)b + G(S/m)",
        "Many islands: fewer messages than owners, fewer hops than the ring.",
    ),
    ("broadcast", "chain"): (
        "16M",
        "From head to head along a chain of islands from the root's; each passes on chunk by chunk what comes in, "
        "while its library broadcasts it inside. Where links are missing, a tree with as few branches as can be.",
        "(C-1)S leave all islands together, at most S through one.",
        "(C-1)(a + c b) + Sb + B(S), c the bytes of a chunk",
        "Large messages in islands of one rank.",
    ),
    ("broadcast", "direct"): (
        "64K",
        "The root sends to the head of every island.",
        "(C-1)S, all out of the root's island. Latency class.",
        "a + (C-1)Sb + B(S)",
        "Small messages: one hop.",
    ),
    ("broadcast", "tree"): (
        "64K",
        "Along a binomial tree of islands from the root's, head to head, chunk by chunk.",
        "(C-1)S in all, ceil(log2 C) S out of the root's island. Latency class.",
        "ceil(log2 C)(a + Sb) + B(S)",
        "Small to middle messages to many islands.",
    ),
    ("broadcast", "owners"): (
        "16M",
        "The root's library broadcasts inside first; then all its border ranks send a shard each, every other island "
        "getting one part of it, which it hands to the rest. all_gather inside.",
        "(C-1)S leave all islands together, S the root's, less the others.",
        "B(S) + 2a + (S/m)b (1 + (C-2)/(C-1)) + G(S/m)",
        "Large messages in islands of several ranks: all their links work.",
    ),
    ("all_gather", "direct"): (
        "1M",
        "Every rank sends its block to one rank of each other island, and the library spreads it there, while the "
        "island's own blocks are gathered by one call.",
        "(C-1)ns leave all islands together, (n-n_c)s into island c.",
        "a + (C-1)sb + the calls",
        "Small messages in islands of one rank; islands of different sizes.",
    ),
    ("all_gather", "heads"): (
        "4K",
        "The library gathers the island's blocks; the heads exchange them whole; one broadcast for each island spreads "
        "them.",
        "(C-1)ns leave all islands together, (n-n_c)s into island c, all over one rank's link.",
        "G(s) + a + (C-1)m s b + (C-1)B(ms)",
        "Small blocks in islands of several ranks: fewest messages and calls.",
    ),
    ("all_gather", "ring"): (
        "1M",
        "Blocks go around a ring of islands, each from rank to rank of like place; what has landed is spread by one "
        "all_gather while the next round travels.",
        "(C-1)ns leave all islands together, (n-n_c)s into island c.",
        "(C-1)(a + sb) + G(s)",
        "Large blocks; calls overlap with the rounds.",
    ),
    ("all_gather", "tree"): (
        "1M",
        "In rounds: all that an island has goes to the island 1, 2, 4, ... further on.",
        "(C-1)ns leave all islands together, (n-n_c)s into island c.",
        "ceil(log2 C) a + (C-1)sb + the calls",
        "Many islands and middle sizes.",
    ),
    ("reduce_scatter", "direct"): (
        "1M",
        "Each island reduces every block to one of its ranks, which sends the partial straight to the block's rank; "
        "that one combines them all at once.",
        "(C-1)S leave all islands together, (n-n_c)s out of island c.",
        "the calls + a + (C-1)sb",
        "Large blocks; islands of one rank.",
    ),
    ("reduce_scatter", "heads"): (
        "4K",
        "The library reduces the whole to the head; heads exchange each other's islands' blocks and combine; one "
        "broadcast brings an island its own.",
        "(C-1)S leave all islands together, (n-n_c)s out of island c, all over one rank's link.",
        "A(S) + a + (C-1)m s b + B(ms)",
        "Small blocks in islands of several ranks.",
    ),
    ("reduce_scatter", "ring"): (
        "1M",
        "A block's partial starts in the island after its own and goes around; each island adds its partial.",
        "(C-1)S leave all islands together, (n-n_c)s out of island c.",
        "C R(s) + (C-1)(a + sb)",
        "Many messages at once cost much, or islands of equal size, where one call reduces an island's blocks.",
    ),
    ("reduce_scatter", "tree"): (
        "1M",
        "In rounds: partials for islands 1, 2, 4, ... away go there together, the farthest first, and are added.",
        "(C-1)S leave all islands together, (n-n_c)s out of island c.",
        "C R(s) + ceil(log2 C) a + (C-1)sb",
        "Many islands and middle sizes.",
    ),
    ("reduce", "chain"): (
        "16M",
        "The library reduces to the head of each island; partials go along a chain of islands that ends at the root, "
        "each adding its own chunk by chunk.",
        "(C-1)S leave all islands together, at most S through one.",
        "A(S) + (C-1)(a + c b) + Sb",
        "The only one.",
    ),
    ("gather", "direct"): (
        "1M",
        "Every block goes to a border rank of the root's island, and on to the root.",
        "(n-n_root)s, all into the root's island.",
        "a + (n-n_root)sb / m",
        "The only one.",
    ),
    ("scatter", "direct"): (
        "1M",
        "As gather, the other way.",
        "(n-n_root)s, all out of the root's island.",
        "a + (n-n_root)sb / m",
        "The only one.",
    ),
    ("all_to_all", "direct"): (
        "1M",
        "Every block travels once, straight, or by way of an island mate of its sender that is linked with its rank.",
        "sum n_c(n-n_c)k leave all islands together, n_c(n-n_c)k through island c, k bytes a pair.",
        "a + (n-m)k b",
        "The only one.",
    ),
}


def main() -> None:
    HERE.mkdir(exist_ok=True)
    cluster = HERE / "cluster.yaml"
    cluster.write_text(CLUSTER)
    host = HERE / "host.yaml"
    host.write_text(HOST)
    for (op, name), (nbytes, how, volume, time, wins) in PAGES.items():
        stem = f"{op}-{name}"
        topology = host if (op, name) in ON_HOST else cluster
        picture = HERE / f"{stem}.svg"
        code = hetccl(["plan", op, "--bytes", nbytes, "--topology", str(topology), "--algorithm", name,
                       "--picture", str(picture)])  # fmt: skip
        if code:
            raise SystemExit(f"hetccl plan {op} by {name} failed")
        picture.write_text("<!-- SPDX-License-Identifier: Apache-2.0 -->\n" + picture.read_text())
        (HERE / f"{stem}.md").write_text(f"""<!-- SPDX-License-Identifier: Apache-2.0 -->
# {op} by {name}

{how}

| | |
| --- | --- |
| border bytes | {volume} |
| time | {time} |
| good for | {wins} |

![timeline]({stem}.svg)

`hetccl plan {op} --bytes {nbytes} --topology docs/algorithms/{topology.name} --algorithm {name} --picture {stem}.svg`

{WORDS}""")


if __name__ == "__main__":
    main()
