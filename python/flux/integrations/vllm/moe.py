"""The replacement of vLLM's MoERunner, which runs the experts of a layer and sums over ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tp_group
from vllm.model_executor import custom_op
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from flux import _invariance
from flux.integrations.vllm import compiled, layer
from flux.integrations.vllm.experts import own_experts, summed_experts
from flux.integrations.vllm.op import all_reduce_below
from flux.integrations.vllm.report import report, setting, tell
from flux.integrations.vllm.thresholds import ALIGNMENT
from flux.moe.routing import MAX_TOP_K

_NAME = "MoERunner"
_KIND = "MoE"
# Larger batches were faster where it was measured, batches of 16 and 64 slower (docs/vllm.md).
_FROM_TOKENS = 128
# vLLM's kernels for experts that do not repack the weights (gates first). (The kernel for CPUs
# repacks them; see _keep_weights.)
_KERNELS = ("TRITON", "CPU")


class FluxMoERunner(MoERunner):  # type: ignore[misc]
    """MoERunner that gives batches of enough tokens to flux, which sums over ranks too; the all-reduce behind
    it is for the others only. Of layers with shared experts or expert parallelism, flux computes this rank's
    part, and the all-reduce stays. Layers that flux does not serve behave as vLLM's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        why_not = _why_not(self)
        self._flux_serves = self._flux_sums = False
        if why_not is not None:
            report.refused[_KIND, why_not] += 1
            return
        forced = setting("FLUX_VLLM_MIN_TOKENS")
        self._flux_serves, self._flux_from = True, forced or _FROM_TOKENS
        self._flux_sums = not _has_partial_sums(self)
        kind = _KIND if self._flux_sums else f"{_KIND}, own part,"
        report.served[kind, self._flux_from, "FLUX_VLLM_MIN_TOKENS" if forced else "prefill only"] += 1
        group = get_tp_group()
        self._flux_group = (str(group.device_group.group_name), group.rank_in_group, group.world_size)
        self._flux_vllm_group = str(group.unique_name)
        self._flux_weights: list[torch.Tensor] = []
        if current_platform.is_cpu():
            # Otherwise vLLM would trace into the experts, and the number of tokens would become a constant.
            shared = self.shared_experts is not None
            self._forward_entry = torch.ops.vllm.moe_forward_shared if shared else torch.ops.vllm.moe_forward
            self._keep_weights()
        if not self._flux_sums:
            self._take_own_part()
        if layer.settings.mode != "layer":
            compiled.install()
            compiled.split_range(get_current_vllm_config_or_none(), self._flux_from)

    def _apply_quant_method(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, **others: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Chooses and runs the experts, inside the operator that vLLM's graphs contain."""
        if not self._flux_sums or hidden_states.shape[0] < self._flux_from:
            result: tuple[torch.Tensor | None, torch.Tensor] = super()._apply_quant_method(
                hidden_states=hidden_states, router_logits=router_logits, **others
            )
            return result
        weights, ids = self.router.select_experts(
            hidden_states=hidden_states,
            router_logits=router_logits,
            topk_indices_dtype=torch.int32,
            input_ids=others.get("input_ids"),
        )
        w13, w2 = self._weights()
        return None, summed_experts(hidden_states, ids, weights, w13, w2, *self._flux_group)

    def _maybe_reduce_final_output(
        self, states: torch.Tensor, trunc_size: int | None, *others: Any
    ) -> torch.Tensor:
        """Sums the output over ranks, unless flux has already done so."""
        total: torch.Tensor
        if not self._flux_sums:
            total = super()._maybe_reduce_final_output(states, trunc_size, *others)
            return total
        total = all_reduce_below(states, self._flux_from, self._flux_vllm_group)
        return total if trunc_size is None else total[..., :trunc_size]

    def _take_own_part(self) -> None:
        """Lets flux compute what vLLM's kernel would, for batches of enough tokens. Where all ranks have the
        same tokens, vLLM runs shared experts outside of that kernel.
        """
        experts = self.routed_experts
        # Nobody else takes part in making it.
        group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        forward, own_group = experts.forward_modular, str(group.group_name)

        def own_part(
            x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            if x.shape[0] < self._flux_from:
                theirs: torch.Tensor = forward(x, topk_weights, topk_ids, *args, **kwargs)
                return theirs
            here = experts.expert_map
            ids = topk_ids if here is None else here[topk_ids.long()].to(torch.int32)
            return own_experts(x, ids, topk_weights, *self._weights(), own_group)

        experts.forward_modular = own_part

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        experts = self.routed_experts
        w13, w2 = self._flux_weights or (experts.w13_weight, experts.w2_weight)
        return w13, w2

    def _keep_weights(self) -> None:
        """Copies the weights before vLLM repacks them for its own kernel."""
        method = self.routed_experts.quant_method
        process = method.process_weights_after_loading

        def copy_and_process(experts: Any) -> None:
            self._flux_weights = [experts.w13_weight.detach().clone(), experts.w2_weight.detach().clone()]
            process(experts)

        method.process_weights_after_loading = copy_and_process


def replace_runner() -> None:
    """Registers the runner with vLLM; doing it again is fine. layer.replace_row_parallel comes first."""
    present = custom_op.op_registry_oot.get(_NAME)
    if present is FluxMoERunner:
        return
    if present is not None:
        tell(
            f"MoE layers stay vLLM's: another plugin has replaced {_NAME} by {present.__name__}",
            logging.WARNING,
        )
        return
    compiled.distinguish_cached_graphs("moe")
    MoERunner.register_oot(name=_NAME)(FluxMoERunner)


def _why_not(runner: MoERunner) -> str | None:
    """Why a layer uses vLLM's code, or None. Depends only on facts that are equal on all ranks."""
    return layer.first_that_applies(_reasons(runner))


def _reasons(runner: MoERunner) -> Iterator[tuple[str, bool]]:
    """What could be in the way, and whether it is. In an order in which each question makes sense where those
    before have been answered with no.
    """
    config, moe, experts = get_current_vllm_config_or_none(), runner.moe_config, runner.routed_experts
    parallel, method = moe.moe_parallel_config, experts.quant_method
    yield "weights are quantised", type(method) is not UnquantizedFusedMoEMethod
    yield "flux's experts are not batch invariant", _invariance.active()
    yield from layer.common_reasons(config, experts.params_dtype).items()
    yield "experts move between ranks", bool(parallel.enable_eplb)
    # Under expert parallelism, vLLM counts one rank of tensor parallelism.
    yield "they are not sharded over ranks", parallel.tp_size == 1 and not parallel.use_ep
    yield "ranks have different tokens", max(parallel.dp_size, parallel.pcp_size, parallel.sp_size) > 1
    yield "vLLM makes the model sequence-parallel", _has_sequence_parallelism(config)
    yield "results are not reduced", bool(moe.skip_final_all_reduce)
    transforms = (runner.routed_input_transform, runner.routed_output_transform)
    yield "what experts take or give is transformed", any(transform is not None for transform in transforms)
    yield "LoRA is on", bool(moe.is_lora_enabled)
    yield f"the activation is {moe.activation.value}", moe.activation is not MoEActivation.SILU
    limits = (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)
    yield "the activation has limits or factors", any(limit is not None for limit in limits)
    yield "experts have biases", bool(moe.has_bias)
    yield "routing weights multiply the input", bool(experts.apply_router_weight_on_input)
    yield f"tokens choose more than {MAX_TOP_K} experts", moe.experts_per_token > MAX_TOP_K
    yield (
        "sizes are not multiples of 8",
        any(size % ALIGNMENT for size in (moe.hidden_dim, moe.intermediate_size_per_partition)),
    )
    yield "vLLM is told which kernel to use", moe.moe_backend != "auto"
    kernel = method.unquantized_backend.name
    yield f"vLLM's kernel is {kernel}", kernel not in _KERNELS
    yield "vLLM's kernel chooses the experts", bool(method.is_monolithic)
    unfused = layer.unfused_reason(moe.hidden_dim, moe.intermediate_size_per_partition, experts.params_dtype)
    yield f"flux would run unfused: {unfused}", unfused is not None


def _has_partial_sums(runner: MoERunner) -> bool:
    """Whether what ranks have of a layer is summed with more than the experts that flux sums."""
    return runner.shared_experts is not None or bool(runner.moe_config.moe_parallel_config.use_ep)


def _has_sequence_parallelism(config: Any) -> bool:
    """Whether compiled graphs get it from a pass, which counts on an all-reduce behind each layer; newer
    versions of vLLM have none.
    """
    return config is not None and bool(getattr(config.compilation_config.pass_config, "enable_sp", False))
