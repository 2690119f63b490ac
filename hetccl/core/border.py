# SPDX-License-Identifier: Apache-2.0
"""How data crosses between islands: which border rank carries what, over which islands, and in what shares.

Everything here is a pure function of the topology, so that all ranks come to the same answer.

*Carriers.* A rank that is not at the border is represented by a border rank of its island; in every other island its
data is carried by one border rank. *Trees.* Data for island o goes along the direct links of a shortest-path tree to o,
so only blocks that nobody combines or keeps on the way (gather, scatter, all_to_all) cost more for a missing link.
*Shares.* Shards are cut in proportion to the border ranks' speeds, and what an island owns to the rate of its border.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetccl.core.topology import Topology

__all__ = ["OWNER_PARTS", "Border", "owner_shares", "parts_of"]

OWNER_PARTS = 32  # shares of owners are multiples of one in so many, where they differ
SHARD_PARTS = 8  # likewise of shards, so many a border rank
MOST_REMEMBERED = 256  # ranks, for paths of all pairs
MOST_TRIES = 20_000  # of the search for a tree with few branches


class Border:
    """The border of a topology. Islands are named by index, ranks by global number."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._islands = topology.islands
        self._position = [{rank: x for x, rank in enumerate(i.borders)} for i in topology.islands]
        self._trees: dict[int, list[int]] = {}
        self._chains: dict[int, list[int]] = {}
        self._pair_paths: dict[tuple[int, int], list[int]] = {}
        self._shard_carriers: dict[tuple[int, int], dict[int, int]] = {}
        self._carried: dict[tuple[int, int], dict[int, list[int]]] = {}

    # ---- who carries

    def at_border(self, rank: int) -> bool:
        """Whether a rank talks to other islands."""
        return rank in self._position[self._topology.place(rank)[0]]

    def representative(self, rank: int) -> int:
        """The rank itself if it is at the border, else the border rank of its island that carries its data."""
        island, index = self._topology.place(rank)
        if rank in self._position[island]:
            return rank
        turns = self._turns[island]
        return turns[index % len(turns)]

    def carrier(self, island: int, rank: int) -> int:
        """The border rank of an island that carries what belongs to `rank`, of whatever island."""
        rank = self.representative(rank)
        home, index = self._topology.place(rank)
        if home == island:
            return rank
        turns = self._turns[island]
        return turns[index % len(turns)]

    def head(self, island: int) -> int:
        """The border rank that carries what is not cut into shards: the fastest, the first of equals."""
        return self._heads[island]

    def linked(self, p: int, q: int) -> bool:
        """Whether two ranks exchange border messages: at most a few partners a rank beside the heads'."""
        t = self._topology
        (a, i), (b, j) = t.place(p), t.place(q)
        if a == b or not t.direct(a, b) or p not in self._position[a] or q not in self._position[b]:
            return False
        if p == self._heads[a] or q == self._heads[b]:  # a broadcast's root sends to the next head, whoever is root
            return True
        if self._turns[b][i % len(self._turns[b])] == q or self._turns[a][j % len(self._turns[a])] == p:
            return True
        return self._shards_meet(a, p, b, q) or (not self.mesh and (p, q) in self._relayed_pairs)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """All linked pairs, lower rank first."""
        for one in self._islands:
            for other in self._islands[one.index + 1 :]:
                if self._topology.direct(one.index, other.index):
                    for p in one.borders:
                        for q in other.borders:
                            if self.linked(p, q):
                                yield (min(p, q), max(p, q))

    # ---- over which islands

    @cached_property
    def mesh(self) -> bool:
        """Whether all islands have direct links with each other."""
        return all(link.direct for link in self._topology.links)

    @cached_property
    def adder(self) -> int:
        """The one of two islands that combines everything, -1: there is none. A rank in host memory beside a device's:
        one pass over it reads what it has and what came, and writes the sum for both; the device has nothing to add.
        Not an island of several: their cores have the island's own sums to do (25 against 31 ms for 64 MiB over two
        GPUs and two CPU ranks)."""
        hosts = [i.index for i in self._islands if i.host_memory and i.size == 1]
        return hosts[0] if len(self._islands) == 2 and len(hosts) == 1 and any(i.direct for i in self._islands) else -1

    @cached_property
    def plain(self) -> bool:
        """Whether all islands have direct links, all ranks are at the border, and all of an island are equally fast."""
        return self.mesh and all(self.even(i.index) for i in self._islands)

    def parent(self, island: int, to: int) -> int:
        """The next island on the way to island `to`; `to` has none (-1)."""
        return self._tree(to)[island]

    def children(self, island: int, to: int) -> list[int]:
        """Islands whose next one on the way to `to` is this one, ascending."""
        return [c for c, parent in enumerate(self._tree(to)) if parent == island]

    def hops(self, a: int, b: int) -> int:
        """Links between two islands on the way."""
        n = 0
        while a != b:
            a, n = self.parent(a, b), n + 1
        return n

    @cached_property
    def middle(self) -> int:
        """The island from which the farthest is nearest."""
        n = len(self._islands)
        return min(range(n), key=lambda c: max(self.hops(other, c) for other in range(n)))

    def chain(self, root: int) -> list[int]:
        """Parents (-1 for the root) of a tree in which an island has as few children as can be: where links allow, one
        each, so that a broadcast leaves no island twice."""
        found = self._chains.get(root)
        if found is None:
            found = self._chains[root] = self._find_chain(root)
        return found

    def path(self, rank: int, root: int) -> list[int]:
        """Border ranks that carry a block from `rank` to `root` of another island, the first of rank's island, the
        last of root's: the root itself where it can be."""
        here, goal = self._topology.place(rank)[0], self._topology.place(root)[0]
        path = [self.representative(rank)]
        while here != goal:
            here = self.parent(here, goal)
            path.append(root if here == goal and self.linked(path[-1], root) else self.carrier(here, rank))
        return path

    def pair_path(self, rank: int, to: int) -> list[int]:
        """The same for all pairs at once: the last is `to` wherever it is at the border, and the first a mate of
        `rank` where only that one is linked with it."""
        found = self._pair_paths.get((rank, to))
        if found is None:
            home, goal = self._topology.place(rank)[0], self._topology.place(to)[0]
            if self._topology.direct(home, goal) and self.at_border(to):
                first = self.representative(rank)
                found = [first if self.linked(first, to) else self.carrier(home, to), to]
            else:
                found = self.path(rank, to)
            if self._topology.size <= MOST_REMEMBERED:
                self._pair_paths[rank, to] = found
        return found

    # ---- in what shares

    def even(self, island: int) -> bool:
        """Whether all ranks of an island carry shards of one size, as a vendor's reduce_scatter makes them."""
        return len(self._position[island]) == self._islands[island].size and len(set(self._parts[island])) == 1

    @cached_property
    def units(self) -> int:
        """Units of a segment: every piece holds a whole number for every part of its owners."""
        return self._grain * sum(self.owners)

    def cuts(self, island: int) -> list[int]:
        """Where the shards of an island's border ranks begin, in units, and the end."""
        return self._cuts[island]

    def pieces(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """The common refinement of all islands' shards: (first unit, last unit, who holds it in each island)."""
        return self._pieces

    def pieces_of(self, rank: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Those that one rank holds."""
        island = self._topology.place(rank)[0]
        return [piece for piece in self._pieces if piece[2][island] == rank]

    def shard_carriers(self, island: int, home: int) -> dict[int, int]:
        """{border rank of `home`: the border rank of `island` in whose shard its own begins}. Any two carriers of one
        rank are linked."""
        found = self._shard_carriers.get((island, home))
        if found is None:
            ours, cuts = self._islands[island].borders, self._cuts[island]
            found = {
                rank: rank if island == home else ours[bisect_right(cuts, at) - 1]
                for rank, at in zip(self._islands[home].borders, self._cuts[home], strict=False)
            }
            self._shard_carriers[island, home] = found
        return found

    def carried(self, rank: int, home: int) -> list[int]:
        """Border ranks of `home` whose shard carrier in its island is `rank`, ascending."""
        island = self._topology.place(rank)[0]
        found = self._carried.get((island, home))
        if found is None:
            found = self._carried[island, home] = {}
            for r, who in self.shard_carriers(island, home).items():
                found.setdefault(who, []).append(r)
        return found.get(rank, [])

    @cached_property
    def _cuts(self) -> list[list[int]]:
        grain, owners = self._grain, sum(self.owners)
        return [[grain * at // sum(parts) * owners for at in accumulate(parts, initial=0)] for parts in self._parts]

    @cached_property
    def _pieces(self) -> list[tuple[int, int, tuple[int, ...]]]:
        shards = [self.cuts(i.index) for i in self._islands]
        cuts = sorted({at for cut in shards for at in cut})
        at = [0] * len(shards)
        found = []
        for lo, hi in pairwise(cuts):
            for i, cut in enumerate(shards):
                while cut[at[i] + 1] <= lo:
                    at[i] += 1
            found.append((lo, hi, tuple(i.borders[at[i.index]] for i in self._islands)))
        return found

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Parts of the elements that each island owns."""
        if self.adder >= 0:
            return tuple(int(i.index == self.adder) for i in self._islands)
        rates = [i.border_rate for i in self._islands]
        for link in self._topology.links:  # an island is as fast as the sum of its ways
            if link.rate and link.direct:
                rates = self._link_rates(rates)
                break
        return owner_shares(rates)

    def owned(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """(owner, first unit, last unit) of the parts of a piece that are not empty."""
        total = sum(self.owners)
        marks = [first + (last - first) * at // total for at in accumulate(self.owners, initial=0)]
        return [(o, lo, hi) for o, (lo, hi) in enumerate(pairwise(marks)) if lo < hi]

    # ---- inside

    def _tree(self, to: int) -> list[int]:
        found = self._trees.get(to)
        if found is None:
            found = self._trees[to] = self._find_tree(to)
        return found

    def _find_tree(self, to: int) -> list[int]:
        """Shortest paths; of equals the one over the lowest island."""
        n = len(self._islands)
        if self.mesh:
            return [-1 if c == to else to for c in range(n)]
        parents, level = [-1] * n, [to]
        left = [c for c in range(n) if c != to]
        while level and left:
            following = []
            for c in left:
                nearest = next((up for up in sorted(level) if self._topology.direct(c, up)), None)
                if nearest is not None:
                    parents[c] = nearest
                    following.append(c)
            left = [c for c in left if c not in following]
            level = following
        return parents

    def _find_chain(self, root: int) -> list[int]:
        n = len(self._islands)
        if self.mesh:
            order = [root] + [c for c in range(n) if c != root]
            parents = [-1] * n
            for before, after in pairwise(order):
                parents[after] = before
            return parents
        for most in range(1, n):
            self._tries = MOST_TRIES
            tree = self._grow([root], [-1] * n, most)
            if tree is not None:
                return tree
        return self._find_tree(root)

    def _grow(self, reached: list[int], parents: list[int], most: int) -> list[int] | None:
        if len(reached) == len(parents):
            return parents
        for child in range(len(parents)):
            if child in reached:
                continue
            for up in reversed(reached):
                self._tries -= 1
                if self._tries < 0:
                    return None
                if parents.count(up) < most and self._topology.direct(child, up):
                    grown = list(parents)
                    grown[child] = up
                    tree = self._grow([*reached, child], grown, most)
                    if tree is not None:
                        return tree
        return None

    def _shards_meet(self, a: int, p: int, b: int, q: int) -> bool:
        x, y = self._position[a][p], self._position[b][q]
        of_a, of_b = self._bounds[a], self._bounds[b]
        return of_a[x] * of_b[-1] < of_b[y + 1] * of_a[-1] and of_b[y] * of_a[-1] < of_a[x + 1] * of_b[-1]

    @cached_property
    def _relayed_pairs(self) -> set[tuple[int, int]]:
        """Carriers of one rank in two islands that are both not its own."""
        found = set()
        for home in self._islands:
            for rank in home.borders:
                carriers = [self.carrier(i.index, rank) for i in self._islands if i.index != home.index]
                found |= {(p, q) for p in carriers for q in carriers}
        return found

    @cached_property
    def _grain(self) -> int:
        """Into how many parts the elements are cut for shards: exact where an island's are equal."""
        even = [len(p) for p in self._parts if len(set(p)) == 1]
        grain = lcm(*even)
        if len(even) < len(self._parts):
            grain *= -(-SHARD_PARTS * max(len(p) for p in self._parts) // grain)
        return grain

    @cached_property
    def _parts(self) -> list[list[int]]:
        return [parts_of(i.speeds, len(i.borders), SHARD_PARTS * len(i.borders)) for i in self._islands]

    @cached_property
    def _bounds(self) -> list[list[int]]:
        return [list(accumulate(parts, initial=0)) for parts in self._parts]

    @cached_property
    def _heads(self) -> list[int]:
        heads = []
        for island in self._islands:
            speeds = island.speeds or (1.0,)
            heads.append(island.borders[speeds.index(max(speeds))])
        return heads

    @cached_property
    def _turns(self) -> list[list[int]]:
        """Border ranks of each island in an order that names each as often as its speed says."""
        found = []
        for island, parts in zip(self._islands, self._parts, strict=True):
            due, turns = [0] * len(parts), []
            for _ in range(sum(parts)):
                due = [d + p for d, p in zip(due, parts, strict=True)]
                x = due.index(max(due))
                due[x] -= sum(parts)
                turns.append(island.borders[x])
            found.append(turns)
        return found

    def _link_rates(self, rates: Sequence[float]) -> list[float]:
        """Rates of islands that are held up by their links."""
        n = len(self._islands)
        result = []
        for a, rate in enumerate(rates):
            ways = [self._topology.link(a, b) for b in range(n) if b != a and self._topology.direct(a, b)]
            known = [way.rate for way in ways if way.rate]
            if len(known) == len(ways):
                rate = min(rate, sum(known)) if rate else sum(known)
            result.append(rate)
        return result


def parts_of(speeds: Sequence[float], n: int, parts: int) -> list[int]:
    """Whole numbers in proportion to speeds, at least 1 each; all 1 where speeds are equal or not known."""
    if not speeds or len(set(speeds)) == 1:
        return [1] * n
    exact = [parts * s / sum(speeds) for s in speeds]
    found = [max(1, int(e)) for e in exact]
    for x in sorted(range(n), key=lambda x: found[x] - exact[x])[: max(0, parts - sum(found))]:
        found[x] += 1
    return found


def owner_shares(rates: Sequence[float]) -> tuple[int, ...]:
    """Parts of the elements that each island owns, so that the slowest island's border is done first: w = max(0, (t B -
    1) / (C - 2)) with the least t for which they sum to 1, B the rate of an island's border (docs/design/plans.md)."""
    n = len(rates)
    if n < 3 or not all(rates) or len(set(rates)) == 1:
        return (1,) * n
    order = sorted(range(n), key=lambda c: -rates[c])
    total, t = 0.0, 0.0
    for k, c in enumerate(order, 1):  # sum over the k fastest of (t B - 1) = C - 2
        total += rates[c]
        t = (n - 2 + k) / total
        if k == n or t * rates[order[k]] <= 1:
            break
    exact = [OWNER_PARTS * max(0.0, t * rate - 1) / (n - 2) for rate in rates]
    found = [int(e + 1e-9) for e in exact]
    for c in sorted(range(n), key=lambda c: found[c] - exact[c])[: OWNER_PARTS - sum(found)]:
        found[c] += 1
    return tuple(found)
