"""Everything that flux uses of vLLM, most of it private: what a version must have to be served. Needs nothing
of vLLM; tools/vllm_uses.py looks the same names up in wheels.
"""

from __future__ import annotations

import inspect
import re
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


_LINEAR = "vllm.model_executor.layers.linear"
_MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization"
_KERNELS = "vllm.model_executor.kernels.linear"
_PASSES = "vllm.compilation.passes"
# By part and module: names with their parameters in parentheses, and what is set in brackets.
_USED: dict[str, dict[str, str]] = {
    "layers": {
        "vllm.config": """get_current_vllm_config_or_none CompilationMode.NONE VllmConfig.compute_hash
            VllmConfig.lora_config CompilationConfig.compile_ranges_endpoints ParallelConfig.use_ubatching""",
        "vllm.envs": "VLLM_BATCH_INVARIANT",
        "vllm.distributed.parallel_state": """all_reduce(tensor group_name)
            GroupCoordinator[device_group unique_name rank_in_group world_size]""",
        "vllm.distributed": "get_tp_group",
        "vllm.platforms": "current_platform",
        "vllm.model_executor.custom_op": "op_registry_oot",
        _LINEAR: """UnquantizedLinearMethod RowParallelLinear.register_oot(name)
            RowParallelLinear.forward(input_)[tp_size reduce_results input_is_parallel
            input_size_per_partition output_size params_dtype quant_method bias skip_bias_add return_bias]""",
        f"{_PASSES}.inductor_pass": """InductorPass.hash_source get_pass_context PassContext[compile_range]
            InductorPass.is_applicable_for_range(compile_range)""",
        f"{_PASSES}.pass_manager": "PostGradPassManager.configure(config)[passes]",
    },
    "sequence": {
        "vllm.compilation.backends": "VllmBackend.__call__(graph example_inputs) VllmBackend[vllm_config]"
    },
    "fp8": {
        "vllm.config": "CompilationMode.VLLM_COMPILE",
        _LINEAR: "ColumnParallelLinear",
        f"{_QUANT}.fp8": """Fp8LinearMethod.apply(layer x bias)[fp8_linear]
            Fp8LinearMethod.process_weights_after_loading(layer)""",
        f"{_QUANT}.compressed_tensors.compressed_tensors": """
            CompressedTensorsLinearMethod.apply(layer x bias)
            CompressedTensorsLinearMethod.process_weights_after_loading(layer)""",
        f"{_QUANT}.compressed_tensors.schemes": "CompressedTensorsW8A8Fp8[fp8_linear]",
        f"{_QUANT}.input_quant_fp8": "QuantFP8[use_ue8m0]",
        _KERNELS: """FP8ScaledMMLinearKernel[config quant_fp8] Fp8BlockScaledMMLinearKernel[config quant_fp8]
            FP8ScaledMMLinearLayerConfig[activation_quant_key weight_quant_key weight_shape out_dtype]""",
    },
    "worker": {
        "vllm.envs": "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "vllm.v1.outputs": "AsyncModelRunnerOutput.get_output",
        "vllm.v1.worker.worker_base": """WorkerBase.sample_tokens WorkerBase.compile_or_warm_up_model[rank]
            WorkerWrapperBase.execute_model(scheduler_output)[worker]""",
    },
    "MoE": {
        f"{_MOE}.activation": "MoEActivation.SILU",
        f"{_MOE}.unquantized_fused_moe_method": "UnquantizedFusedMoEMethod",
        f"{_MOE}.runner.moe_runner": """MoERunner.register_oot(name)
            _moe_forward(hidden_states router_logits shared_experts_input input_ids layer_name)
            MoERunner._apply_quant_method(hidden_states router_logits input_ids)[router routed_experts
            moe_config _forward_entry]
            MoERunner._maybe_reduce_final_output(states trunc_size)""",
        f"{_MOE}.config": "FusedMoEConfig.moe_parallel_config",
        f"{_MOE}.routed_experts": """RoutedExperts.forward_modular(x topk_weights topk_ids)
            RoutedExperts.expert_map""",
    },
    "optional": {
        "vllm.ir.ops.layernorm": "fused_add_rms_norm(x x_residual weight epsilon variance_size)",
        f"{_PASSES}.fusion.allreduce_rms_fusion": """AllReduceFusionPass.is_applicable_for_range(
            compile_range)""",
        f"{_PASSES}.fusion.sequence_parallelism": """SequenceParallelismPass.is_applicable_for_range(
            compile_range)""",
        "vllm.model_executor.parameter": "BasevLLMParameter.__torch_function__",
    },
}
NAMES = tuple(
    Name(part, module, name, tuple(parameters.split()), tuple(sets.split()))
    for part, modules in _USED.items()
    for module, names in modules.items()
    for name, parameters, sets in re.findall(r"([\w.]+)(?:\(([^)]*)\))?(?:\[([^]]*)\])?", names)
)


def missing(part: str) -> str | None:
    """The first name of a part that the installed vLLM lacks, or has with other parameters; or None."""
    return next((lack for use in NAMES if use.part == part and (lack := _missing(use)) is not None), None)


def _missing(use: Name) -> str | None:
    try:
        found: Any = import_module(use.module)
        for name in use.name.split("."):
            fields = getattr(found, "__dataclass_fields__", {})
            found = fields[name] if name in fields else getattr(found, name)
    except Exception as error:  # whatever its import raises: vLLM goes on without flux
        return f"it has no {use.path} ({error})"
    names = inspect.signature(found).parameters if use.parameters else {}
    lost = [name for name in use.parameters if name not in names]
    return f"its {use.path} has no parameter {lost[0]}" if lost else None
