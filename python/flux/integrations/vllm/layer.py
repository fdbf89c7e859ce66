"""The replacement of vLLM's RowParallelLinear."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm import envs
from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.distributed import get_tp_group
from vllm.model_executor import custom_op
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.platforms import current_platform

from flux import _invariance
from flux.fp8.scales import Scaling
from flux.integrations.vllm import compiled, required_names
from flux.integrations.vllm.graph import SumRule
from flux.integrations.vllm.op import linear_all_reduce
from flux.integrations.vllm.ranges import ALIGNMENT, Ranges, ranges_on
from flux.integrations.vllm.report import report
from flux.ops.explain import current_device, why_unfused

_NAME = "RowParallelLinear"
_KIND = "row-parallel linear"
# vLLM's classes for layers that may have fp8 weights (fp8.py).
_FP8_METHODS = ("Fp8LinearMethod", "CompressedTensorsLinearMethod")
# The dtypes that both the kernels and the CPU path support.
_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (*_DTYPES, torch.float32)

# Of the model in this process.
rules = compiled.Rules()


class FluxRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """RowParallelLinear as one operator, which decides call by call between flux.gemm_ar and vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flux_fp8: Any = None
        _serve_sums(self)
        why_not = first_that_applies(_reasons(self))
        self._flux_serves = why_not is None
        if why_not is not None:
            report.refused[_KIND, why_not] += 1
            return
        shape = self.output_size, self.input_size_per_partition
        config = get_current_vllm_config_or_none()
        ranges = _ranges(self, config)
        self._flux_from = ranges.begin
        self._flux_told = f"{_kind(self)} {list(shape)}", ranges.begin, ranges.why
        report.served[self._flux_told] += 1
        group = get_tp_group()
        self._flux_groups = (str(group.device_group.group_name), str(group.unique_name))
        if current_platform.is_cpu():
            # With this flag, newer versions of vLLM do not repack the weight.
            self._cpu_skip_gemm_dispatch = True
        if rules.mode != "layer":
            rules.install()
            rules.kinds.add(ranges)
            # Here, and not only where the model is found to be sequence parallel: graphs that come from
            # vLLM's cache were compiled for the same ranges.
            for tokens in ranges.starts():
                compiled.split_range(config, tokens)

    def forward(self, input_: Any) -> Any:
        eager_stays = rules.mode == "pass" and not torch.compiler.is_compiling()
        # A backend may have repacked the weight and dropped the original.
        if not self._flux_serves or eager_stays or self.weight.numel() == 0:
            return super().forward(input_)
        bias = None if self.skip_bias_add else self.bias
        output: torch.Tensor | None
        if self._flux_fp8 is None:
            output = linear_all_reduce(input_, self.weight, bias, self._flux_from, *self._flux_groups)
        elif (output := self._fp8_forward(input_, bias)) is None:
            return super().forward(input_)
        return (output, self.bias if self.skip_bias_add else None) if self.return_bias else output

    def _fp8_forward(self, x: Any, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The sum over ranks of a layer with fp8 weights; None: vLLM computes it."""
        fp8, compiling = self._flux_fp8, torch.compiler.is_compiling()
        data = x if isinstance(x, torch.Tensor) else x.data
        if data.dim() != 2 or not (compiling or len(data) >= self._flux_from):
            return None
        q, scale = fp8.quantised(self, x)
        weight, scale_w = fp8.operands(self)
        # vLLM adds the bias on one rank.
        product = self.quant_method.apply(self, x, None if self.tp_rank else bias) if compiling else None
        how = (scale, scale_w, fp8.out_dtype, product)
        return linear_all_reduce(q, weight, bias, self._flux_from, *self._flux_groups, *how)

    def flux_take_fp8(self) -> None:
        """Looks at the weights of an fp8 layer, which are loaded now."""
        if not self._flux_serves:
            return
        from flux.integrations.vllm import fp8

        found = fp8.loaded(self, self._flux_fp8)
        if isinstance(found, str):
            self._flux_serves = False
            report.served[self._flux_told] -= 1
            report.refused[_kind(self), found] += 1
        else:
            self._flux_fp8 = found


def replace_row_parallel(mode: str) -> str | None:
    """Registers the layer with vLLM. Returns why not, or None; doing it again is fine."""
    rules.mode = mode
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


def first_that_applies(reasons: Iterator[tuple[str, bool]]) -> str | None:
    """The first reason that applies, or None. Another vLLM may lack an attribute: a reason, too."""
    try:
        return next((reason for reason, applies in reasons if applies), None)
    except AttributeError as error:
        return f"this version of vLLM differs: {error}"


def _reasons(layer: RowParallelLinear) -> Iterator[tuple[str, bool]]:
    """What could be in the way, and whether it is: facts that are equal on all ranks, in an order in which
    each question makes sense where those before have been answered with no.
    """
    config = get_current_vllm_config_or_none()
    n, k = layer.output_size, layer.input_size_per_partition
    yield "they are not sharded over ranks", layer.tp_size == 1
    yield "results are not reduced", not layer.reduce_results
    yield "the input has to be split", not layer.input_is_parallel
    yield from _reasons_of_weights(layer)
    yield from common_reasons(config, layer.params_dtype).items()
    yield "LoRA is on", config is not None and config.lora_config is not None
    yield "sizes are not multiples of 8", bool(n % ALIGNMENT or k % ALIGNMENT)
    kernels = getattr(config, "kernel_config", None)  # older versions have no such setting
    yield "vLLM is told which GEMM to use", getattr(kernels, "linear_backend", "auto") != "auto"
    scaling = layer._flux_fp8.scaling if layer._flux_fp8 else None
    unfused = unfused_reason(n, k, torch.float8_e4m3fn if scaling else layer.params_dtype, scaling=scaling)
    yield f"flux would run unfused: {unfused}", unfused is not None
    if scaling:
        ranges = _ranges(layer, config)
        yield ranges.why, not ranges.any


def _reasons_of_weights(layer: Any) -> Iterator[tuple[str, bool]]:
    """Whether flux takes the weights; sets what it needs to know of those that are fp8."""
    if type(layer.quant_method) is UnquantizedLinearMethod:
        return
    name = type(layer.quant_method).__name__
    yield f"weights are quantised ({name})", name not in _FP8_METHODS
    lack = required_names.missing("fp8")
    yield f"weights are fp8, and vLLM does not fit: {lack}", lack is not None
    from flux.integrations.vllm import fp8

    found = fp8.of_layer(layer)
    yield str(found), isinstance(found, str)
    layer._flux_fp8 = found
    fp8.install(_may_mark)
    # Without the pass, vLLM's products would be computed, too.
    yield "FLUX_VLLM is layer, and weights are fp8", rules.mode == "layer"
    yield "flux's fp8 layers are not batch invariant", bool(envs.VLLM_BATCH_INVARIANT)


def _may_mark(layer: Any, found: Any) -> bool:
    """Whether sequence-parallel models may gather the rows of a column-parallel layer with fp8 weights."""
    config = get_current_vllm_config_or_none()
    by_row = found.quant != "tensor" or found.is_static  # else a scale depends on all ranks' rows
    if not rules.installed or config is None or layer.tp_size == 1 or not by_row:
        return False
    n, k = found.shape
    if config.compilation_config.mode != CompilationMode.VLLM_COMPILE or n % ALIGNMENT:
        return False
    return unfused_reason(n, k, torch.float8_e4m3fn, "ag_gemm", found.scaling) is None


def _ranges(layer: Any, config: Any) -> Ranges:
    scaling = layer._flux_fp8.scaling if layer._flux_fp8 else None
    dtype = torch.float8_e4m3fn if scaling else layer.params_dtype
    weight = (layer.output_size, layer.input_size_per_partition, dtype)
    where = (str(get_tp_group().device_group.group_name), scaling, layer.tp_size)
    return ranges_on(current_device(), compiled.layer_of(config, *weight, *where))


def _kind(layer: Any) -> str:
    return _KIND if layer._flux_fp8 is None else f"{_KIND} fp8"


def _serve_sums(layer: RowParallelLinear) -> None:
    """Lets graphs use flux for sums of the layer's group, also of layers or experts that are vLLM's."""
    config = get_current_vllm_config_or_none()
    if first_that_applies(_reasons_against_sums(layer, config)) is not None:
        return
    ranges, group = _ranges(layer, config), get_tp_group()
    if ranges.sum_bytes == 0:
        return
    rule = SumRule(str(group.device_group.group_name), ranges.sums.start, ranges.sum_bytes)
    rules.install()
    rules.sums[str(group.unique_name)] = rule
    for tokens in ranges.starts_of_sums():
        compiled.split_range(config, tokens)


def _reasons_against_sums(layer: RowParallelLinear, config: Any) -> Iterator[tuple[str, bool]]:
    yield "they are not sharded over ranks", layer.tp_size == 1
    yield "there is no pass", rules.mode == "layer" or compiled.is_eager(config)
    yield from common_reasons(config, layer.params_dtype).items()
    yield "sizes are not multiples of 8", bool(layer.output_size % ALIGNMENT)
    unfused = unfused_reason(layer.output_size, 0, layer.params_dtype, "all_reduce_norm")
    yield f"flux would run unfused: {unfused}", unfused is not None


def unfused_reason(
    n: int, k: int, dtype: torch.dtype, op: str = "gemm_ar", scaling: Scaling | None = None
) -> str | None:
    """Why sums of rows times a weight [n, k] would run unfused, as far as known early, or None."""
    group = get_tp_group()
    problem = (group.world_size, n, k, dtype, current_device(), str(group.device_group.group_name))
    return why_unfused(op, *problem, scaling=scaling)


def common_reasons(config: Any, dtype: torch.dtype) -> dict[str, bool]:
    """Reasons for vLLM's code that apply to any kind of layer, and whether each holds."""
    dtypes = _CPU_DTYPES if current_platform.is_cpu() else _DTYPES
    return {
        f"the dtype is {dtype}": dtype not in dtypes,
        "VLLM_BATCH_INVARIANT is set, and FLUX_BATCH_INVARIANT is off": (
            bool(envs.VLLM_BATCH_INVARIANT) and not _invariance.active()
        ),
        "micro-batches overlap": config is not None and bool(config.parallel_config.use_ubatching),
        "FLUX_VLLM is pass, and the model is eager": rules.mode == "pass" and compiled.is_eager(config),
    }
