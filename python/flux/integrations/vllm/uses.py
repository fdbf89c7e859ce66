"""Everything that flux uses of vLLM, most of it private: what a version must have to be served. Needs nothing
of vLLM; tools/vllm_uses.py looks the same names up in wheels.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Use:
    """One name of vLLM.

    Attributes:
        part: what does not work without it: "layers" (anything), "sequence", "fp8", "MoE" or "worker";
            "optional": all works.
        module: where flux finds it.
        name: dotted, below the module.
        parameters: of the function, those that flux passes by name, or gets.
        sets: attributes of instances that flux reads or writes.
    """

    part: str
    module: str
    name: str
    parameters: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


_LINEAR = "vllm.model_executor.layers.linear"
_MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANT}.compressed_tensors.compressed_tensors"
_KERNELS = "vllm.model_executor.kernels.linear"
_PASSES = "vllm.compilation.passes"
_WORKER = "vllm.v1.worker.worker_base"

USES = (
    Use("layers", "vllm.config", "get_current_vllm_config_or_none"),
    Use("layers", "vllm.config", "CompilationMode.NONE"),
    Use("layers", "vllm.config", "VllmConfig.compute_hash"),
    Use("layers", "vllm.config", "VllmConfig.lora_config"),
    Use("layers", "vllm.config", "CompilationConfig.compile_ranges_endpoints"),
    Use("layers", "vllm.config", "ParallelConfig.use_ubatching"),
    Use("layers", "vllm.envs", "VLLM_BATCH_INVARIANT"),
    Use(
        "layers",
        "vllm.distributed.parallel_state",
        "GroupCoordinator",
        sets=("device_group", "unique_name", "rank_in_group", "world_size"),
    ),
    Use("layers", "vllm.distributed", "get_tp_group"),
    Use("layers", "vllm.distributed.parallel_state", "all_reduce", ("tensor", "group_name")),
    Use("layers", "vllm.platforms", "current_platform"),
    Use("layers", "vllm.model_executor.custom_op", "op_registry_oot"),
    Use("layers", _LINEAR, "UnquantizedLinearMethod"),
    Use("layers", _LINEAR, "RowParallelLinear.register_oot", ("name",)),
    Use(
        "layers",
        _LINEAR,
        "RowParallelLinear.forward",
        ("input_",),
        sets=(
            "tp_size",
            "reduce_results",
            "input_is_parallel",
            "input_size_per_partition",
            "output_size",
            "params_dtype",
            "quant_method",
            "bias",
            "skip_bias_add",
            "return_bias",
        ),
    ),
    Use("layers", f"{_PASSES}.inductor_pass", "InductorPass.hash_source"),
    Use("layers", f"{_PASSES}.inductor_pass", "InductorPass.is_applicable_for_range", ("compile_range",)),
    Use("layers", f"{_PASSES}.inductor_pass", "get_pass_context"),
    Use("layers", f"{_PASSES}.inductor_pass", "PassContext", sets=("compile_range",)),
    Use("layers", f"{_PASSES}.pass_manager", "PostGradPassManager.configure", ("config",), sets=("passes",)),
    Use("sequence", "vllm.compilation.backends", "VllmBackend.__call__", ("graph", "example_inputs")),
    Use("sequence", "vllm.compilation.backends", "VllmBackend", sets=("vllm_config",)),
    Use("fp8", "vllm.config", "CompilationMode.VLLM_COMPILE"),
    Use("fp8", _LINEAR, "ColumnParallelLinear"),
    Use("fp8", f"{_QUANT}.fp8", "Fp8LinearMethod.apply", ("layer", "x", "bias"), sets=("fp8_linear",)),
    Use("fp8", f"{_QUANT}.fp8", "Fp8LinearMethod.process_weights_after_loading", ("layer",)),
    Use("fp8", _COMPRESSED, "CompressedTensorsLinearMethod.apply", ("layer", "x", "bias")),
    Use("fp8", _COMPRESSED, "CompressedTensorsLinearMethod.process_weights_after_loading", ("layer",)),
    Use(
        "fp8",
        f"{_QUANT}.compressed_tensors.schemes",
        "CompressedTensorsW8A8Fp8",
        sets=("fp8_linear",),
    ),
    Use("fp8", f"{_QUANT}.input_quant_fp8", "QuantFP8", sets=("use_ue8m0",)),
    Use("fp8", _KERNELS, "FP8ScaledMMLinearKernel", sets=("config", "quant_fp8")),
    Use("fp8", _KERNELS, "Fp8BlockScaledMMLinearKernel", sets=("config", "quant_fp8")),
    Use(
        "fp8",
        _KERNELS,
        "FP8ScaledMMLinearLayerConfig",
        sets=("activation_quant_key", "weight_quant_key", "weight_shape", "out_dtype"),
    ),
    Use("worker", "vllm.envs", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
    Use("worker", "vllm.v1.outputs", "AsyncModelRunnerOutput.get_output"),
    Use("worker", _WORKER, "WorkerBase.sample_tokens"),
    Use("worker", _WORKER, "WorkerWrapperBase.execute_model", ("scheduler_output",), sets=("worker",)),
    Use("worker", _WORKER, "WorkerBase.compile_or_warm_up_model", sets=("rank",)),
    Use("MoE", f"{_MOE}.activation", "MoEActivation.SILU"),
    Use("MoE", f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
    Use("MoE", f"{_MOE}.runner.moe_runner", "MoERunner.register_oot", ("name",)),
    Use(
        "MoE",
        f"{_MOE}.runner.moe_runner",
        "_moe_forward",
        ("hidden_states", "router_logits", "shared_experts_input", "input_ids", "layer_name"),
    ),
    Use(
        "MoE",
        f"{_MOE}.runner.moe_runner",
        "MoERunner._apply_quant_method",
        ("hidden_states", "router_logits", "input_ids"),
        sets=("router", "routed_experts", "moe_config", "_forward_entry"),
    ),
    Use(
        "MoE",
        f"{_MOE}.runner.moe_runner",
        "MoERunner._maybe_reduce_final_output",
        ("states", "trunc_size"),
    ),
    Use("MoE", f"{_MOE}.config", "FusedMoEConfig.moe_parallel_config"),
    Use(
        "MoE",
        f"{_MOE}.routed_experts",
        "RoutedExperts.forward_modular",
        ("x", "topk_weights", "topk_ids"),
    ),
    Use("MoE", f"{_MOE}.routed_experts", "RoutedExperts.expert_map"),
    Use(
        "optional",
        "vllm.ir.ops.layernorm",
        "fused_add_rms_norm",
        ("x", "x_residual", "weight", "epsilon", "variance_size"),
    ),
    Use(
        "optional",
        f"{_PASSES}.fusion.allreduce_rms_fusion",
        "AllReduceFusionPass.is_applicable_for_range",
        ("compile_range",),
    ),
    Use(
        "optional",
        f"{_PASSES}.fusion.sequence_parallelism",
        "SequenceParallelismPass.is_applicable_for_range",
        ("compile_range",),
    ),
    Use("optional", "vllm.model_executor.parameter", "BasevLLMParameter.__torch_function__"),
)


def missing(part: str) -> str | None:
    """What the installed vLLM lacks of a part: the first name that it does not have, or has with other
    parameters; or None.
    """
    return next((lack for use in USES if use.part == part and (lack := _missing(use)) is not None), None)


def _missing(use: Use) -> str | None:
    try:
        found = _look_up(use)
    except Exception as error:  # whatever its import raises: vLLM goes on without flux
        return f"it has no {use.path} ({error})"
    names = inspect.signature(found).parameters if use.parameters else {}
    lost = [name for name in use.parameters if name not in names]
    return f"its {use.path} has no parameter {lost[0]}" if lost else None


def _look_up(use: Use) -> Any:
    found: Any = import_module(use.module)
    for name in use.name.split("."):
        fields = getattr(found, "__dataclass_fields__", {})
        found = fields[name] if name in fields else getattr(found, name)
    return found
