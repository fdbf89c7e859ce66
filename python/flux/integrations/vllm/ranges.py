"""In which batches a layer of vLLM is flux's: one pure function of the layer, of what was measured on such
GPUs (thresholds.py) and of the settings. Layers, the pass over compiled graphs and ``flux doctor --vllm`` ask
it. All ranks answer alike, because they have the same shapes, settings and GPUs. Needs nothing of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from flux import _invariance
from flux.integrations.vllm.report import NEVER, setting
from flux.integrations.vllm.thresholds import Decode, Measured, Prefill, measured_on
from flux.ops.gemm import SERVED_TOKENS
from flux.plan.sums import MAX_EXCHANGE_BYTES

# Sizes of layers must be multiples of this.
ALIGNMENT = 8
# Two runs of one measurement differ by up to this.
_NOISE = 0.02
# Of whole models; the samples of both engines are taken in turns.
_NOISE_OF_MODELS = 0.01
# A sum of so many bytes is bound by the links, of which gemm_rs hides half: on GPUs like those that were
# measured, and on others.
_BOUND_BY_LINKS, _BOUND_EVERYWHERE = 12 << 20, 24 << 20
# Floating-point operations of a GPU from one sum over ranks to the next that take it half a millisecond, as
# long as the host needs for an eager part of a layer that is several calls
# (docs/design/vllm.md#the-hosts-time-for-a-prompt).
_BUSY = 0.35e12
# Measurements are of CUDA graphs. An eager call of flux costs the host some 20 us more than vLLM's two.
_EAGER_FROM = 256
# Above the batches that vLLM decodes in CUDA graphs by default. Measured: docs/vllm.md#moe-layers.
_EXPERTS_FROM = 513
_NO_TOKENS = range(0)
_Model = TypeVar("_Model", Prefill, Decode)


class Settings(NamedTuple):
    """FLUX_VLLM_MIN_TOKENS and FLUX_VLLM_SEQUENCE (0: off), and whether calls must be batch invariant."""

    min_tokens: int | None = None
    sequence: int | None = None
    invariant: bool = False


@dataclass(frozen=True)
class Layer:
    """What ranges depend on, of a row-parallel layer and its model.

    Attributes:
        n, k: of this rank's weight.
        ranks: over which results are summed.
        itemsize: bytes of an element of the sum.
        scales: of a weight in fp8, as of thresholds.Row.
        experts: the model has some.
        eager: the model runs without a compiler and CUDA graphs.
        fused: up to how many tokens vLLM fuses the sum with residual and RMSNorm.
        scatters: flux.gemm_rs runs it by a kernel.
    """

    n: int
    k: int
    ranks: int
    itemsize: int = 2
    scales: str = ""
    experts: bool = False
    eager: bool = False
    fused: int = 0
    scatters: bool = True


@dataclass(frozen=True)
class Ranges:
    """Where a layer is flux's, in tokens.

    Attributes:
        begin, why: from how many on where vLLM does not fuse, and why from there.
        sequence: from how many on it is better sequence parallel; None: never.
        few, many: with how few, and from how many on also where vLLM would fuse.
        fused: of Layer.
        behind: with how many flux multiplies the norm behind the sum by the next weight.
        sums: with how many flux.all_reduce with RMSNorm serves a sum of this size that no GEMM of flux makes.
        sum_bytes: the largest such sum.
    """

    begin: int
    why: str
    sequence: int | None = None
    few: range = _NO_TOKENS
    many: int = NEVER
    fused: int = 0
    behind: range = _NO_TOKENS
    sums: range = _NO_TOKENS
    sum_bytes: int = 0

    @property
    def any(self) -> bool:
        return self.begin < NEVER or self.sequence is not None

    def starts(self) -> set[int]:
        """Where ranges of compiled graphs begin; none within vLLM's, for each costs a compilation."""
        found = {self.few.start, self.few.stop, self.many, self.sequence or 1}
        inside = {self.begin, self.behind.stop}
        return found | {at for at in inside if at > self.fused or at in self.few or at >= self.many}

    def starts_of_sums(self) -> set[int]:
        return {at for at in (self.sums.start, self.sums.stop) if at > self.fused}


def ranges_of(layer: Layer, measured: Measured, settings: Settings) -> Ranges:
    """A pure function."""
    begin, why = _begin(layer, measured, settings)
    sequence = _sequence_from(layer, measured, settings)
    few, many = _NO_TOKENS, NEVER
    # Of models that are not sequence parallel, have experts or fp8 weights, none was measured.
    if sequence is not None and not layer.experts and not layer.scales:
        few, many = few_over_fusion(layer, begin, measured), over_fusion_from(layer, sequence, measured)
        many = max(many, begin)
        # Beyond, nothing is to be kept from vLLM, and a range of its own would cost a compilation.
        few = range(few.start, min(few.stop, layer.fused + 1)) if layer.fused else few
    first = max(begin, few.start)
    is_behind = first < SERVED_TOKENS < (sequence or NEVER) and not settings.invariant
    sum_from, nbytes = sums(layer.ranks, measured, settings)
    behind = range(first, SERVED_TOKENS + 1) if is_behind else _NO_TOKENS
    of_sums = range(sum_from, nbytes // (layer.n * layer.itemsize) + 1), nbytes
    return Ranges(begin, why, sequence, few, many, layer.fused, behind, *of_sums)


def over_fusion(kinds: Iterable[Ranges]) -> tuple[range, int]:
    """With how few and from how many tokens on all kinds of layers of a model are flux's also where vLLM
    would fuse: in a range all stay vLLM's, or none, as in the models that were measured.
    """
    kinds = list(kinds)
    start = max((kind.few.start for kind in kinds), default=0)
    stop = min((kind.few.stop for kind in kinds), default=0)
    return range(start, stop), max((kind.many for kind in kinds), default=NEVER)


def settings_now() -> Settings:
    """Those of this process."""
    return Settings(
        setting("FLUX_VLLM_MIN_TOKENS"), setting("FLUX_VLLM_SEQUENCE"), bool(_invariance.active())
    )


def ranges_on(device: torch.device, layer: Layer) -> Ranges:
    """ranges_of with what was measured on GPUs like a device, and this process's settings."""
    return ranges_of(layer, measured_on(device), settings_now())


def experts_from() -> tuple[int, str]:
    """From how many tokens on flux runs the experts of MoE layers, and why from there."""
    forced = setting("FLUX_VLLM_MIN_TOKENS")
    return (forced, "FLUX_VLLM_MIN_TOKENS") if forced else (_EXPERTS_FROM, "prefill only")


def experts_sum_from(layer: Layer, device: torch.device) -> int:
    """From how many rows of n on flux's experts include the sum over ranks, where each rank owns a share of
    the rows and all gather the results. Smaller sums are all-reduces behind the experts: routing needs no
    exchange then, and residual and norm are part of the sum.
    """
    return setting("FLUX_VLLM_SEQUENCE") or _bound_by_links_from(layer, measured_on(device))


def _begin(layer: Layer, measured: Measured, settings: Settings) -> tuple[int, str]:
    if settings.invariant:  # a row of small batches and of large ones has the same bits
        return 1, "batch invariant"
    if settings.min_tokens is not None:
        return settings.min_tokens, "FLUX_VLLM_MIN_TOKENS"
    tokens, why = _faster_from(layer, measured)
    if layer.eager and tokens < _EAGER_FROM:
        return _EAGER_FROM, "eager calls of fewer are bound by the host"
    return tokens, why


def _faster_from(layer: Layer, measured: Measured) -> tuple[int, str]:
    """From how many rows on the nearest shape that was measured was faster at every size."""
    n, k, ranks, scales = layer.n, layer.k, layer.ranks, layer.scales
    # vLLM's GEMMs of fp8 may be faster than flux's by more than flux hides.
    large = NEVER if scales else -(-_BOUND_BY_LINKS // (n * layer.itemsize))
    known = [row for row in measured.rows if row.ranks == ranks and row.scales == scales]
    if not known and scales:
        return NEVER, f"fp8 with {scales} scales was not measured on {ranks} such GPUs"
    if not known:
        return large, f"no measurement of {ranks} such GPUs: only large sums"

    def distance(at: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        return abs(math.log2(at[0] / n)) + abs(math.log2(at[1] / k)), at

    shape = min({(row.n, row.k) for row in known}, key=distance)
    chosen = large
    for row in sorted((row for row in known if (row.n, row.k) == shape), key=lambda row: -row.m):
        if row.speedup < 1 + _NOISE:
            break
        chosen = row.m
    return min(chosen, large), f"{measured.source}, weight {list(shape)}"


def _sequence_from(layer: Layer, measured: Measured, settings: Settings) -> int | None:
    """Larger sums of flux are gemm_rs and all_gather in any case. Sequence parallelism hides that gather
    behind the next GEMM. With fp8 weights only where such GEMMs were measured. With these and in models with
    experts it takes the host longer, so only where that does not set the pace.
    """
    if settings.invariant or layer.eager or not layer.scatters:
        return None
    if settings.sequence is not None:
        return settings.sequence or None
    ranks, scales = layer.ranks, layer.scales
    if scales and not any(row.ranks == ranks and row.scales == scales for row in measured.rows):
        return None
    begin = _bound_by_links_from(layer, measured)
    if not scales and not layer.experts:
        return begin
    # Layers have some 13 n² weights, from Llama-3-8B to 70B, and two sums.
    return max(begin, math.ceil(_BUSY * ranks / (13 * layer.n * layer.n)))


def _bound_by_links_from(layer: Layer, measured: Measured) -> int:
    known = any(row.ranks == layer.ranks for row in measured.rows)
    nbytes = _BOUND_BY_LINKS if known else _BOUND_EVERYWHERE
    return -(-nbytes // (layer.n * layer.itemsize))


def over_fusion_from(layer: Layer, sequence: int, measured: Measured) -> int:
    """`sequence`, if the model nearest in columns, up to twice or half as many, was measured faster."""
    slowest = min((each.speedup for each in _nearest(measured.prefills, layer)), default=0.0)
    return sequence if slowest >= 1 + _NOISE else NEVER


def few_over_fusion(layer: Layer, begin: int, measured: Measured) -> range:
    """With as many rows as models like those of over_fusion_from were measured to decode faster.

    Args:
        begin: where the layer is flux's if vLLM does not fuse. If that is in the middle, only a model with as
            many columns as the measured one is like it.
    """
    near = _nearest(measured.decodes, layer)
    found = _faster_between((each.tokens, each.speedup) for each in near)
    alike = begin <= found.start or any(each.hidden == layer.n for each in near)
    return found if alike else _NO_TOKENS


def _nearest(models: Iterable[_Model], layer: Layer) -> list[_Model]:
    """Measurements on as many ranks of the model with the nearest number of columns, up to twice or half."""
    n = layer.n
    near = [m for m in models if m.ranks == layer.ranks and n <= 2 * m.hidden and m.hidden <= 2 * n]
    nearest = min((each.hidden for each in near), key=lambda hidden: abs(math.log2(hidden / n)), default=0)
    return [each for each in near if each.hidden == nearest]


def sums(ranks: int, measured: Measured, settings: Settings) -> tuple[int, int]:
    """From how many tokens on, and up to how many bytes, flux.all_reduce with RMSNorm serves a sum that no
    GEMM of flux makes. Nothing by default where it was not measured, nor in calls that must be batch
    invariant.
    """
    if settings.invariant:
        return 1, 0
    if settings.min_tokens is not None:
        return settings.min_tokens, MAX_EXCHANGE_BYTES
    return 1, _faster_up_to((each.nbytes, each.speedup) for each in measured.sums if each.ranks == ranks)


def _faster_up_to(measured: Iterable[tuple[int, float]]) -> int:
    """The largest size up to which flux was faster at every measured (size, speedup); 0: none."""
    largest = 0
    for size, speedup in sorted(measured):
        if speedup < 1 + _NOISE:
            # Another shape of the same size may have been faster.
            return min(largest, size - 1)
        largest = size
    return largest


def _faster_between(measured: Iterable[tuple[int, float]]) -> range:
    """The sizes around most measured (size, speedup) one after the other at which flux was faster."""
    slowest: dict[int, float] = {}
    for size, speedup in measured:
        slowest[size] = min(speedup, slowest.get(size, speedup))
    runs: list[list[int]] = [[]]
    for size in sorted(slowest):
        if slowest[size] >= 1 + _NOISE_OF_MODELS:
            runs[-1].append(size)
        else:
            runs.append([])
    longest = max(runs, key=len)
    return range(longest[0], longest[-1] + 1) if longest else _NO_TOKENS
