"""What the benchmark prepares on GPUs, on CPU processes that pretend to be some: all candidates, and that
each can be called. torch's fused operators are flux's (flux.integrations.async_tp), graphs replay nothing.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from flux.bench.cases import OPS, peers
from flux.bench.cases.common import Context
from flux.bench.suites import Problem
from flux.integrations import async_tp
from flux.testing import spawn

# By operator and scales: the candidates beside flux and flux in parts.
WANTED = {
    ("gemm", ""): {"cuBLAS"},
    ("gemm_rs", ""): {"cuBLAS", "NCCL", "cuBLAS+NCCL", "flux.gemm", "async-TP", "flux, int8"},
    ("ag_gemm", ""): {"cuBLAS", "NCCL", "NCCL+cuBLAS", "flux.gemm", "flux.all_gather", "async-TP"},
    ("gemm_ar", ""): {"cuBLAS", "flux.gemm", "NCCL", "flux.all_reduce"}
    | {f"cuBLAS+{name}" for name in ("NCCL", "one-shot", "two-shot")},
    ("gemm_ar_norm", ""): {"cuBLAS", "flux.gemm_ar+norm"}
    | {f"cuBLAS+{name}" for name in ("NCCL", "one-shot", "two-shot")},
    ("all_reduce", ""): {"NCCL", "one-shot", "two-shot"},
    ("gemm_rs", "row"): {"flux, bf16", "flux, fast", "flux, int8", "NCCL", "async-TP"}
    | {part for name in ("flux.gemm", "_scaled_mm") for part in (name, f"{name}+NCCL")},
    ("ag_gemm", "row"): {"flux, bf16", "flux, fast", "NCCL", "async-TP"}
    | {part for name in ("flux.gemm", "_scaled_mm") for part in (name, f"NCCL+{name}")},
    ("gemm_ar", "block"): {"flux, bf16", "NCCL", "flux.gemm"}
    | {f"flux.gemm+{name}" for name in ("NCCL", "one-shot", "two-shot")},
}


def pretended() -> ExitStack:
    """A GPU with a small L2, whose stream and memory are the CPU's."""
    async_tp.install()
    properties = SimpleNamespace(L2_cache_size=100_000, multi_processor_count=132)
    sums = SimpleNamespace(
        one_shot_all_reduce_out=lambda x, op, group, out: out.copy_(x),
        two_shot_all_reduce_=lambda x, op, group: x,
    )
    stack = ExitStack()
    for target, name, stand_in in (
        (Context, "cuda", True),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None)),
        (torch.cuda, "graph", lambda graph, **_: nullcontext()),
        (_symmetric_memory, "enable_symm_mem_for_group", lambda name: None),
        (_symmetric_memory, "empty", lambda *shape, dtype, device: torch.empty(*shape, dtype=dtype)),
        (_symmetric_memory, "rendezvous", lambda *_: None),
        (peers, "_symm_mem", sums),
    ):
        stack.enter_context(mock.patch.object(target, name, stand_in))
    return stack


def prepared(rank: int, world_size: int) -> dict[tuple[str, str], tuple[set[str], list[str], list[str]]]:
    """Names, notes, and the candidates of whole operators whose results are not flux's."""
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.bfloat16, dist.group.WORLD)
    context, told = context.with_twins(("parts",)), {}
    with pretended():
        for op, scales in WANTED:
            pattern = "local" if op == "gemm" else op.removesuffix("_norm")
            problem = Problem(op, "custom", pattern, 64, 256, 512, scales=scales)
            lineup = OPS[op].case.prepare(problem, context)
            results: dict[str, Any] = {c.name: (c.eager or c.call)() for c in lineup.candidates}
            for each in lineup.candidates:
                each.call()
            want, wrong = results["flux"], []
            got = {"async-TP": results.get("async-TP"), "flux, parts": results.get("flux, parts")}
            for name, result in got.items():
                result = result[1][0] if isinstance(result, tuple) and name == "async-TP" else result
                if isinstance(result, torch.Tensor) and not torch.allclose(
                    result.float(), want.float(), rtol=0.05, atol=0.05
                ):
                    wrong.append(name)
            told[op, scales] = ({c.name for c in lineup.candidates}, lineup.notes, wrong)
    return told


def test_candidates_on_gpus() -> None:
    for told in spawn(prepared, 2, backend="gloo", timeout_s=200):
        for (op, scales), (names, notes, wrong) in told.items():
            assert names - {"flux", "flux, parts"} == WANTED[op, scales], (op, scales, notes)
            assert "flux" in names and ("flux, parts" in names) == (op not in ("gemm", "all_reduce"))
            assert wrong == [], (op, scales)
            # torch multiplies with block scales on GPUs only.
            usual = ("is not installed", "_scaled_mm with block scales")
            said = [note for note in notes if not any(words in note for words in usual)]
            assert said == [], (op, scales)
