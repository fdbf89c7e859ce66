"""How a call of a group with several nodes runs, and the model of its time (docs/design/nodes.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flux.comm.topology import Links, Topology

# Bytes that a kernel reads and writes beside nothing else, in a microsecond.
_MEMORY_BYTES_PER_US = 3.0e6
# Of a kernel that moves or adds little: its launch, and the first bytes.
_SMALL_KERNEL_US = 3.0
# Of a sum or gather inside a node without bytes: launch and trips over the link.
_SMALL_COLLECTIVE_US = 6.0
# Of a collective by NCCL over all ranks without bytes, in exchanges between nodes.
_FLAT_TRIPS = 2
# By which the best way must be expected to be sooner than the flat one: the model is not measured.
MARGIN = 0.95
# Rate of a GEMM that would hide an exchange.
_TYPICAL_FLOP_PER_US = 700e6


@dataclass(frozen=True)
class TwoLevel:
    """How one call runs on several nodes. ``print(plan)`` shows it.

    Attributes:
        topology: of the group.
        engine: of the exchange between nodes.
        schedule: "blocks" (a launch and transfers for the rows of each node), "one launch" (for all rows,
            then one exchange), "node sums" (every rank exchanges the whole sum of its node), "shards" (its
            share of it), or "composed" (a scatter and a gather, each by a schedule of its own).
        parts: transfers for the rows of each node.
        sms: SMs that launches leave free while an exchange is on its way.
        bytes_sent: that a rank sends to other nodes.
        us: microseconds that the model expects; 0: not on GPUs.
        flat_us: those of GEMM and collective one after the other, over all ranks alike.
        links: the rates by which the model does.
    """

    topology: Topology
    engine: str
    schedule: str
    parts: int
    sms: int
    bytes_sent: int
    us: float
    flat_us: float
    links: Links

    @property
    def reason(self) -> str:
        told = f"{self.topology}, exchange by {self.engine}, {self.schedule}"
        return told + (f" in {self.parts} parts" if self.parts > 1 else "")

    def lines(self) -> list[str]:
        found = [f"  exchange   {self.bytes_sent / 2**20:.2f} MiB from each rank to other nodes"]
        if self.us:
            # K (gemm_rs) or N (ag_gemm) on a rank, for any number of rows.
            hidden = _TYPICAL_FLOP_PER_US / (self.topology.ranks * self.links.nic_gb_per_s * 1e3)
            found += [
                f"  model      two-level {self.us:.1f} us, flat {self.flat_us:.1f} us; flat below a gain of "
                f"{1 - MARGIN:.0%}",
                f"  links      {self.links}",
                f"  hidden     behind a GEMM with an inner dimension from {hidden:.0f} on",
            ]
            if self.sms:
                found.append(f"  left free  {self.sms} SMs while an exchange is on its way")
        return found


@dataclass(frozen=True)
class Model:
    """Microseconds of what calls are made of, on such nodes with such links."""

    topology: Topology
    links: Links

    def crossing_us(self, nbytes: float) -> float:
        """An exchange of so many bytes from each rank."""
        return self.links.latency_us + nbytes / (self.links.nic_gb_per_s * 1e3)

    def inside_us(self, nbytes: float) -> float:
        """Bytes that a rank sends to its node's ranks."""
        return nbytes / (self.links.nvlink_gb_per_s * 1e3)

    def collective_us(self, nbytes: float) -> float:
        """A sum or gather of a tensor of so many bytes inside a node, by flux."""
        if self.topology.ranks == 1:
            return self.moved_us(nbytes)
        return _SMALL_COLLECTIVE_US + self.inside_us(nbytes * (self.topology.ranks - 1) / self.topology.ranks)

    def moved_us(self, nbytes: float) -> float:
        """A kernel that reads so many bytes, and writes them at other places."""
        return self.sum_us(nbytes, 1)

    def sum_us(self, nbytes: float, count: int) -> float:
        """A kernel that adds `count` tensors of so many bytes each."""
        return _SMALL_KERNEL_US + (count + 1) * nbytes / _MEMORY_BYTES_PER_US

    def flat_us(self, gemm_us: float, nbytes: float, passes: int = 1) -> float:
        """A GEMM, and collectives of so many bytes by rings over all ranks, one for each of a node's NICs."""
        share = (self.topology.world_size - 1) / self.topology.world_size / self.topology.ranks
        network = _FLAT_TRIPS * self.links.latency_us + nbytes * share / (self.links.nic_gb_per_s * 1e3)
        return gemm_us + passes * network + nbytes / _MEMORY_BYTES_PER_US

    def scatter_us(
        self, launches: Sequence[float], nbytes: Sequence[float], own_us: float, sum_us: float
    ) -> float:
        """Of a ReduceScatter: launches, each with a transfer, one after the other; own rows; the sum."""
        computed = sent = 0.0
        for launch, each in zip(launches, nbytes, strict=True):
            computed += launch
            sent = max(sent, computed) + self.crossing_us(each)
        return max(computed + own_us, sent) + sum_us

    def gather_us(self, transfers: Sequence[float], launches: Sequence[float], own_us: float) -> float:
        """Of an AllGather: transfers one after the other; launches for own rows and for each transfer."""
        done, arrived = own_us, 0.0
        for nbytes, launch in zip(transfers, launches, strict=True):
            arrived += self.crossing_us(nbytes)
            done = max(done, arrived) + launch
        return done
