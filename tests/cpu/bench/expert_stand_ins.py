"""Stand-ins for packages that exchange the tokens of experts, or compute whole layers of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Buffer:
    """As deep_ep.Buffer of 1.2."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes == 7 * 64 * 4 and not num_rdma_bytes
        self.group = group

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: 7 * hidden_bytes)

    get_combine_config = get_dispatch_config

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
    ) -> tuple[Tensor, None, None, Any, Any, None]:
        told = handle is None
        if handle is None:
            assert num_tokens_per_rank is not None and num_tokens_per_rank.dtype == torch.int32
            assert is_token_in_rank is not None and is_token_in_rank.dtype == torch.bool
            assert torch.equal(is_token_in_rank.sum(0), num_tokens_per_rank)
            assert num_tokens_per_expert is not None
            leaving = num_tokens_per_rank.long()
            arriving = torch.empty_like(leaving)
            dist.all_to_all_single(arriving, leaving, group=self.group)
            sent = is_token_in_rank.t().nonzero()[:, 1]
            handle = sent, len(x), leaving.tolist(), arriving.tolist()
        sent, _, leaving, arriving = handle
        got = x.new_empty(sum(arriving), x.shape[1])
        dist.all_to_all_single(got, x[sent], arriving, leaving, group=self.group)
        return got, None, None, [0], handle if told else None, None

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, None, None]:
        sent, tokens, leaving, arriving = handle
        home = x.new_empty(len(sent), x.shape[1])
        dist.all_to_all_single(home, x, leaving, arriving, group=self.group)
        return x.new_zeros(tokens, x.shape[1]).index_add_(0, sent, home), None, None


class MoeAlltoAll:
    """As flashinfer.comm.trtllm_moe_alltoall.MoeAlltoAll of 0.7: rows of a source arrive in any order."""

    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ) -> None:
        assert mapping.moe_ep_size == num_experts and hidden_size and mnnvl_config.comm_backend.group
        self.rank, self.p, self.top_k, self.phase = mapping.rank, num_experts, top_k, "idle"

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: list[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> list[Tensor]:
        assert self.phase == "idle" and token_selected_experts.dtype == torch.int32
        assert token_selected_experts.shape[1] == self.top_k
        self.phase, limit = "dispatched", runtime_max_tokens_per_rank
        told: list[Any] = [None] * self.p
        dist.all_gather_object(told, (token_selected_experts, input_payloads))
        self.sources = [(ids == self.rank).any(1).nonzero()[:, 0].flip(0) for ids, _ in told]
        received = []
        for i, own in enumerate(input_payloads):
            filled = torch.full((self.p, limit, own.shape[1]), 7).to(own.dtype)  # of an earlier call
            for source, tokens in enumerate(self.sources):
                filled[source, : len(tokens)] = told[source][1][i][tokens]
            received.append(filled)
        return received

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        assert self.phase == "dispatched"
        return torch.zeros(self.p, runtime_max_tokens_per_rank, hidden_size, dtype=dtype)

    def combine(
        self, payload: Tensor, runtime_max_tokens_per_rank: int, payload_in_workspace: bool = False
    ) -> Tensor:
        assert self.phase == "dispatched" and payload_in_workspace
        self.phase = "idle"
        home = torch.zeros_like(payload)
        for source, tokens in enumerate(self.sources):
            home[source, tokens] = payload[source, : len(tokens)]
        dist.all_reduce(home)
        return home[self.rank]


def fused_layer(
    X: Tensor,
    expert_indices: Tensor,
    expert_weights: Tensor,
    all_B: Tensor,
    all_C: Tensor,
    all_A: Tensor,
    num_experts: int,
    top_k: int,
    team_handle: int,
) -> tuple[Tensor, ...]:
    """As liger_cute_kernels.tvm_ffi.moe_fused_fwd_bf16 of 0.1."""
    assert [(*X.shape, num_experts, top_k)] == CONFIGURED and expert_weights.dtype == X.dtype
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (X, expert_indices, expert_weights))
    x, ids, weights = (torch.cat([of_rank[i] for of_rank in told]) for i in range(3))
    y, first = torch.zeros_like(x), dist.get_rank() * len(all_B)
    for e, (gate, up, down) in enumerate(zip(all_B, all_C, all_A, strict=True)):
        made = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
        y += made * (weights * (ids == first + e)).sum(1, keepdim=True)
    dist.all_reduce(y)
    return y.chunk(len(told))[dist.get_rank()], *[torch.empty(0)] * 6


CONFIGURED: list[tuple[int, ...]] = []


def configure(
    max_tokens: int,
    hidden_dim: int,
    max_num_experts: int,
    max_top_k: int,
    num_pes: int,
    num_hosts: int,
    gpus_per_host: int,
) -> None:
    """As liger_cute_kernels.tvm_ffi.moe_configure_symmetric of 0.1."""
    assert num_hosts == 1 and num_pes == gpus_per_host == dist.get_world_size()
    CONFIGURED.append((max_tokens, hidden_dim, max_num_experts, max_top_k))


def other_rows(self: MoeAlltoAll, payload: Tensor, limit: int, payload_in_workspace: bool) -> Tensor:
    self.phase = "idle"
    return payload[self.rank]
