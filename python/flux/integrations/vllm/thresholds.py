"""From how many tokens on flux.gemm_ar is faster than the GEMM and all-reduce that vLLM would run.

Read from measurements: those that flux ships for such machines beside the facts of plans (flux.measured), or
those of the user (FLUX_VLLM_TUNING). Where there are none, flux takes only sums that are bound by the links,
of which gemm_rs hides half. All ranks answer alike, because they have the same shapes, settings and GPUs.
Needs nothing of vLLM.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import torch

from flux import _invariance
from flux._files import Count, Positive, Size, parse, read_json
from flux.integrations.vllm.report import NEVER, setting, tell
from flux.measured import files as store
from flux.measured.machine import Machine, of_device, of_result
from flux.plan.sums import MAX_EXCHANGE_BYTES

# Stands for GPUs like those that were measured.
MEASURED_GPU = torch.device("meta")
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


@dataclass(frozen=True)
class Row:
    """One measurement of gemm_ar on `ranks`, with a weight [n, k] on each, and m rows.

    Attributes:
        speedup: time of the fastest GEMM and all-reduce without flux / time of flux.
        scales: of fp8 operands: "row" (also those of whole tensors) or "block".
    """

    ranks: Count
    n: Count
    k: Count
    m: Count
    speedup: Positive
    scales: Annotated[str, Literal["", "row", "block"]] = ""


@dataclass(frozen=True)
class Sum:
    """One measurement of all_reduce; as Row."""

    ranks: Count
    nbytes: Count
    speedup: Positive


@dataclass(frozen=True)
class Prefill:
    """Prefill of a model in vLLM that flux made sequence parallel, on `ranks`.

    Attributes:
        hidden: columns of the residual.
        speedup: tokens per second / those of vLLM by its defaults, which fuse all-reduces with RMSNorm.
    """

    ranks: Count
    hidden: Count
    speedup: Positive


@dataclass(frozen=True)
class Decode:
    """Decoding of `tokens` sequences in vLLM; otherwise as Prefill."""

    ranks: Count
    hidden: Count
    tokens: Count
    speedup: Positive


_NO_TOKENS = range(0)
_Model = TypeVar("_Model", Prefill, Decode)


@dataclass(frozen=True)
class Measured:
    """Measurements, and where they are from.

    Attributes:
        prefills: of whole models, as are decodes.
    """

    rows: tuple[Row, ...]
    sums: tuple[Sum, ...]
    prefills: tuple[Prefill, ...] = ()
    decodes: tuple[Decode, ...] = ()
    source: str = ""


def from_tokens(
    n: int,
    k: int,
    dtype: torch.dtype,
    ranks: int,
    device: torch.device,
    eager: bool = False,
    scales: str = "",
) -> tuple[int, str]:
    """From how many rows on flux serves a weight [n, k] of each rank, and why.

    Args:
        dtype: of the sum.
        eager: the model runs without a compiler and CUDA graphs.
        scales: of a weight in fp8, as of Row.
    """
    if _invariance.active():  # a row of small batches and of large ones has the same bits
        return 1, "batch invariant"
    forced = setting("FLUX_VLLM_MIN_TOKENS")
    if forced is not None:
        return forced, "FLUX_VLLM_MIN_TOKENS"
    measured = _of(device)
    tokens, why = decide(n, k, dtype, ranks, measured.rows, measured.source, scales)
    return (
        (_EAGER_FROM, "eager calls of fewer are bound by the host")
        if eager and tokens < _EAGER_FROM
        else (tokens, why)
    )


def decide(
    n: int, k: int, dtype: torch.dtype, ranks: int, rows: Iterable[Row], source: str, scales: str = ""
) -> tuple[int, str]:
    """from_tokens by given measurements. A pure function."""
    # vLLM's GEMMs of fp8 may be faster than flux's by more than flux hides.
    large = NEVER if scales else -(-_BOUND_BY_LINKS // (n * dtype.itemsize))
    known = [row for row in rows if row.ranks == ranks and row.scales == scales]
    if not known and scales:
        return NEVER, f"fp8 with {scales} scales was not measured on {ranks} such GPUs"
    if not known:
        return large, f"no measurement of {ranks} such GPUs: only large sums"
    shape = min({(row.n, row.k) for row in known}, key=lambda at: _distance(at, (n, k)))
    chosen = large
    for row in sorted((row for row in known if (row.n, row.k) == shape), key=lambda row: -row.m):
        if row.speedup < 1 + _NOISE:
            break
        chosen = row.m
    return min(chosen, large), f"{source}, weight {list(shape)}"


def over_fusion_from(n: int, dtype: torch.dtype, ranks: int, device: torch.device, scales: str = "") -> int:
    """From how many rows of n on flux runs layers also where vLLM would fuse their all-reduce with residual
    and RMSNorm: where models are sequence parallel, if the one with the nearest number of columns in the
    residual, up to twice or half as many, was measured to be faster.
    """
    sequence = sequence_from(n, dtype, ranks, device)
    if scales or sequence is None:
        return NEVER
    slowest = min((each.speedup for each in _nearest(_of(device).prefills, n, ranks)), default=0.0)
    return sequence if slowest >= 1 + _NOISE else NEVER


def few_over_fusion(
    n: int, begins: int, dtype: torch.dtype, ranks: int, device: torch.device, scales: str = ""
) -> range:
    """With how few rows of n flux runs layers also where vLLM would fuse their all-reduce with residual and
    RMSNorm: with as many as models like those of over_fusion_from were measured to decode faster.

    Args:
        begins: from how many rows on the layer is flux's where vLLM does not fuse. If that is in the middle,
            only a model with as many columns as the measured one is like it.
    """
    if scales or sequence_from(n, dtype, ranks, device) is None:
        return _NO_TOKENS
    measured = _nearest(_of(device).decodes, n, ranks)
    found = _faster_between((each.tokens, each.speedup) for each in measured)
    alike = begins <= found.start or any(each.hidden == n for each in measured)
    return found if alike else _NO_TOKENS


def _nearest(models: Iterable[_Model], n: int, ranks: int) -> list[_Model]:
    """Measurements on as many ranks of models with the number of columns that is nearest to n, up to twice or
    half of it.
    """
    near = [each for each in models if each.ranks == ranks and n <= 2 * each.hidden and each.hidden <= 2 * n]
    nearest = min((each.hidden for each in near), key=lambda hidden: abs(math.log2(hidden / n)), default=0)
    return [each for each in near if each.hidden == nearest]


def sequence_from(
    n: int, dtype: torch.dtype, ranks: int, device: torch.device, scales: str = "", experts: bool = False
) -> int | None:
    """From how many rows of n on sums over ranks are better sequence parallel; None: never.

    Larger sums of flux are gemm_rs and all_gather in any case. Sequence parallelism hides that gather behind
    the next GEMM. With fp8 weights (`scales`) only where such GEMMs were measured. With these and in models
    with experts it takes the host longer, so only where that does not set the pace.
    """
    if _invariance.active():
        return None
    forced = setting("FLUX_VLLM_SEQUENCE")
    if forced is not None:
        return forced or None
    known = _of(device).rows
    if scales and not any(row.ranks == ranks and row.scales == scales for row in known):
        return None
    begin = _composed_from(n, dtype, ranks, device)
    return max(begin, _busy_from(n, ranks)) if scales or experts else begin


def _busy_from(n: int, ranks: int) -> int:
    """With how many tokens a layer with residuals of n columns keeps GPUs busy while the host calls the next.
    Layers have some 13 n² weights, from Llama-3-8B to 70B, and two sums.
    """
    return math.ceil(_BUSY * ranks / (13 * n * n))


def experts_from() -> tuple[int, str]:
    """From how many tokens on flux runs the experts of MoE layers, and why from there."""
    forced = setting("FLUX_VLLM_MIN_TOKENS")
    return (forced, "FLUX_VLLM_MIN_TOKENS") if forced else (_EXPERTS_FROM, "prefill only")


def experts_sum_from(n: int, dtype: torch.dtype, ranks: int, device: torch.device) -> int:
    """From how many rows of n on flux's experts include the sum over ranks, where each rank owns a share of
    the rows and all gather the results. Smaller sums are all-reduces behind the experts: routing needs no
    exchange then, and residual and norm are part of the sum.
    """
    return setting("FLUX_VLLM_SEQUENCE") or _composed_from(n, dtype, ranks, device)


def _composed_from(n: int, dtype: torch.dtype, ranks: int, device: torch.device) -> int:
    """From how many rows on a sum is bound by the links."""
    known = any(row.ranks == ranks for row in _of(device).rows)
    nbytes = _BOUND_BY_LINKS if known else _BOUND_EVERYWHERE
    return -(-nbytes // (n * dtype.itemsize))


def sums(ranks: int, device: torch.device) -> tuple[int, int]:
    """From how many tokens on, and up to how many bytes, flux.all_reduce with RMSNorm serves a sum that no
    GEMM of flux makes. Nothing by default where it was not measured, nor in calls that must be batch
    invariant.
    """
    if _invariance.active():
        return 1, 0
    forced = setting("FLUX_VLLM_MIN_TOKENS")
    if forced is not None:
        return forced, MAX_EXCHANGE_BYTES
    return 1, up_to_bytes(ranks, _of(device).sums)


def up_to_bytes(ranks: int, measured: Iterable[Sum]) -> int:
    """The largest sum up to which flux was faster at every measured size. A pure function."""
    return _faster_up_to((each.nbytes, each.speedup) for each in measured if each.ranks == ranks)


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


def fingerprint() -> str:
    """Differs between settings and measurements that may decide differently."""
    own = setting("FLUX_VLLM_TUNING")
    files = [*([Path(own)] if own else []), *sorted(store.SHIPPED.glob("*.json"))]
    data = b"".join(path.read_bytes() for path in files if os.access(path, os.R_OK))
    names = ("FLUX_VLLM_MIN_TOKENS", "FLUX_VLLM_SEQUENCE")
    limits = f"{[setting(name) for name in names]} {_EXPERTS_FROM} {_invariance.active()}"
    return f"{limits} {hashlib.sha256(data).hexdigest()[:16]}"


class _Time(TypedDict):
    role: str
    median_ms: Positive


class _Scales(TypedDict, total=False):
    scales: Literal["", "tensor", "row", "block"]


class _Row(_Scales):
    """A row of a result of flux bench."""

    op: str
    tp: Count
    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]
    local: tuple[Size, Size, Size]
    times: dict[str, _Time]


class _Result(TypedDict):
    machine: dict[str, Any]
    rows: list[_Row]


def measured_in(path: Path) -> tuple[Machine, Measured]:
    """The machine and the measurements of a result file of ``flux bench``.

    Raises:
        ValueError: it is none.
    """
    results: _Result = read_json(path, _Result, "result of flux bench")
    rows, sums = [], []
    for row in results["rows"]:
        others = [t["median_ms"] for t in row["times"].values() if t["role"] in ("serial", "peer")]
        m, n, k = row["local"]
        if row["op"] not in ("gemm_ar", "all_reduce") or not others or "flux" not in row["times"]:
            continue
        speedup = round(min(others) / row["times"]["flux"]["median_ms"], 3)
        if row["op"] == "gemm_ar":
            scales = {"tensor": "row"}.get(row.get("scales", ""), row.get("scales", ""))
            rows.append(Row(row["tp"], n, k, m, speedup, scales))
        else:
            sums.append(Sum(row["tp"], m * n * getattr(torch, row["dtype"]).itemsize, speedup))
    machine = of_result(results["machine"], f"result of flux bench {path}")
    return machine, Measured(tuple(rows), tuple(sums))


def _of(device: torch.device) -> Measured:
    return _measured(setting("FLUX_VLLM_TUNING"), device)


@functools.cache
def _measured(own: str, device: torch.device) -> Measured:
    """The user's measurements or else those that flux ships, if they are of such a machine."""
    here = None if device == MEASURED_GPU else of_device(device)
    if own:
        try:
            machine, found = measured_in(Path(own))
        except ValueError as error:
            tell(f"FLUX_VLLM_TUNING: {error}; it is not used", logging.WARNING)
        else:
            difference = here and machine.difference(here)
            if not difference:
                return replace(found, source=f"measured in {own}")
            tell(f"FLUX_VLLM_TUNING={own} is of another machine ({difference}): not used", logging.WARNING)
    differences = []
    for machine, section in store.of_vllm():
        difference = here and machine.difference(here)
        if not difference:
            shipped: Measured = parse(Measured, section)
            return replace(shipped, source="measured on such GPUs")
        differences.append(difference)
    if device.type == "cuda":
        tell(f"no measurements of such GPUs: those that flux has are of others ({'; '.join(differences)})")
    return Measured((), ())


def _distance(a: tuple[int, int], b: tuple[int, int]) -> tuple[float, tuple[int, int]]:
    return sum(abs(math.log2(x / y)) for x, y in zip(a, b, strict=True)), a
