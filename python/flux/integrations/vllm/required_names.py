"""Everything that flux uses of vLLM, most of it private: what a version must have to be served. Needs nothing
of vLLM; tools/vllm_uses.py looks the same names up in wheels.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Name:
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


def _name(part: str, module: str, name: str, parameters: str = "", sets: str = "") -> Name:
    return Name(part, module, name, tuple(parameters.split()), tuple(sets.split()))


_LINEAR = "vllm.model_executor.layers.linear"
_MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANT}.compressed_tensors.compressed_tensors"
_KERNELS = "vllm.model_executor.kernels.linear"
_PASSES = "vllm.compilation.passes"
_WORKER = "vllm.v1.worker.worker_base"

NAMES = (
    _name("layers", "vllm.config", "get_current_vllm_config_or_none"),
    _name("layers", "vllm.config", "CompilationMode.NONE"),
    _name("layers", "vllm.config", "VllmConfig.compute_hash"),
    _name("layers", "vllm.config", "VllmConfig.lora_config"),
    _name("layers", "vllm.config", "CompilationConfig.compile_ranges_endpoints"),
    _name("layers", "vllm.config", "ParallelConfig.use_ubatching"),
    _name("layers", "vllm.envs", "VLLM_BATCH_INVARIANT"),
    _name(
        "layers",
        "vllm.distributed.parallel_state",
        "GroupCoordinator",
        sets="device_group unique_name rank_in_group world_size",
    ),
    _name("layers", "vllm.distributed", "get_tp_group"),
    _name("layers", "vllm.distributed.parallel_state", "all_reduce", "tensor group_name"),
    _name("layers", "vllm.platforms", "current_platform"),
    _name("layers", "vllm.model_executor.custom_op", "op_registry_oot"),
    _name("layers", _LINEAR, "UnquantizedLinearMethod"),
    _name("layers", _LINEAR, "RowParallelLinear.register_oot", "name"),
    _name(
        "layers",
        _LINEAR,
        "RowParallelLinear.forward",
        "input_",
        sets="tp_size reduce_results input_is_parallel input_size_per_partition output_size params_dtype "
        "quant_method bias skip_bias_add return_bias",
    ),
    _name("layers", f"{_PASSES}.inductor_pass", "InductorPass.hash_source"),
    _name("layers", f"{_PASSES}.inductor_pass", "InductorPass.is_applicable_for_range", "compile_range"),
    _name("layers", f"{_PASSES}.inductor_pass", "get_pass_context"),
    _name("layers", f"{_PASSES}.inductor_pass", "PassContext", sets="compile_range"),
    _name("layers", f"{_PASSES}.pass_manager", "PostGradPassManager.configure", "config", sets="passes"),
    _name("sequence", "vllm.compilation.backends", "VllmBackend.__call__", "graph example_inputs"),
    _name("sequence", "vllm.compilation.backends", "VllmBackend", sets="vllm_config"),
    _name("fp8", "vllm.config", "CompilationMode.VLLM_COMPILE"),
    _name("fp8", _LINEAR, "ColumnParallelLinear"),
    _name("fp8", f"{_QUANT}.fp8", "Fp8LinearMethod.apply", "layer x bias", sets="fp8_linear"),
    _name("fp8", f"{_QUANT}.fp8", "Fp8LinearMethod.process_weights_after_loading", "layer"),
    _name("fp8", _COMPRESSED, "CompressedTensorsLinearMethod.apply", "layer x bias"),
    _name("fp8", _COMPRESSED, "CompressedTensorsLinearMethod.process_weights_after_loading", "layer"),
    _name("fp8", f"{_QUANT}.compressed_tensors.schemes", "CompressedTensorsW8A8Fp8", sets="fp8_linear"),
    _name("fp8", f"{_QUANT}.input_quant_fp8", "QuantFP8", sets="use_ue8m0"),
    _name("fp8", _KERNELS, "FP8ScaledMMLinearKernel", sets="config quant_fp8"),
    _name("fp8", _KERNELS, "Fp8BlockScaledMMLinearKernel", sets="config quant_fp8"),
    _name(
        "fp8",
        _KERNELS,
        "FP8ScaledMMLinearLayerConfig",
        sets="activation_quant_key weight_quant_key weight_shape out_dtype",
    ),
    _name("worker", "vllm.envs", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
    _name("worker", "vllm.v1.outputs", "AsyncModelRunnerOutput.get_output"),
    _name("worker", _WORKER, "WorkerBase.sample_tokens"),
    _name("worker", _WORKER, "WorkerWrapperBase.execute_model", "scheduler_output", sets="worker"),
    _name("worker", _WORKER, "WorkerBase.compile_or_warm_up_model", sets="rank"),
    _name("MoE", f"{_MOE}.activation", "MoEActivation.SILU"),
    _name("MoE", f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
    _name("MoE", f"{_MOE}.runner.moe_runner", "MoERunner.register_oot", "name"),
    _name(
        "MoE",
        f"{_MOE}.runner.moe_runner",
        "_moe_forward",
        "hidden_states router_logits shared_experts_input input_ids layer_name",
    ),
    _name(
        "MoE",
        f"{_MOE}.runner.moe_runner",
        "MoERunner._apply_quant_method",
        "hidden_states router_logits input_ids",
        sets="router routed_experts moe_config _forward_entry",
    ),
    _name("MoE", f"{_MOE}.runner.moe_runner", "MoERunner._maybe_reduce_final_output", "states trunc_size"),
    _name("MoE", f"{_MOE}.config", "FusedMoEConfig.moe_parallel_config"),
    _name("MoE", f"{_MOE}.routed_experts", "RoutedExperts.forward_modular", "x topk_weights topk_ids"),
    _name("MoE", f"{_MOE}.routed_experts", "RoutedExperts.expert_map"),
    _name(
        "optional", "vllm.ir.ops.layernorm", "fused_add_rms_norm", "x x_residual weight epsilon variance_size"
    ),
    _name(
        "optional",
        f"{_PASSES}.fusion.allreduce_rms_fusion",
        "AllReduceFusionPass.is_applicable_for_range",
        "compile_range",
    ),
    _name(
        "optional",
        f"{_PASSES}.fusion.sequence_parallelism",
        "SequenceParallelismPass.is_applicable_for_range",
        "compile_range",
    ),
    _name("optional", "vllm.model_executor.parameter", "BasevLLMParameter.__torch_function__"),
)


def missing(part: str) -> str | None:
    """What the installed vLLM lacks of a part: the first name that it does not have, or has with other
    parameters; or None.
    """
    return next((lack for use in NAMES if use.part == part and (lack := _missing(use)) is not None), None)


def _missing(use: Name) -> str | None:
    try:
        found = _look_up(use)
    except Exception as error:  # whatever its import raises: vLLM goes on without flux
        return f"it has no {use.path} ({error})"
    names = inspect.signature(found).parameters if use.parameters else {}
    lost = [name for name in use.parameters if name not in names]
    return f"its {use.path} has no parameter {lost[0]}" if lost else None


def _look_up(use: Name) -> Any:
    found: Any = import_module(use.module)
    for name in use.name.split("."):
        fields = getattr(found, "__dataclass_fields__", {})
        found = fields[name] if name in fields else getattr(found, name)
    return found
