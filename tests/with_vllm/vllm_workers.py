"""What vllm_engines.py brings into vLLM's processes: a record of flux's calls, and the compiler of GPUs."""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

KINDS = ("plain", "with norm", "sums with norm", "experts", "to own rows", "from own rows")
_calls: Counter[str] = Counter()
_counted_already: list[bool] = []


class FluxCalls:
    """Becomes a base class of vLLM's workers (worker_extension_cls). Counts calls of flux.gemm_ar, and of
    flux.moe.gemm_gather_rs, with which experts end.
    """

    def forget_flux_calls(self) -> None:
        """From here on is counted, by functions around those that the plugin calls."""
        import flux
        from flux.ops import all_reduce

        _calls.clear()
        if _counted_already:
            return
        _counted_already.append(True)
        # What compiled graphs call, below the operator.
        run = all_reduce._run

        def counted_sum(*args: Any) -> Any:
            _calls["sums with norm"] += args[2] is not None
            return run(*args)

        all_reduce._run = counted_sum
        gemm_ar = flux.gemm_ar

        @functools.wraps(gemm_ar)
        def counted(*args: Any, **kwargs: Any) -> Any:
            _calls["plain" if kwargs.get("norm_weight") is None else "with norm"] += 1
            return gemm_ar(*args, **kwargs)

        flux.gemm_ar = counted
        flux.moe.gemm_gather_rs = _counted(flux.moe.gemm_gather_rs, "experts")
        flux.gemm_rs = _counted(flux.gemm_rs, "to own rows")
        flux.ag_gemm = _counted(flux.ag_gemm, "from own rows")

    def flux_calls(self) -> dict[str, Any]:
        """How many calls there were, and through what flux's tiles went in the TP group."""
        from vllm.distributed import get_tp_group

        from flux.comm import registry

        workspaces = registry.existing(get_tp_group().device_group)
        fused = [workspace.transport for workspace in workspaces if workspace.why_not is None]
        return {**{name: _calls[name] for name in KINDS}, "fused through": fused}


def _counted(function: Any, kind: str) -> Any:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[kind] += 1
        return function(*args, **kwargs)

    return counted


def leave_layers_to_vllm() -> None:
    """Makes flux serve no layer, as if all were quantised: their sums remain."""
    from flux.integrations.vllm import layer

    layer._reasons = lambda layer: iter([("a test says so", True)])


def leave_out_vllms_invariant_kernels() -> None:
    """With VLLM_BATCH_INVARIANT, vLLM replaces operators of torch by Triton kernels, which need a GPU."""
    from vllm.model_executor.determinism import batch_invariant

    batch_invariant.enable_batch_invariant_mode = lambda: None


def save_graphs() -> None:
    """Writes the graphs that flux rewrites into the folder $SAVED_GRAPHS: the whole model's as dynamo traces
    it, and in each range, each piece's as the pass gets it (saved_graphs.py).
    """
    import saved_graphs
    from vllm.distributed import get_tp_group

    from flux.integrations.vllm import compiled

    folder, shard, settle = Path(os.environ["SAVED_GRAPHS"]), compiled.shard, compiled.settle_sums
    counts: Counter[str] = Counter()

    def save(graph: torch.fx.Graph, name: str) -> None:
        counts[name] += 1
        if get_tp_group().rank_in_group == 0:
            saved_graphs.save(graph, folder / f"{name}-{counts[name]}.json")

    def save_and_shard(graph: torch.fx.Graph, *arguments: Any) -> Any:
        save(graph, "model")
        return shard(graph, *arguments)

    def save_and_settle(graph: torch.fx.Graph, start: int, end: int) -> Any:
        save(graph, f"piece-{start}-{end}")
        return settle(graph, start, end)

    compiled.shard, compiled.settle_sums = save_and_shard, save_and_settle


def compile_as_on_gpus() -> None:
    """Makes vLLM on CPUs compile models as it does on GPUs; by itself it gives inductor one graph there.

    It supports that on no CPU, so four things are in the way: it wants collectives outside of graphs, one of
    its passes looks up operators that only GPUs have, its all-reduce overwrites its input, which a graph may
    still need, and linear layers call oneDNN.
    """
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers import utils
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

    def keep_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep_linear
