"""A discrete simulation of the schedules for several nodes, which the plan's model is checked against.

    python benchmarks/nodes_simulation.py          # tables for docs/design/nodes.md, and its pictures

What is simulated: launches of a GEMM wave by wave, whose tiles travel over NVLink as they are finished and
arrive at the ranks of the node; transfers, one after the other on each rank, which need both ends, and hold
the sender's and the receiver's NIC; noise of launches and links. The model (flux.plan.network_model) has sums
and maxima instead of waves, no noise. Rates are those that plans assume; nothing here was measured on NICs.

All rails are alike, so one rail is simulated: a rank of each node.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flux import _native
from flux.comm.nodes.rail import NCCL_CTAS, shifts
from flux.comm.topology import Links, Topology
from flux.moe.two_level import bytes_sent
from flux.plan import network_model
from flux.plan.choose import Plan, PlanInput, planned

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
SMS = 132
NODES = (2, 4, 8, 16, 32, 64)
ROWS = 8192
# Standard deviation of the time of a launch and of a transfer, relative.
NOISE = 0.02
# Hops of NCCL's rings: of the latency of an exchange, and over NVLink.
_RING_HOP_SHARE, _NVLINK_HOP_US = 0.1, 1.0

# Dense models: operator, N, K of all ranks.
DENSE = {
    "GPT-3 fc2": ("gemm_rs", 12288, 49152),
    "Llama-70B down": ("gemm_rs", 8192, 28672),
    "Llama-70B o": ("gemm_rs", 8192, 8192),
    "GPT-3 fc1": ("ag_gemm", 49152, 12288),
}
# Mixtures of experts: experts, chosen, hidden, intermediate; experts are cut over all ranks.
MOE = {
    "Mixtral 8x7B": (64, 2, 4096, 14336),
    "DeepSeek-V3": (512, 8, 7168, 2048),
    "Qwen3-235B": (512, 8, 4096, 1536),
}
TOKENS = 4096  # of each rank

Step = Iterator[tuple[str, Any]]


class Rail:
    """The ranks of a rail, each with a GPU that runs launches in order, a NIC, and a stream of transfers in
    order.
    """

    def __init__(self, nodes: int, links: Links, seed: int, noise: float) -> None:
        self.nodes, self.links, self._noise = nodes, links, noise
        self._random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._gpu_free = [0.0] * nodes
        self._waiting: dict[Any, list[Callable[[], None]]] = {}
        self._done: set[Any] = set()
        self._queues: list[list[tuple[Any, int, int, float]]] = [[] for _ in range(nodes)]
        self._flying: list[Any] = [None] * nodes
        self._ready: set[Any] = set()

    def spoilt(self, us: float) -> float:
        return us * max(0.5, self._random.gauss(1.0, self._noise)) if self._noise else us

    def at(self, time: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, what))

    def run(self) -> float:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self.now

    def launch(self, node: int, us: float, then: Callable[[], None]) -> None:
        """A launch behind those before it on the same GPU."""
        start = max(self.now, self._gpu_free[node])
        self._gpu_free[node] = start + self.spoilt(us)
        self.at(self._gpu_free[node], then)

    def enqueue(self, node: int, name: Any, to: int, source: int, nbytes: float) -> None:
        """A swap at the end of a rank's stream of transfers. Its data flows when the other end has come to
        it.
        """
        self._queues[node].append((name, to, source, nbytes))
        self._advance(node)

    def after(self, name: Any, then: Callable[[], None]) -> None:
        if name in self._done:
            then()
        else:
            self._waiting.setdefault(name, []).append(then)

    def _advance(self, node: int) -> None:
        """Begins the next swap of a rank; data flows once the receiver has begun it too."""
        if self._flying[node] is not None or not self._queues[node]:
            return
        name, to, source, nbytes = self._queues[node].pop(0)
        halves = {("out", node, to, name[1]), ("in", node, source, name[1])}
        self._flying[node] = (name, set(halves))
        for half in halves:
            kind, me, other, key = half
            mate = ("in" if kind == "out" else "out", other, me, key)
            if mate not in self._ready:
                self._ready.add(half)
                continue
            self._ready.remove(mate)
            us = self.spoilt(network_model.crossing_us(nbytes, self.links))
            for end in (half, mate):
                self.at(self.now + us, functools.partial(self._half, end))

    def _half(self, half: Any) -> None:
        _, node, _, _ = half
        name, left = self._flying[node]
        left.discard(half)
        if left:
            return
        self._flying[node] = None
        self._done.add(name)
        for then in self._waiting.pop(name, []):
            then()
        self._advance(node)


@dataclass(frozen=True)
class Shape:
    """A problem of a rank: n and k are its own."""

    op: str
    m: int
    n: int
    k: int
    nodes: int
    ranks: int = 8
    links: Links = Links()

    @property
    def topology(self) -> Topology:
        return Topology(self.nodes, self.ranks)

    def plan(self) -> Plan:
        problem = PlanInput("cuda", self.m, self.n, self.k, torch.bfloat16, False, self.nodes * self.ranks)
        problem = replace(problem, num_sms=SMS, topology=self.topology, engine="NCCL", links=self.links)
        return planned(self.op, problem)


def launch_us(shape: Shape, rows: int, sms: int) -> float:
    """A fused launch of gemm_rs or ag_gemm inside a node: every SM takes the next tile, tiles travel over
    NVLink one after the other. All ranks are alike, so what a rank sends takes as long as what it receives.
    """
    core, ranks = _native.core, shape.ranks
    if ranks == 1:
        return float(core.select_gemm(rows, shape.n, shape.k, False, num_sms=sms).time_us)
    select = getattr(core, f"select_{shape.op}")
    choice = select(rows, shape.n, shape.k, False, world_size=ranks, num_sms=sms)
    config = core.tile_configs()[choice.config]
    shard = rows // ranks
    blocks, columns = -(-shard // config.block_m), -(-shape.n // config.block_n)
    tiles = ranks * blocks * columns
    tile_us = choice.time_us / math.ceil(tiles / sms)
    free = [0.0] * sms
    per_us = shape.links.nvlink_gb_per_s * 1e3
    if shape.op == "ag_gemm":
        # Own rows first, then those of one peer after the other, block by block as they arrive.
        block_us = min(config.block_m, shard) * shape.k * 2 / per_us
        end = 0.0
        for block in range(ranks * blocks):
            arrived = max(0, block - blocks + 1) * block_us
            for _ in range(columns):
                start = max(heapq.heappop(free), arrived)
                end = max(end, start + tile_us)
                heapq.heappush(free, start + tile_us)
        return end
    # Tiles of peers first; the last one must have arrived before it can be added to an own tile.
    tile_bytes, sent, end = min(config.block_m, shard) * config.block_n * 2, 0.0, 0.0
    for tile in range(tiles):
        done = heapq.heappop(free) + tile_us
        if tile < tiles - blocks * columns:
            sent = max(sent, done) + tile_bytes / per_us
        end = max(end, done)
        heapq.heappush(free, done)
    return max(end, sent)


def two_level_us(shape: Shape, schedule: str, parts: int, seed: int = 0, noise: float = NOISE) -> float:
    """A call by a schedule, until the last rank has its result."""
    rail = Rail(shape.nodes, shape.links, seed, noise)
    m, nodes = shape.m, shape.nodes
    row_bytes = 2 * (shape.n if shape.op == "gemm_rs" else shape.k)
    block = m // (nodes * shape.ranks) * row_bytes
    if schedule == "one launch":
        moved = network_model.moved_us(m * (shape.k if shape.op == "gemm_rs" else shape.n) * 2)
        work = launch_us(shape, m, SMS) + moved
        crossing = network_model.crossing_us((nodes - 1) * block, shape.links)
        tail = network_model.sum_us(block, nodes) if shape.op == "gemm_rs" else 0.0
        return max(rail.spoilt(work) + rail.spoilt(crossing) + tail for _ in range(nodes))
    if shape.op == "gemm_rs":
        _scatter(rail, shape, block, parts)
        return rail.run() + network_model.sum_us(block, nodes)
    _gather(rail, shape, block)
    return rail.run()


def _scatter(rail: Rail, shape: Shape, block: float, parts: int) -> None:
    rows = shape.m // shape.nodes
    first = launch_us(shape, rows // parts, SMS)
    later = launch_us(shape, rows // parts, SMS - NCCL_CTAS)
    own = launch_us(shape, rows, SMS - NCCL_CTAS)
    copied = network_model.moved_us(rows // parts * shape.k * 2) if parts > 1 else 0.0
    for node in range(shape.nodes):
        for step, (to, source) in enumerate(shifts(shape.nodes, node)):
            for part in range(parts):
                key = (step, part)

                def send(node: int = node, key: Any = key, to: int = to, source: int = source) -> None:
                    rail.enqueue(node, (node, key), to, source, block / parts)

                rail.launch(node, copied + (later if step or part else first), send)
        rail.launch(node, own, lambda: None)


def _gather(rail: Rail, shape: Shape, block: float) -> None:
    rows = shape.m // shape.nodes
    busy, last = launch_us(shape, rows, SMS - NCCL_CTAS), launch_us(shape, rows, SMS)
    for node in range(shape.nodes):
        steps = shifts(shape.nodes, node)
        for step, (to, source) in enumerate(steps):
            rail.enqueue(node, (node, step), to, source, block)

        def following(node: int, step: int, steps: Sequence[Any]) -> None:
            if step < len(steps):
                us = last if step + 1 == len(steps) else busy
                next_step = lambda: following(node, step + 1, steps)  # noqa: E731
                rail.after((node, step), lambda: rail.launch(node, us, next_step))

        rail.launch(node, busy, lambda node=node, steps=steps: following(node, 0, steps))  # type: ignore[misc]


def flat_us(shape: Shape) -> float:
    """A GEMM by all SMs, then rings over all ranks, one for each NIC of a node, step by step."""
    gemm = _native.core.select_gemm(shape.m, shape.n, shape.k, False, num_sms=SMS).time_us
    columns = shape.n if shape.op == "gemm_rs" else shape.k
    return float(gemm) + ring_us(shape.m * columns * 2, shape.topology, shape.links)


def ring_us(nbytes: float, topology: Topology, links: Links) -> float:
    p = topology.world_size
    piece = nbytes / p / topology.ranks  # of one ring
    hops = links.latency_us * _RING_HOP_SHARE + (topology.ranks - 1) * _NVLINK_HOP_US
    # Each step waits for the slowest hop; latencies of a node's hops add up along the ring.
    return links.latency_us + (p - 1) * (piece / (links.nic_gb_per_s * 1e3) + hops / topology.ranks)


def dense(nodes: int, name: str, rows: int = ROWS) -> Shape:
    op, n, k = DENSE[name]
    p = 8 * nodes
    return Shape(op, rows, n, k // p, nodes) if op == "gemm_rs" else Shape(op, rows, n // p, k, nodes)


@dataclass(frozen=True)
class Row:
    """One call: what the model expects, and what the simulation gives. Microseconds."""

    name: str
    nodes: int
    schedule: str
    model: float
    simulated: float
    flat_model: float
    flat: float

    @property
    def apart(self) -> float:
        """By how much the model is off, relative to the simulation."""
        return self.model / self.simulated - 1


def rows_of(rows: int = ROWS, seeds: int = 5, nodes: Sequence[int] = NODES) -> Iterator[Row]:
    """All dense models on all numbers of nodes, each by the schedule that the model prefers."""
    for name in DENSE:
        for count in nodes:
            shape = dense(count, name, rows)
            times = [(way, us) for way, us in shape.plan().candidates if way != "flat"]
            best, us = min(times, key=lambda item: item[1])
            schedule, _, parts = best.partition(" in ")
            simulated = sum(two_level_us(shape, schedule, int(parts or 1), seed) for seed in range(seeds))
            flat_model = dict(shape.plan().candidates)["flat"]
            yield Row(name, count, best, us, simulated / seeds, flat_model, flat_us(shape))


@dataclass(frozen=True)
class MoeRow:
    """Both layers of a mixture of experts, simulated: flat, with all tokens to all nodes, with one copy a
    node, and what the formula gives for the last two. Microseconds.
    """

    name: str
    nodes: int
    flat: float
    all_tokens: float
    shares: float
    copies: float
    formula: tuple[float, float]


def phases_us(nodes: int, phases: Sequence[tuple[str, float]], seed: int, noise: float = NOISE) -> float:
    """Phases one after the other on every node: a launch, or an exchange of all nodes with all, which a node
    leaves when the slowest of those that send to it has sent.
    """
    draw = random.Random(seed)
    at = [0.0] * nodes
    for kind, us in phases:
        ends = [ready + us * max(0.5, draw.gauss(1.0, noise)) for ready in at]
        at = [max(ends)] * nodes if kind == "exchange" else ends
    return max(at)


def moe_rows(nodes: Sequence[int] = NODES, seeds: int = 5) -> Iterator[MoeRow]:
    """Experts over all ranks, even choices. Flat: an all-to-all of choices, grouped GEMMs, and back."""
    links = Links()
    for name, (_, k, hidden, wide) in MOE.items():
        gemms = [2 * TOKENS * k * hidden * columns / 700e6 for columns in (2 * wide, wide)]
        row = hidden * 2
        inside = network_model.inside_us(TOKENS * k * 7 / 8 * row, links)
        for count in nodes:
            choices = (count - 1) / count * k
            back = ("exchange", network_model.crossing_us(TOKENS * choices * row, links) + inside)
            flat = [back, ("launch", gemms[0]), ("launch", gemms[1]), back]
            needed = 1 - (1 - 1 / count) ** k
            share = round(TOKENS * min(1.0, 1.1 * needed))
            ways = []
            for bound in (None, share):
                sent = bytes_sent(count, TOKENS, k, hidden, 2, bound)
                crossing = {
                    part: ("exchange", network_model.crossing_us(nbytes, links))
                    for part, nbytes in sent.items()
                }
                layers = [("launch", max(gemm, inside)) for gemm in gemms]
                add = ("launch", network_model.sum_us(TOKENS * row, count))
                ways.append([crossing["route"], crossing["layer0"], *layers, crossing["layer1"], add])
            if network_model.crossing_us(sent["layer0"], links) >= ways[0][1][1]:
                ways[1] = ways[0]
            times = [
                sum(phases_us(count, way, seed) for seed in range(seeds)) / seeds for way in (flat, *ways)
            ]
            formula = tuple(sum(us for _, us in way) for way in ways)
            yield MoeRow(name, count, *times, (count - 1) * needed, formula)  # type: ignore[arg-type]


def check(found: Sequence[Row]) -> float:
    """The largest difference of model and simulation, of two-level calls."""
    return max(abs(row.apart) for row in found)


def draw(found: Sequence[Row], mixtures: Sequence[MoeRow]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "flux"
    note = "simulated with assumed rates: 45 GB/s a NIC, 20 us an exchange; not measured"

    def finish(figure: Any, file: str) -> None:
        figure.text(0.5, 0.01, note, ha="center", fontsize=8, color="gray")
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        figure.savefig(FIGURES / file, metadata={"Date": None})
        plt.close(figure)

    figure, axes = plt.subplots(1, len(DENSE), figsize=(3.2 * len(DENSE), 3.0), sharex=True)
    for axis, name in zip(axes, DENSE, strict=True):
        mine = [row for row in found if row.name == name]
        counts = [row.nodes for row in mine]
        axis.plot(counts, [row.flat for row in mine], "s--", color="tab:gray", label="flat")
        axis.plot(counts, [row.simulated for row in mine], "o-", color="tab:blue", label="two-level")
        axis.plot(counts, [row.model for row in mine], ":", color="tab:orange", label="model of two-level")
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_ylim(bottom=0)
        axis.set_title(f"{name}, {ROWS} rows", fontsize=10)
        axis.set_xlabel("nodes of 8")
    axes[0].set_ylabel("us")
    axes[0].legend(fontsize=8)
    finish(figure, "nodes-dense.svg")

    figure, axes = plt.subplots(1, len(MOE), figsize=(3.6 * len(MOE), 3.0), sharex=True)
    for axis, name in zip(axes, MOE, strict=True):
        some = [row for row in mixtures if row.name == name]
        counts = [row.nodes for row in some]
        axis.plot(
            counts, [row.flat for row in some], "s--", color="tab:gray", label="flat: all-to-all of choices"
        )
        axis.plot(
            counts, [row.all_tokens for row in some], "o-", color="tab:blue", label="all tokens to all nodes"
        )
        axis.plot(counts, [row.shares for row in some], "^-", color="tab:green", label="one copy a node")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_title(f"{name}, {TOKENS} tokens a rank", fontsize=10)
        axis.set_xlabel("nodes of 8")
    axes[0].set_ylabel("us, both layers")
    axes[0].legend(fontsize=8)
    finish(figure, "nodes-moe.svg")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-pictures", action="store_true")
    given = parser.parse_args()
    found, mixtures = list(rows_of()), list(moe_rows())
    print(
        "| rows: 8192 | nodes | schedule | two-level, model | simulated | apart | flat, model | simulated |"
    )
    print("|---|--:|---|--:|--:|--:|--:|--:|")
    for row in found:
        two_level = f"{row.model:.0f} | {row.simulated:.0f} | {row.apart:+.1%}"
        flat = f"{row.flat_model:.0f} | {row.flat:.0f}"
        print(f"| {row.name} | {row.nodes} | {row.schedule} | {two_level} | {flat} |")
    print(f"\nlargest difference of two-level calls: {check(found):.1%}\n")
    print("| layers, 4096 tokens a rank | nodes | copies of a token | flat | all tokens | one copy a node |")
    print("|---|--:|--:|--:|--:|--:|")
    for each in mixtures:
        times = f"{each.flat:.0f} | {each.all_tokens:.0f} | {each.shares:.0f}"
        print(f"| {each.name} | {each.nodes} | {each.copies:.1f} | {times} |")
    if not given.no_pictures:
        draw(found, mixtures)


if __name__ == "__main__":
    main()
