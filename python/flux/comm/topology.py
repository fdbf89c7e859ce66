"""Nodes: which ranks of a group share memory with each other, and which reach each other through a network.

A node is a set of ranks that can load and store in each other's memory. A rail is the set of ranks with the
same number in their nodes; data that crosses nodes travels along rails.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

from flux import _env, _files
from flux._files import Within
from flux.comm import shm

_Schema = Literal["flux links 1"]
(_LINKS_SCHEMA,) = get_args(_Schema)
_Rate = Annotated[float, Within(1e-6, 1e9)]


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


class _Told(TypedDict):
    nic_gb_per_s: _Rate
    nvlink_gb_per_s: _Rate
    latency_us: _Rate
    source: str


class _File(TypedDict):
    schema: _Schema
    links: _Told


@functools.cache
def _read(path: str) -> Links:
    file: _File = _files.read_json(path, _File, "FLUX_LINKS, a file of flux doctor --nodes,")
    return links_of(file["links"], path)


def links_of(told: object, what: str) -> Links:
    """Rates from JSON values, checked.

    Raises:
        ValueError: they are not rates.
    """
    links: Links = _files.parse(Links, _files.parse(_Told, told, what), what)
    return links


def write_links(path: Path, measured: Links) -> None:
    """Writes the file that FLUX_LINKS names."""
    _files.write_json({"schema": _LINKS_SCHEMA, "links": measured.to_tell()}, path)
