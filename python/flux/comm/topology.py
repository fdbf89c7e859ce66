"""Nodes: ranks that share memory. A rail: ranks with the same number in their nodes, along which data go."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Nodes of equal size with consecutive ranks. Node i has the ranks from i * ranks on."""

    nodes: int
    ranks: int  # in each of them

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    def node_of(self, rank: int) -> int:
        return rank // self.ranks

    def rank_of(self, node: int, local: int) -> int:
        return node * self.ranks + local

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.ranks}"


def of_nodes(ids: Sequence[str]) -> tuple[Topology | None, str | None]:
    """The topology of a group, from the node of each rank, or why it has none; None, None for one node."""
    sizes = {name: ids.count(name) for name in ids}
    if len(sizes) <= 1:
        return None, None
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{size} ({name!r})" for name, size in sizes.items())
        return None, f"the nodes of the group have different numbers of ranks: {told}"
    ranks = sizes[ids[0]]
    for rank, name in enumerate(ids):
        if name != ids[rank - rank % ranks]:
            return None, f"the ranks of node {name!r} are not consecutive: rank {rank} is one of them"
    return Topology(len(sizes), ranks), None


@dataclass(frozen=True)
class Links:
    """Rates by which plans of several nodes choose. All ranks of a group have the same."""

    nic_gb_per_s: _Rate = 45.0  # that a rank sends to other nodes, while all its node's ranks do
    nvlink_gb_per_s: _Rate = 340.0  # that a rank sends to its node's ranks beside a GEMM
    latency_us: _Rate = 20.0  # of an exchange between nodes without bytes, its start and its wait included
    source: str = "assumed"

    def __str__(self) -> str:
        return (
            f"{self.nic_gb_per_s:g} GB/s and {self.latency_us:g} us between nodes, "
            f"{self.nvlink_gb_per_s:g} GB/s inside ({self.source})"
        )


def links() -> Links:
    """The rates of FLUX_LINKS, or the assumed ones: a 400 Gbit/s NIC for each GPU, and NVLink 4."""
    path = str(_env.get("FLUX_LINKS"))
    return _read(path) if path else Links()


class _File(TypedDict):
    schema: _Schema
    links: dict[str, Any]


@functools.cache
def _read(path: str) -> Links:
    file: _File = _files.read_json(path, _File, "FLUX_LINKS, a file of flux doctor --nodes,")
    return links_of(file["links"], path, "links")


def links_of(told: object, what: str, place: str = "") -> Links:
    """Rates from JSON values. Raises ValueError if they are none."""
    links: Links = _files.parse(Links, told, what, place)
    if vars(links) != told:  # what is left out
        raise ValueError(f"{what}: expected all of {', '.join(vars(links))}, got {told!r:.120}")
    return links


def write_links(path: Path, measured: Links) -> None:
    _files.write_json({"schema": _LINKS_SCHEMA, "links": vars(measured)}, path)
