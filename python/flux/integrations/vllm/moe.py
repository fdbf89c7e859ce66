"""The replacement of vLLM's MoERunner, which runs the experts of a layer and sums over ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tp_group
from vllm.model_executor import custom_op
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from flux import _invariance
from flux.fp8.scales import BLOCK, Scaling
from flux.integrations.vllm import compiled, layer, rows
from flux.integrations.vllm.experts import Scales, experts_of_own_rows, own_experts, summed_experts
from flux.integrations.vllm.op import all_reduce_below
from flux.integrations.vllm.ranges import ALIGNMENT, Layer, experts_from, experts_sum_from
from flux.integrations.vllm.report import NEVER, report, setting, tell
from flux.moe.routing import MAX_TOP_K
from flux.ops.explain import current_device

_NAME = "MoERunner"
_KIND = "MoE"
# vLLM's kernels for experts that do not repack the weights (gates first). (The kernel for CPUs
# repacks them; see _keep_weights.)
_KERNELS = ("TRITON", "CPU")
_FP8_METHOD = "Fp8MoEMethod"
_WEIGHTS = ("w13_weight", "w2_weight")


class FluxMoERunner(MoERunner):  # type: ignore[misc]
    """MoERunner that gives batches of enough tokens to flux.

    Of small ones flux computes this rank's part, and vLLM's all-reduce follows. From `_flux_sums_from` tokens
    on flux sums over ranks, too. In sequence-parallel models it takes and gives own rows, if `_flux_may_sum`.
    Layers that flux does not serve behave as vLLM's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        why_not = layer.first_that_applies(_reasons(self))
        self._flux_may_sum, self._flux_sums_from = False, NEVER
        if why_not is not None:
            report.refused[_KIND, why_not] += 1
            return
        group, moe, experts = get_tp_group(), self.moe_config, self.routed_experts
        self._flux_from, why = experts_from()
        self._flux_slices = group.world_size if moe.moe_parallel_config.use_ep else 1
        self._flux_may_sum = self.shared_experts is None and _are_in_order(experts.expert_map, group)
        if self._flux_may_sum and self._flux_slices == 1:
            of_sum = Layer(moe.hidden_dim, 1, group.world_size, experts.params_dtype.itemsize)
            self._flux_sums_from = max(self._flux_from, experts_sum_from(of_sum, current_device()))
        kind = _KIND if type(experts.quant_method) is UnquantizedFusedMoEMethod else f"{_KIND} fp8"
        kind = f"{kind}, own part," if self._flux_sums_from == NEVER else kind
        report.served[kind, self._flux_from, why] += 1
        self._flux_group = (str(group.device_group.group_name), group.rank_in_group, group.world_size)
        self._flux_vllm_group = str(group.unique_name)
        # Weights, then the scales of fp8 ones: they may be replaced, so they are looked up in each call.
        scale = getattr(experts.quant_method, "weight_scale_name", None)
        scales = [] if scale is None else [f"{each.removesuffix('weight')}{scale}" for each in _WEIGHTS]
        self._flux_look_up = attrgetter(*_WEIGHTS, *scales)
        self._flux_copies: tuple[torch.Tensor, ...] = ()
        rows.define_experts(moe_runner._moe_forward)
        if current_platform.is_cpu():
            # Otherwise vLLM would trace into the experts, and the number of tokens would become a constant.
            shared = self.shared_experts is not None
            self._forward_entry = torch.ops.vllm.moe_forward_shared if shared else torch.ops.vllm.moe_forward
            self._keep_weights()
        self._take_own_part()
        if layer.rules.mode != "layer" and self._flux_sums_from != NEVER:
            layer.rules.install()
            compiled.split_range(get_current_vllm_config_or_none(), self._flux_sums_from)

    def _apply_quant_method(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, **others: Any
    ) -> Any:
        """Chooses and runs the experts, inside the operator that vLLM's graphs contain."""
        given = {"hidden_states": hidden_states, "router_logits": router_logits}
        own_rows = rows.rows_are_own()
        if not own_rows and hidden_states.shape[0] < self._flux_sums_from:
            return super()._apply_quant_method(**given, **others)
        self._size_workspace(hidden_states)
        weights, ids = self.router.select_experts(
            **given, topk_indices_dtype=torch.int32, input_ids=others.get("input_ids")
        )
        w13, w2, scales = self._loaded()
        arguments = (hidden_states, ids, weights, w13, w2)
        if own_rows:
            where = (self._flux_group[0], self._flux_slices)
            return None, experts_of_own_rows(*arguments, *where, scales=scales)
        return None, summed_experts(*arguments, *self._flux_group, scales=scales)

    def _maybe_reduce_final_output(self, states: torch.Tensor, trunc_size: int | None, *others: Any) -> Any:
        """Sums the output over ranks, unless flux has already done so."""
        if not self._flux_may_sum:
            return super()._maybe_reduce_final_output(states, trunc_size, *others)
        total = all_reduce_below(states, self._flux_sums_from, self._flux_vllm_group)
        return total if trunc_size is None else total[..., :trunc_size]

    def _take_own_part(self) -> None:
        """Lets flux compute what vLLM's kernel would, without shared experts, in batches of enough tokens."""
        experts, own_group = self.routed_experts, _group_of_this_rank()
        forward = self._flux_theirs = experts.forward_modular
        self._flux_has_sized = False

        def own_part(x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if x.shape[0] < self._flux_from:
                return forward(x, topk_weights, topk_ids, *args, **kwargs)
            self._size_workspace(x)
            here = experts.expert_map
            ids = topk_ids if here is None else here[topk_ids]
            w13, w2, scales = self._loaded()
            return own_experts(x, ids, topk_weights, w13, w2, own_group, scales=scales)

        experts.forward_modular = own_part

    def _size_workspace(self, x: torch.Tensor) -> None:
        """Before flux's first batch, runs vLLM's kernel on as many tokens as it may get later. That batch is
        vLLM's profiling run; after it, vLLM's workspace must not grow.
        """
        rows = self._flux_from - 1
        if rows > 0 and not self._flux_has_sized:
            self._flux_has_sized = True
            choices = torch.zeros(rows, self.moe_config.experts_per_token, device=x.device)
            self._flux_theirs(x.new_zeros(rows, x.shape[1]), choices, choices.int())

    def _loaded(self) -> tuple[torch.Tensor, torch.Tensor, Scales | None]:
        """The weights, and the scales of fp8 ones."""
        w13, w2, *scales = self._flux_copies or self._flux_look_up(self.routed_experts)
        return w13, w2, (scales[0], scales[1]) if scales else None

    def _keep_weights(self) -> None:
        """Copies the weights before vLLM repacks them for its own kernel."""
        method = self.routed_experts.quant_method
        process = method.process_weights_after_loading

        def copy_and_process(experts: Any) -> None:
            self._flux_copies = tuple(each.detach().clone() for each in self._flux_look_up(experts))
            process(experts)

        method.process_weights_after_loading = copy_and_process


def replace_runner() -> None:
    """Registers the runner with vLLM; doing it again is fine. layer.replace_row_parallel comes first."""
    present = custom_op.op_registry_oot.get(_NAME)
    if present is FluxMoERunner:
        return
    if present is not None:
        why = f"another plugin has replaced {_NAME} by {present.__name__}"
        tell(f"MoE layers stay vLLM's: {why}", logging.WARNING)
        return
    compiled.distinguish_cached_graphs("moe")
    MoERunner.register_oot(name=_NAME)(FluxMoERunner)


def _reasons(runner: MoERunner) -> Iterator[tuple[str, bool]]:
    """As of layer._reasons."""
    config, moe, experts = get_current_vllm_config_or_none(), runner.moe_config, runner.routed_experts
    parallel, method = moe.moe_parallel_config, experts.quant_method
    yield from _reasons_of_weights(method, moe)
    yield "flux's experts are not batch invariant", _invariance.active()
    yield from layer.common_reasons(config, experts.params_dtype).items()
    yield "experts move between ranks", bool(parallel.enable_eplb)
    # Under expert parallelism, vLLM counts one rank of tensor parallelism.
    yield "they are not sharded over ranks", parallel.tp_size == 1 and not parallel.use_ep
    yield "ranks have different tokens", max(parallel.dp_size, parallel.pcp_size, parallel.sp_size) > 1
    # By a pass, which counts on an all-reduce behind each layer; newer versions have none.
    passes: Any = None if config is None else config.compilation_config.pass_config
    yield "vLLM makes the model sequence-parallel", bool(getattr(passes, "enable_sp", False))
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
    sizes = (moe.hidden_dim, moe.intermediate_size_per_partition)
    yield "sizes are not multiples of 8", any(size % ALIGNMENT for size in sizes)
    yield "vLLM is told which kernel to use", moe.moe_backend != "auto"
    is_plain = type(method) is UnquantizedFusedMoEMethod
    kernel = (method.unquantized_backend if is_plain else method.fp8_backend).name
    yield f"vLLM's kernel is {kernel}", kernel not in _KERNELS
    yield "vLLM's kernel chooses the experts", bool(method.is_monolithic)
    dtype = experts.params_dtype
    how = (dtype,) if is_plain else (torch.float8_e4m3fn, "gemm_ar", Scaling("block", dtype))
    unfused = layer.unfused_reason(*sizes, *how)
    yield f"flux would run unfused: {unfused}", unfused is not None


def _reasons_of_weights(method: Any, moe: Any) -> Iterator[tuple[str, bool]]:
    """What could be in the way of quantised weights. Nothing shows that flux's experts are faster than vLLM's
    kernels for fp8, so the user has to say from how many tokens on they are to run.
    """
    if type(method) is UnquantizedFusedMoEMethod:
        return
    name = type(method).__name__
    yield f"weights are quantised ({name})", name != _FP8_METHOD
    yield "weights are fp8, and FLUX_VLLM_MIN_TOKENS is not set", not setting("FLUX_VLLM_MIN_TOKENS")
    blocks = method.block_quant and list(method.weight_block_size) == [BLOCK, BLOCK]
    refined = getattr(method, "weight_scale_refine", None) is not None
    yield "weights are fp8 with other scales than for 128 by 128", not blocks or refined
    yield "vLLM quantises the weights", not method.quant_config.is_checkpoint_fp8_serialized
    parts = (moe.hidden_dim, moe.intermediate_size_per_partition)
    yield "weights are fp8, and sizes no multiples of 128", any(size % BLOCK for size in parts)


@functools.cache
def _group_of_this_rank() -> str:
    """A process group of this rank alone; nobody else takes part in making it."""
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return str(group.group_name)


def _are_in_order(here: torch.Tensor | None, group: Any) -> bool:
    """Whether each rank has a part of all experts (None), or the first rank the first ones, and so on."""
    if here is None:  # else for each expert its place on this rank, or -1
        return True
    count, rest = divmod(len(here), group.world_size)
    first = count * group.rank_in_group
    return not rest and here[first : first + count].tolist() == list(range(count))
