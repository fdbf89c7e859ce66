"""What vllm_generate.py brings into vLLM's processes: a record of flux's calls, and the compiler of GPUs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch

_calls: Counter[str] = Counter()


class FluxCalls:
    """Becomes a base class of vLLM's workers (worker_extension_cls). Counts calls of flux.gemm_ar, and of
    flux.moe.gemm_gather_rs, with which experts end.
    """

    def forget_flux_calls(self) -> None:
        """From here on is counted, by functions around those that the plugin calls."""
        import flux
        from flux.ops import all_reduce

        _calls.clear()
        # What compiled graphs call, below the operator.
        run = all_reduce._run

        def counted_sum(*args: Any) -> Any:
            _calls["sums with norm"] += args[2] is not None
            return run(*args)

        all_reduce._run = counted_sum
        gemm_ar, gemm_gather_rs = flux.gemm_ar, flux.moe.gemm_gather_rs

        @functools.wraps(gemm_ar)
        def counted(*args: Any, **kwargs: Any) -> Any:
            _calls["plain" if kwargs.get("norm_weight") is None else "with norm"] += 1
            return gemm_ar(*args, **kwargs)

        @functools.wraps(gemm_gather_rs)
        def counted_experts(*args: Any, **kwargs: Any) -> Any:
            _calls["experts"] += 1
            return gemm_gather_rs(*args, **kwargs)

        flux.gemm_ar, flux.moe.gemm_gather_rs = counted, counted_experts

    def flux_calls(self) -> dict[str, Any]:
        """How many calls there were, and through what flux's tiles went in the TP group."""
        from vllm.distributed import get_tp_group

        from flux.comm import registry

        workspaces = registry.existing(get_tp_group().device_group)
        fused = [workspace.transport for workspace in workspaces if workspace.why_not is None]
        counts = {name: _calls[name] for name in ("plain", "with norm", "sums with norm", "experts")}
        return {**counts, "fused through": fused}


def leave_layers_to_vllm() -> None:
    """Makes flux serve no layer, as if all were quantised: their sums remain."""
    from flux.integrations.vllm import layer

    layer._reasons = lambda layer: iter([("a test says so", True)])


def compile_as_on_gpus() -> None:
    """Makes vLLM on CPUs compile models as it does on GPUs; by itself it gives inductor one graph there.

    It supports that on no CPU, so three things are in the way: it wants collectives outside of graphs, one of
    its passes looks up operators that only GPUs have, and its all-reduce overwrites its input, which a graph
    may still need.
    """
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__
    all_reduce = CpuCommunicator.all_reduce

    def update_and_keep_ranges(cls: type, config: Any) -> None:
        update(cls, config)
        compilation = config.compilation_config
        if compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE:
            compilation.mode = CompilationMode.VLLM_COMPILE
            compilation.compile_sizes = []
            compilation.ir_enable_torch_wrap = True

    def all_reduce_of_copy(self: Any, input_: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = all_reduce(self, input_.clone())
        return result

    CpuPlatform.check_and_update_config = classmethod(update_and_keep_ranges)
    CpuPlatform.use_custom_op_collectives = classmethod(lambda cls: True)
    FixFunctionalizationPass.__call__ = lambda self, graph: None
    CpuCommunicator.all_reduce = all_reduce_of_copy
