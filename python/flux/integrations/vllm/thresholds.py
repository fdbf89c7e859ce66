"""Measurements of flux against what vLLM would run, by which ranges.py decides: those that flux ships for
such machines beside the facts of plans (flux.measured), or those of the user (FLUX_VLLM_TUNING). Needs
nothing of vLLM.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch

from flux import _invariance
from flux._files import Count, Positive, Size, parse, read_json
from flux.integrations.vllm.report import setting, tell
from flux.measured import files as store
from flux.measured.machine import Machine, of_device, of_result

# Stands for GPUs like those that were measured.
MEASURED_GPU = torch.device("meta")


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


def fingerprint() -> str:
    """Differs between settings and measurements that may decide differently."""
    own = setting("FLUX_VLLM_TUNING")
    files = [*([Path(own)] if own else []), *sorted(store.SHIPPED.glob("*.json"))]
    data = b"".join(path.read_bytes() for path in files if os.access(path, os.R_OK))
    limits = [setting(name) for name in ("FLUX_VLLM_MIN_TOKENS", "FLUX_VLLM_SEQUENCE")]
    return f"{limits} {_invariance.active()} {hashlib.sha256(data).hexdigest()[:16]}"


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


def measured_on(device: torch.device) -> Measured:
    """What decides on a GPU of this machine; nothing, if none of its kind was measured."""
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
