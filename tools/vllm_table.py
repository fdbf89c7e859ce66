"""Prints what runs on flux in vLLM, for popular models and token counts: the table of docs/vllm.md.

    python tools/vllm_table.py

Asks what the plugin asks (flux.integrations.vllm.thresholds), for GPUs like those that were measured. Up to
which size vLLM 0.33 fuses all-reduces with RMSNorm on Hopper is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch

from flux.integrations.vllm import thresholds

GPU = torch.device("cuda", 0)
MOST_TOKENS = 8192
FUSED_BY_VLLM_BYTES = {2: 64 << 20, 4: 2 << 20, 8: 1 << 19}
# What the plugin did before it asked for measurements.
_BEFORE_FROM = 128


@dataclass(frozen=True)
class Model:
    """Sizes of a model; `experts` instead of an MLP; `plain_norm`: the norm follows the addition."""

    name: str
    hidden: int
    attention: int
    mlp: int
    quantised: bool = False
    experts: bool = False
    plain_norm: bool = True


MODELS = (
    Model("Llama 8B, bf16", 4096, 4096, 14336),
    Model("Llama 70B, bf16", 8192, 8192, 28672),
    Model("Llama 70B, fp8", 8192, 8192, 28672, quantised=True),
    Model("Llama 70B, AWQ", 8192, 8192, 28672, quantised=True),
    Model("Qwen3 8B, bf16", 4096, 4096, 12288),
    Model("Qwen3 32B, bf16", 5120, 8192, 25600),
    Model("Qwen3 30B-A3B, bf16", 2048, 4096, 0, experts=True),
    Model("Qwen3 235B-A22B, bf16", 4096, 8192, 0, experts=True),
    Model("Mixtral 8x7B, bf16", 4096, 4096, 0, experts=True),
    Model("DeepSeek-V3, fp8", 7168, 16384, 0, quantised=True, experts=True),
    Model("gpt-oss 120B, mxfp4 experts", 2880, 4096, 0, experts=True),
    Model("Gemma 3 27B, bf16", 5376, 4096, 21504, plain_norm=False),
)


def ranges(model: Model, ranks: int) -> list[tuple[int, str]]:
    """What runs, and from how many tokens on, in ascending order."""
    vllm = FUSED_BY_VLLM_BYTES[ranks] // (model.hidden * 2)
    begins = [] if model.quantised else _begins(model, ranks)
    sequence = thresholds.sequence_from(model.hidden, torch.bfloat16, ranks, GPU)
    parallel = bool(begins) and not model.experts and model.plain_norm and sequence is not None
    limit = thresholds.sums(ranks, GPU)[1] // (model.hidden * 2)
    edges = {1, vllm + 1, *begins, limit + 1, *([sequence] if parallel and sequence else [])}
    found: list[tuple[int, str]] = []
    for start in sorted(edge for edge in edges if edge <= MOST_TOKENS):
        served = sum(start >= begin for begin in begins)
        what = []
        if start > vllm:
            if parallel and sequence and start >= sequence:
                what = ["sequence parallel"]
            else:
                all_of_them = "" if served == len(begins) else f" {served} of {len(begins)}"
                what = [f"gemm_ar{all_of_them}"] if served else []
                others = model.plain_norm and (model.experts or served < len(begins) or not begins)
                what += ["all_reduce"] if others and start <= limit else []
        told = " + ".join(what) or "vLLM"
        if not found or found[-1][1] != told:
            found.append((start, told))
    return found


def before(model: Model, ranks: int) -> list[tuple[int, str]]:
    """The same, of flux before it had thresholds, sums with norm and sequence parallelism."""
    start = max(_BEFORE_FROM, FUSED_BY_VLLM_BYTES[ranks] // (model.hidden * 2) + 1)
    return [(1, "vLLM")] + ([(start, "gemm_ar")] if not model.quantised and start <= MOST_TOKENS else [])


def _begins(model: Model, ranks: int) -> list[int]:
    widths = [model.attention, *([model.mlp] if model.mlp else [])]
    problems = [(model.hidden, width // ranks, torch.bfloat16, ranks, GPU) for width in widths]
    return [thresholds.from_tokens(*problem)[0] for problem in problems]


def table() -> str:
    """The Markdown table."""
    lines = ["| model | ranks | now | before |", "|---|---|---|---|"]
    with mock.patch.object(thresholds, "_machine", lambda device: ("sm_90", 132)):
        for model in MODELS:
            for ranks in FUSED_BY_VLLM_BYTES:
                now, then = (_cell(found) for found in (ranges(model, ranks), before(model, ranks)))
                lines.append(f"| {model.name} | {ranks} | {now} | {then} |")
    return "\n".join(lines)


def _cell(found: list[tuple[int, str]]) -> str:
    return "; ".join(f"{start}: {what}" for start, what in found)


if __name__ == "__main__":
    print(table())
