"""Nodes: which ranks of a group share memory with each other, and which reach each other through a network.

A node is a set of ranks that can load and store in each other's memory. A rail is the set of ranks with the
same number in their nodes; data that crosses nodes travels along rails.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flux import _env
from flux.comm import shm

_LINKS_SCHEMA = "flux links 1"


def node_id() -> str:
    """Equal for the processes of a node: FLUX_NODE if it is set, else the id of the host."""
    return str(_env.get("FLUX_NODE")) or shm.host_id()


@dataclass(frozen=True)
class Topology:
    """Nodes of equal size with consecutive ranks. Node i has the ranks from i * ranks on.

    Attributes:
        nodes: how many.
        ranks: in each of them.
    """

    nodes: int
    ranks: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.ranks

    def local_of(self, rank: int) -> int:
        """The number of a rank in its node, which is the number of its rail."""
        return rank % self.ranks

    def rank_of(self, node: int, local: int) -> int:
        """The rank with the number `local` in a node."""
        return node * self.ranks + local

    def node_ranks(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.ranks, (node + 1) * self.ranks)

    def rail_ranks(self, local: int) -> range:
        """The ranks of a rail, in the order of their nodes."""
        return range(local, self.world_size, self.ranks)

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.ranks}"


def of_nodes(ids: Sequence[str]) -> tuple[Topology | None, str | None]:
    """The topology of a group, from the node of each rank, and why it has none.

    Returns:
        (topology, None) for several nodes of equal size with consecutive ranks; (None, None) for one node;
        (None, reason) for other groups, which run unfused.
    """
    first = {name: rank for rank, name in reversed(list(enumerate(ids)))}
    if len(first) <= 1:
        return None, None
    sizes = {name: ids.count(name) for name in first}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{sizes[name]} ({name!r})" for name in sorted(first, key=first.__getitem__))
        return None, f"the nodes of the group have different numbers of ranks: {told}"
    ranks = sizes[ids[0]]
    for rank, name in enumerate(ids):
        if name != ids[rank - rank % ranks]:
            return None, f"the ranks of node {name!r} are not consecutive: rank {rank} is one of them"
    return Topology(len(first), ranks), None


@dataclass(frozen=True)
class Links:
    """Rates by which plans of several nodes choose. All ranks of a group have the same.

    Attributes:
        nic_gb_per_s: bytes that a rank sends to other nodes, while all its node's ranks do.
        nvlink_gb_per_s: bytes that a rank sends to its node's ranks beside a GEMM.
        latency_us: of an exchange between nodes without bytes, its start and its wait included.
        source: where the rates are from.
    """

    nic_gb_per_s: float = 45.0
    nvlink_gb_per_s: float = 340.0
    latency_us: float = 20.0
    source: str = "assumed"

    def to_tell(self) -> dict[str, Any]:
        """As JSON values: what ranks tell each other, and what a file has."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.nic_gb_per_s:g} GB/s and {self.latency_us:g} us between nodes, "
            f"{self.nvlink_gb_per_s:g} GB/s inside ({self.source})"
        )


def links() -> Links:
    """The rates of FLUX_LINKS, or the assumed ones: a 400 Gbit/s NIC for each GPU, and NVLink 4.

    Raises:
        ValueError: the file is not one of flux doctor --nodes.
    """
    path = str(_env.get("FLUX_LINKS"))
    return _read(path) if path else Links()


@functools.cache
def _read(path: str) -> Links:
    try:
        told = json.loads(Path(path).read_text())
    except ValueError:
        told = None
    if not isinstance(told, Mapping) or told.get("schema") != _LINKS_SCHEMA:
        raise ValueError(f"FLUX_LINKS={path!r}: expected a file that flux doctor --nodes has written")
    return links_of(told.get("links"), f"FLUX_LINKS={path!r}")


def links_of(told: object, what: str) -> Links:
    """Rates from JSON values, checked.

    Raises:
        ValueError: they are not rates.
    """
    if not isinstance(told, Mapping) or set(told) != set(Links().to_tell()):
        raise ValueError(f"{what}: expected the rates {', '.join(Links().to_tell())}, got {told!r:.200}")
    rates = {name: told[name] for name in told if name != "source"}
    for name, rate in rates.items():
        if not isinstance(rate, int | float) or not 0.0 < rate < 1e6:
            raise ValueError(f"{what}: {name}: expected a positive number, got {rate!r}")
    return Links(**{name: float(rate) for name, rate in rates.items()}, source=str(told["source"]))


def write_links(path: Path, measured: Links) -> None:
    """Writes the file that FLUX_LINKS names."""
    path.write_text(json.dumps({"schema": _LINKS_SCHEMA, "links": measured.to_tell()}, indent=1) + "\n")
