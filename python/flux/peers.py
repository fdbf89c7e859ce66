"""All-reduces of other packages as peers, alone and with residual and RMSNorm, where these are installed.

None of them may create NVLink multicast objects.
"""

from __future__ import annotations

from collections.abc import Callable
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


# By the name in tables: the module of the package, and how its operator is opened.
PEERS = {
    "vLLM": ("vllm", _vllm),
    "FlashInfer": ("flashinfer", _flashinfer),
}


def versions() -> dict[str, str]:
    """The versions of the packages whose peers are here."""
    owners = metadata.packages_distributions()  # vLLM's build for CPUs has another name
    modules = {PEERS[name][0] for name in here()}
    packages = sorted({owner for module in modules for owner in owners.get(module, ())})
    return {package: metadata.version(package) for package in packages}


def here() -> list[str]:
    """The peers whose packages are installed."""
    return [name for name, (module, _) in PEERS.items() if find_spec(module)]
