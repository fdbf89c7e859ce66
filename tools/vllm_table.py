"""Prints what runs on flux in vLLM, for popular models and token counts: the tables of docs/vllm-models.md.

    python tools/vllm_table.py

Asks what the plugin asks (flux.integrations.vllm.predict), for GPUs like those that were measured.
"""

from __future__ import annotations

import os
from itertools import groupby
from unittest import mock

from flux.integrations.vllm.predict import FUSED_BY_VLLM_BYTES, Model, predict
from flux.integrations.vllm.ranges import experts_from
from flux.integrations.vllm.thresholds import MEASURED_GPU

# Settings with which quantised models are flux's, too.
ASKED = {"FLUX_VLLM_MIN_TOKENS": "256", "FLUX_VLLM_SEQUENCE": "2048"}

MODELS = (
    Model("Llama 8B, bf16", 4096, 4096, 14336),
    Model("Llama 70B, bf16", 8192, 8192, 28672),
    Model("Llama 70B, fp8", 8192, 8192, 28672, quantised="row"),
    Model("Llama 70B, AWQ", 8192, 8192, 28672, quantised="awq"),
    Model("Qwen3 8B, bf16", 4096, 4096, 12288),
    Model("Qwen3 32B, bf16", 5120, 8192, 25600),
    Model("Qwen3 30B-A3B, bf16", 2048, 4096, 0, experts=True),
    Model("Qwen3 235B-A22B, bf16", 4096, 8192, 0, experts=True),
    Model("Mixtral 8x7B, bf16", 4096, 4096, 0, experts=True),
    Model("DeepSeek-V3, fp8", 7168, 16384, 0, quantised="block", experts=True, whole_columns=True),
    Model("gpt-oss 120B, mxfp4 experts", 2880, 4096, 0, experts=True),
    Model("Gemma 3 27B, bf16", 5376, 4096, 21504, plain_norm=False),
)


def _now(model: Model, ranks: int) -> list[tuple[int, str]]:
    return predict(model, ranks, MEASURED_GPU).runs


def table() -> str:
    """The Markdown table."""
    lines = ["| model | ranks | layers | experts |", "|---|---|---|---|"]
    for model in MODELS:
        lines += [f"{line} {_experts(model)} |" for line in _lines(model)]
    return "\n".join(lines)


def _lines(model: Model) -> list[str]:
    """Name, numbers of ranks that run alike, and what they run."""
    alike = groupby(FUSED_BY_VLLM_BYTES, lambda ranks: _cell(_now(model, ranks)))
    return [f"| {model.name} | {', '.join(map(str, ranks))} | {cell} |" for cell, ranks in alike]


def _experts(model: Model) -> str:
    if not model.experts:
        return ""
    plain = not model.quantised and "mxfp4" not in model.name
    return f"1: vLLM; {experts_from()[0]}: flux" if plain else "1: vLLM"


def quantised() -> str:
    """That of quantised models with the settings ASKED."""
    lines = ["| model | ranks | with these settings |", "|---|---|---|"]
    with mock.patch.dict(os.environ, ASKED):
        for model in MODELS:
            lines += _lines(model) if model.quantised else []
    return "\n".join(lines)


def _cell(found: list[tuple[int, str]]) -> str:
    return "; ".join(f"{start}: {what}" for start, what in found)


if __name__ == "__main__":
    print(f"{table()}\n\n{quantised()}")
