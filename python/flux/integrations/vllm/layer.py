"""The replacement of vLLM's RowParallelLinear."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs
from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.distributed import get_tp_group
from vllm.model_executor import custom_op
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.platforms import current_platform

from flux import _invariance
from flux.integrations.vllm import compiled, eager, uses
from flux.integrations.vllm.graph import SumRule
from flux.integrations.vllm.op import linear_all_reduce
from flux.integrations.vllm.report import report, setting
from flux.integrations.vllm.thresholds import ALIGNMENT, from_tokens, sums
from flux.ops.plan import current_device, why_unfused

_NAME = "RowParallelLinear"
_KIND = "row-parallel linear"
# The dtypes that both the kernels and the CPU path support.
_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (*_DTYPES, torch.float32)


@dataclass
class Settings:
    """Settings of this process, from the environment."""

    mode: str = "auto"


settings = Settings()


class FluxRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """RowParallelLinear whose GEMM and all-reduce are one operator, which decides call by call between
    flux.gemm_ar and vLLM's own. Layers that flux does not serve behave as vLLM's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _serve_sums(self)
        why_not = _why_not(self)
        self._flux_serves = why_not is None
        if why_not is not None:
            report.refused[_KIND, why_not] += 1
            return
        shape = self.output_size, self.input_size_per_partition
        config = get_current_vllm_config_or_none()
        problem = (*shape, self.params_dtype, self.tp_size, current_device())
        self._flux_from, why = from_tokens(*problem, eager=_is_eager(config))
        report.served[f"{_KIND} {list(shape)}", self._flux_from, why] += 1
        group = get_tp_group()
        self._flux_groups = (str(group.device_group.group_name), str(group.unique_name))
        sequence = compiled.sequence_begins(*shape, self.params_dtype, self._flux_groups[0], self.tp_size)
        self._flux_rows_from = sequence if _sequence_without_compiler(config) else None
        if self._flux_rows_from is not None:
            eager.install()
            report.sequence = f"Sequence parallel from {self._flux_rows_from} tokens on"
        if current_platform.is_cpu():
            # With this flag, newer versions of vLLM do not repack the weight.
            self._cpu_skip_gemm_dispatch = True
        if settings.mode != "layer":
            compiled.install()
            compiled.split_range(config, self._flux_from)
            # Here, and not only where the model is found to be sequence parallel: graphs that come from
            # vLLM's cache were compiled for the same ranges.
            if sequence is not None:
                compiled.split_range(config, sequence)

    def forward(self, input_: torch.Tensor) -> Any:
        eager_stays = settings.mode == "pass" and not torch.compiler.is_compiling()
        # A backend may have repacked the weight and dropped the original.
        if not self._flux_serves or eager_stays or self.weight.numel() == 0:
            return super().forward(input_)
        bias = None if self.skip_bias_add else self.bias
        rows_from = self._flux_rows_from
        if rows_from is not None and input_.dim() == 2 and len(input_) >= rows_from:
            output: torch.Tensor = eager.linear_own(input_, self.weight, bias, self._flux_groups[0])
        else:
            output = linear_all_reduce(input_, self.weight, bias, self._flux_from, *self._flux_groups)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


def replace_row_parallel(mode: str) -> str | None:
    """Registers the layer with vLLM. Returns why not, or None; doing it again is fine."""
    settings.mode = mode
    present = custom_op.op_registry_oot.get(_NAME)
    if present is FluxRowParallelLinear:
        return None
    if present is not None:
        return f"another plugin has replaced {_NAME} by {present.__name__}"
    if envs.VLLM_BATCH_INVARIANT:
        os.environ.setdefault("FLUX_BATCH_INVARIANT", "on")
    compiled.distinguish_cached_graphs(mode)
    RowParallelLinear.register_oot(name=_NAME)(FluxRowParallelLinear)
    return None


def _why_not(layer: RowParallelLinear) -> str | None:
    """Why a layer uses vLLM's code, or None. Depends only on facts that are equal on all ranks."""
    return first_that_applies(_reasons(layer))


def first_that_applies(reasons: Iterator[tuple[str, bool]]) -> str | None:
    """The first reason that applies, or None. In a version of vLLM that flux has not seen, an attribute may
    be missing: that is a reason, too.
    """
    try:
        return next((reason for reason, applies in reasons if applies), None)
    except AttributeError as error:
        return f"this version of vLLM differs: {error}"


def _reasons(layer: RowParallelLinear) -> Iterator[tuple[str, bool]]:
    """What could be in the way, and whether it is. In an order in which each question makes sense where those
    before have been answered with no.
    """
    config = get_current_vllm_config_or_none()
    n, k = layer.output_size, layer.input_size_per_partition
    yield "they are not sharded over ranks", layer.tp_size == 1
    yield "results are not reduced", not layer.reduce_results
    yield "the input has to be split", not layer.input_is_parallel
    yield "weights are quantised", type(layer.quant_method) is not UnquantizedLinearMethod
    yield from common_reasons(config, layer.params_dtype).items()
    yield "LoRA is on", config is not None and config.lora_config is not None
    yield "sizes are not multiples of 8", bool(n % ALIGNMENT or k % ALIGNMENT)
    yield "vLLM is told which GEMM to use", _chosen_gemm(config)
    unfused = unfused_reason(n, k, layer.params_dtype)
    yield f"flux would run unfused: {unfused}", unfused is not None


def _serve_sums(layer: RowParallelLinear) -> None:
    """Lets compiled graphs use flux for the sums of the layer's group, also where the layer itself is vLLM's:
    it is quantised, has adapters, or its results are summed with those of experts.
    """
    config = get_current_vllm_config_or_none()
    if first_that_applies(_reasons_against_sums(layer, config)) is not None:
        return
    first, nbytes = sums(layer.tp_size, current_device())
    if nbytes == 0:
        return
    group = get_tp_group()
    rule = SumRule(str(group.device_group.group_name), first, nbytes)
    compiled.install()
    compiled.serve_sums(str(group.unique_name), rule)
    compiled.split_range(config, first)
    compiled.split_range(config, nbytes // (layer.output_size * layer.params_dtype.itemsize) + 1)


def _reasons_against_sums(layer: RowParallelLinear, config: Any) -> Iterator[tuple[str, bool]]:
    yield "they are not sharded over ranks", layer.tp_size == 1
    yield "there is no pass", settings.mode == "layer" or _is_eager(config)
    yield from common_reasons(config, layer.params_dtype).items()
    yield "sizes are not multiples of 8", bool(layer.output_size % ALIGNMENT)
    unfused = unfused_reason(layer.output_size, 0, layer.params_dtype, "all_reduce_norm")
    yield f"flux would run unfused: {unfused}", unfused is not None


def unfused_reason(n: int, k: int, dtype: torch.dtype, op: str = "gemm_ar") -> str | None:
    """Why a sum over ranks of rows times a weight [n, k] would not run fused, as far as known before the
    group's first call, or None.
    """
    group_name = str(get_tp_group().device_group.group_name)
    return why_unfused(op, 1, n, k, dtype, current_device(), group_name)


def common_reasons(config: Any, dtype: torch.dtype) -> dict[str, bool]:
    """Reasons for vLLM's code that apply to any kind of layer, and whether each holds."""
    dtypes = _CPU_DTYPES if current_platform.is_cpu() else _DTYPES
    return {
        f"the dtype is {dtype}": dtype not in dtypes,
        "VLLM_BATCH_INVARIANT is set, and FLUX_BATCH_INVARIANT is off": (
            bool(envs.VLLM_BATCH_INVARIANT) and not _invariance.active()
        ),
        "micro-batches overlap": config is not None and bool(config.parallel_config.use_ubatching),
        "FLUX_VLLM is pass, and the model is eager": settings.mode == "pass" and _is_eager(config),
    }


def _is_eager(config: Any) -> bool:
    return config is not None and config.compilation_config.mode == CompilationMode.NONE


def _sequence_without_compiler(config: Any) -> bool:
    """Whether an eager model is sequence parallel: if the user says from where on, because it has not been
    measured, and if no stage of a pipeline sends tensors that have own rows only.
    """
    wanted = bool(setting("FLUX_VLLM_SEQUENCE")) and _is_eager(config)
    return wanted and config.parallel_config.pipeline_parallel_size == 1 and uses.missing("eager") is None


def _chosen_gemm(config: Any) -> bool:
    """Whether the user has chosen a GEMM for linear layers; older versions of vLLM have no such setting."""
    kernels = getattr(config, "kernel_config", None)
    return getattr(kernels, "linear_backend", "auto") != "auto"
