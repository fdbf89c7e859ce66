"""Operators of other packages as peers, where these are installed: all-reduces, alone and with residual and
RMSNorm; fused GEMMs; cuBLASLt's GEMM with its heuristic's candidates timed; the exchange of experts' tokens;
fused layers of experts.

None of them may create NVLink multicast objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Inside = Callable[[], AbstractContextManager[Any]]
# Of x [m, n] and a residual: the sum over ranks and None; with a norm, the normalised sum and the sum. It may
# write to both arguments.
Reduce = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
# Of a rank's x and weight [n, k]: the operator's result on this rank.
Product = Callable[[Tensor, Tensor], Tensor]
# Of a rank's tokens, their experts and weights, and both weights of the rank's experts: the tokens' results.
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Ranks(Protocol):
    """The ranks that sum, as the context of a benchmark has them."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def group(self) -> dist.ProcessGroup | None: ...


@dataclass(frozen=True)
class Norm:
    """RMSNorm behind a sum, and the residual that is added before it."""

    residual: Tensor
    weight: Tensor
    eps: float

    def of(self, total: Tensor) -> Tensor:
        """By torch."""
        return torch.nn.functional.rms_norm(total, self.weight.shape, self.weight, self.eps)

    def behind(self, total: Tensor) -> Tensor:
        """Adds and normalises, by torch."""
        return self.of(total + self.residual)


def _vllm(ranks: Ranks, m: int, n: int, norm: Norm | None) -> tuple[Reduce, Inside]:
    """vLLM's custom all-reduce, and then its kernel that adds and normalises."""
    communicator = import_module("vllm.distributed.device_communicators.custom_all_reduce")
    reducer = communicator.CustomAllreduce(group=dist.new_group(backend="gloo"), device=ranks.device)
    getattr(reducer, "finalize_p2p", nullcontext)()  # newer ones complete here
    if reducer.disabled:
        raise RuntimeError("it is disabled on this machine")
    ops = import_module("vllm._custom_ops") if norm else None

    def reduce(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        total = reducer.custom_all_reduce(x)
        if total is None:
            raise RuntimeError(f"it does not sum [{m}, {n}]")
        if norm is None or ops is None:
            return total, None
        ops.fused_add_rms_norm(total, residual, norm.weight, norm.eps)
        return total, residual

    return reduce, reducer.capture


def _flashinfer(ranks: Ranks, m: int, n: int, norm: Norm | None) -> tuple[Reduce, Inside]:
    """FlashInfer's TensorRT-LLM all-reduce, with residual and norm in one launch."""
    comm, p = import_module("flashinfer.comm.trtllm_ar"), ranks.world_size
    # Without symmetric device memory, which would have multicast objects.
    made = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        tp_rank=ranks.rank, tp_size=p, max_token_num=m, hidden_dim=n, group=ranks.group
    )
    patterns, outs = (
        comm.AllReduceFusionPattern,
        [torch.empty_like(norm.residual) for _ in "12"] if norm else [],
    )
    given: dict[str, Any] = {"pattern_code": patterns.kAllReduce}
    if norm is not None:
        given = {"pattern_code": patterns.kARResidualRMSNorm, "rms_gamma": norm.weight, "rms_eps": norm.eps}
        given |= {"norm_out": outs[0], "residual_out": outs[1]}
    whole = {"workspace_ptrs": made[1], "launch_with_pdl": True, "trigger_completion_at_end": True}
    sizes = {"world_size": p, "world_rank": ranks.rank, "token_num": m, "hidden_dim": n, "fp32_acc": True}
    names = (
        "use_oneshot",
        "allreduce_out",
        "residual_in",
        "residual_out",
        "norm_out",
        "quant_out",
        "scale_out",
    )
    absent = dict.fromkeys((*names, "rms_gamma", "rms_eps", "scale_factor", "layout_code"))
    total = torch.empty(m, n, dtype=ranks.dtype, device=ranks.device)

    def reduce(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        rest = {"residual_in": residual} if norm else {"allreduce_out": total}
        comm.trtllm_allreduce_fusion(allreduce_in=x, **{**absent, **sizes, **whole, **given, **rest})
        return (outs[0], outs[1]) if norm else (total, None)

    return reduce, nullcontext


def _cublaslt(ranks: Ranks, m: int, n: int, k: int) -> Product:
    """cuBLASLt's fastest algorithm among those that its heuristic proposes, for each pair of operands."""
    matmul = import_module("nvmath.linalg.advanced").Matmul
    tuned: dict[tuple[int, int], Any] = {}  # each keeps its operands, so no address comes twice

    def call(x: Tensor, weight: Tensor) -> Tensor:
        which = x.data_ptr(), weight.data_ptr()
        if which not in tuned:
            made = tuned[which] = matmul(x, weight.t())
            made.plan(preferences={"limit": 16})
            made.autotune(iterations=10)
        result: Tensor = tuned[which].execute()
        return result

    return call


def _quack(ranks: Ranks, m: int, n: int, k: int) -> Product:
    """QuACK's AllGather+GEMM: copy engines push, the GEMM waits for each shard."""
    gathers = import_module("quack.distributed.all_gather_gemm")
    runner = gathers.AllGatherRunner(m // ranks.world_size, k, ranks.dtype, ranks.group, ranks.device)
    gemm, of = (
        import_module("quack.gemm").gemm,
        import_module("quack.gemm_config").default_config(ranks.device),
    )
    out = torch.empty(m, n, dtype=ranks.dtype, device=ranks.device)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        with runner.gather(x) as (gathered, arguments):
            tile = (of.tile_m, of.tile_n, of.cluster_m, of.cluster_n)
            gemm(gathered, weight, out, None, None, *tile, pingpong=of.pingpong, ag_args=arguments)
        return out

    return call


def _userbuffers(mode: str) -> Callable[[Ranks, int, int, int], Product]:
    """TransformerEngine's linear layer, its GEMM and collective overlapped. mode: of its parallelism."""

    def made(ranks: Ranks, m: int, n: int, k: int) -> Product:
        column, p = mode == "column", ranks.world_size
        base = import_module("transformer_engine.pytorch.module.base")
        base.destroy_ub()  # of the row before
        kinds = [base.UserBufferQuantizationMode.NONE]
        base.initialize_ub([m, k if column else n], p, quantization_modes=kinds, dtype=ranks.dtype)
        layer = import_module("transformer_engine.pytorch").Linear(
            k if column else k * p,
            n * p if column else n,
            sequence_parallel=True,
            tp_group=ranks.group,
            tp_size=p,
            bias=False,
            params_dtype=ranks.dtype,
            parallel_mode=mode,
            device=ranks.device,
            ub_overlap_ag=column,
            ub_overlap_rs=not column,
            ub_name="qkv" if column else "proj",
        )

        def call(x: Tensor, weight: Tensor) -> Tensor:
            layer.weight.data = weight
            result: Tensor = layer(x)
            return result

        return call

    return made


def _deep_ep(ranks: Ranks, goes: Tensor, columns: int) -> tuple[Callable[[Tensor], Tensor], ...]:
    """DeepEP's kernels for one node, with the layout known. goes [tokens, ranks]: who needs which token.

    Returns dispatch, x [tokens, columns] to the rows that arrive, by rank, then token; and combine, such
    rows to each token's sum.
    """
    buffers, p = import_module("deep_ep").Buffer, ranks.world_size
    configs = buffers.get_dispatch_config(p), buffers.get_combine_config(p)
    size = max(config.get_nvl_buffer_size_hint(columns * ranks.dtype.itemsize, p) for config in configs)
    buffer = buffers(ranks.group, size)
    to_ranks = goes.sum(0, dtype=torch.int32)
    empty = torch.zeros(len(goes), columns, dtype=ranks.dtype, device=ranks.device)
    layout = {"num_tokens_per_rank": to_ranks, "is_token_in_rank": goes}
    # As if each rank had one expert.
    handle = buffer.dispatch(empty, **layout, num_tokens_per_expert=to_ranks)[4]
    return lambda x: buffer.dispatch(x, handle=handle)[0], lambda rows: buffer.combine(rows, handle)[0]


def _flashinfer_experts(ranks: Ranks, goes: Tensor, columns: int) -> tuple[Callable[[Tensor], Tensor], ...]:
    """FlashInfer's one-sided all-to-all; as _deep_ep, but each dispatch must be followed by its combine. Rows
    arrive in any order, so their numbers travel with them.
    """
    mnnvl = import_module("flashinfer.comm.mnnvl")
    p, limit, device = ranks.world_size, len(goes), goes.device
    everybody = [torch.empty_like(goes, dtype=torch.int32) for _ in range(p)]
    dist.all_gather(everybody, goes.int(), group=ranks.group)
    needs = torch.stack(everybody)
    counts = needs[:, :, ranks.rank].sum(1).tolist()
    arriving = needs[:, :, ranks.rank].flatten().nonzero().flatten()
    # As if each rank had one expert. Who needs fewer ranks than others names one of them again.
    top_k = max(int(needs.sum(2).max()), 1)
    order = goes.int().argsort(dim=1, descending=True, stable=True)
    chosen = torch.where(goes.gather(1, order), order, order[:, :1])[:, :top_k].int().contiguous()
    numbers = torch.arange(limit, dtype=torch.int32, device=device)[:, None] + ranks.rank * limit
    exchange = import_module("flashinfer.comm.trtllm_moe_alltoall").MoeAlltoAll(
        import_module("flashinfer.comm.mapping").Mapping(
            rank=ranks.rank, tp_size=p, moe_ep_size=p, world_size=p
        ),
        max_num_tokens=limit,
        top_k=top_k,
        num_experts=p,
        hidden_size=columns,
        mnnvl_config=mnnvl.MnnvlConfig(comm_backend=mnnvl.TorchDistBackend(ranks.group)),
    )
    filled = torch.cat([torch.arange(c, device=device) + i * limit for i, c in enumerate(counts)])
    place = torch.zeros(p * limit, dtype=torch.long, device=device)
    found = arriving

    def dispatch(x: Tensor) -> Tensor:
        nonlocal found
        rows, told = exchange.dispatch(chosen, [x, numbers], limit)
        place[told.view(-1)[filled].long()] = filled
        found = place[arriving]
        result: Tensor = rows.view(p * limit, -1).index_select(0, found)
        return result

    def combine(rows: Tensor) -> Tensor:
        payload = exchange.get_combine_payload_tensor_in_workspace(limit, rows.shape[1], rows.dtype)
        payload.view(p * limit, -1).index_copy_(0, found, rows)
        result: Tensor = exchange.combine(payload, limit, payload_in_workspace=True)
        return result

    return dispatch, combine


_with_nvshmem: list[Any] = []  # packages that have started it in this process


def _liger_cute(ranks: Ranks, tokens: int, hidden: int, experts: int, top_k: int) -> Layer:
    """LigerCute's fused forward pass of experts on one node."""
    nvshmem, ffi = (import_module(f"liger_cute_kernels.{name}") for name in ("nvshmem", "tvm_ffi"))
    if nvshmem not in _with_nvshmem:
        nvshmem.init_from_pg(ranks.group)
        _with_nvshmem.append(nvshmem)
    nvshmem.pool_clear_all()  # of the row before
    p, team = ranks.world_size, nvshmem.resolve_team(ranks.group)
    ffi.moe_configure_symmetric(
        max_tokens=tokens,
        hidden_dim=hidden,
        max_num_experts=experts,
        max_top_k=top_k,
        num_pes=p,
        num_hosts=1,
        gpus_per_host=p,
    )

    def call(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        gates, ups = w1.chunk(2, 1)
        shape = {"num_experts": experts, "top_k": top_k, "team_handle": team}
        result: Tensor = ffi.moe_fused_fwd_bf16(x, ids, weights, gates, ups, w2, **shape)[0]
        ffi.moe_pop_fwd()
        return result

    return call


# By the name in tables: the module of the package, and how its operator is opened.
PEERS = {
    "vLLM": ("vllm", _vllm),
    "FlashInfer": ("flashinfer", _flashinfer),
}
EXCHANGES = {"DeepEP": ("deep_ep", _deep_ep)}
PAIRED = {"FlashInfer": ("flashinfer", _flashinfer_experts)}
LAYERS = {"LigerCute": ("liger_cute_kernels", _liger_cute)}
# Of the sizes of a rank's GEMM.
PRODUCTS: dict[str, dict[str, tuple[str, Callable[[Ranks, int, int, int], Product]]]] = {
    "gemm": {"cuBLASLt tuned": ("nvmath", _cublaslt)},
    "ag_gemm": {
        "QuACK": ("quack", _quack),
        "TransformerEngine": ("transformer_engine", _userbuffers("column")),
    },
    "gemm_rs": {"TransformerEngine": ("transformer_engine", _userbuffers("row"))},
}


def versions() -> dict[str, str]:
    """The versions of the packages whose peers are here."""
    owners = metadata.packages_distributions()  # vLLM's build for CPUs has another name
    kinds: list[Mapping[str, tuple[str, Any]]] = [PEERS, EXCHANGES, PAIRED, LAYERS, *PRODUCTS.values()]
    modules = {kind[name][0] for kind in kinds for name in here(kind)}
    packages = sorted({owner for module in modules for owner in owners.get(module, ())})
    return {package: metadata.version(package) for package in packages}


def here(kind: Mapping[str, tuple[str, Any]] = PEERS) -> list[str]:
    """The peers of a kind whose packages are installed."""
    return [name for name, (module, _) in kind.items() if find_spec(module)]
