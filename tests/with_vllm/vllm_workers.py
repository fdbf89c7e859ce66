"""What vllm_engines.py brings into vLLM's processes: a record of flux's calls, and the compiler of GPUs."""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

KINDS = (
    "plain",
    "with norm",
    "quantised",
    "sums with norm",
    "experts",
    "to own rows",
    "from own rows",
    "products",
)
_calls: Counter[str] = Counter()
_counted_already: list[bool] = []


class FluxCalls:
    """Becomes a base class of vLLM's workers (worker_extension_cls). Counts calls of flux.gemm_ar, and of
    flux.moe.gemm_gather_rs, with which experts end.
    """

    def forget_flux_calls(self) -> None:
        """From here on is counted, by functions around those that the plugin calls."""
        import flux
        from flux.calls import front
        from flux.ops import add_norm as pair
        from flux.ops import gemm

        _calls.clear()
        if _counted_already:
            return
        _counted_already.append(True)
        # What compiled graphs call, below the operator.
        run = front._among_ranks

        def counted_sum(op: front.Collective, call: Any, *args: Any) -> Any:
            if op.name == "all_reduce":
                _calls["sums with norm"] += call.end.norm_weight is not None
                _calls["quantised"] += bool(call.end.quant)
            return run(op, call, *args)

        front._among_ranks = counted_sum
        gemm_ar = flux.gemm_ar

        @functools.wraps(gemm_ar)
        def counted(*args: Any, **kwargs: Any) -> Any:
            _calls["plain" if kwargs.get("norm_weight") is None else "with norm"] += 1
            _calls["quantised"] += kwargs.get("quant") is not None
            return gemm_ar(*args, **kwargs)

        flux.gemm_ar = counted
        serving = gemm.serving

        @functools.wraps(serving)
        def counted_product(*args: Any, **kwargs: Any) -> Any:
            _calls["products"] += "swiglu" in kwargs  # and not once more inside
            return serving(*args, **kwargs)

        gemm.serving = counted_product
        flux.moe.gemm_gather_rs = _counted(flux.moe.gemm_gather_rs, "experts")
        flux.gemm_rs = _counted(flux.gemm_rs, "to own rows")
        flux.ag_gemm = _counted(flux.ag_gemm, "from own rows")
        for kind in ("to own rows", "from own rows"):
            pair.scatter_norm_gather = _counted(pair.scatter_norm_gather, kind)

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


def let_flux_choose_experts() -> None:
    """vLLM's kernel for CPUs in 0.26 chooses the experts itself, other than that for GPUs, and flux leaves it
    alone. After this it does not, and graphs are as on GPUs. What chooses them has no operator for CPUs.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as methods

    def choose(weights: Any, ids: Any, positions: Any, logits: Any, renormalize: bool, *bias: Any) -> None:
        found, chosen = logits.softmax(-1).topk(weights.shape[-1])
        weights.copy_(found / found.sum(-1, keepdim=True) if renormalize else found)
        ids.copy_(chosen)

    methods.UnquantizedFusedMoEMethod.is_monolithic = property(lambda self: False)
    _custom_ops.topk_softmax = choose


def keep_quantised_weights() -> None:
    """Makes vLLM on CPUs compute quantised models as on GPUs: with weights as they are loaded, and results in
    float32, in which vLLM allows no fp8 models. Kernels that use AMX repack weights and give no float32. For
    fp8 it lacks those for blocks and experts, and the operator that quantises weights again which get one
    scale.
    """
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8 as methods
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.platforms import PlatformEnum

    class Blocks(linear.Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:  # noqa: N803
            return product(A, As, B, Bs)

    def product(q: Any, scale: Any, weight: Any, scale_w: Any) -> torch.Tensor:
        rows = q.to(torch.float32) * scale.repeat_interleave(128, 1)
        return (
            rows
            @ (weight.to(torch.float32) * scale_w.repeat_interleave(128, 0).repeat_interleave(128, 1)).t()
        )

    class Experts:
        consumes_expert_mask = False

        @staticmethod
        def is_monolithic() -> bool:
            return False

    class ExpertKernel:
        is_monolithic = can_overlap_shared_experts = False
        fused_experts = Experts
        prepare_finalize = SimpleNamespace(topk_indices_dtype=lambda: None)

        def __init__(self, config: Any) -> None:
            self.scales = config.w1_scale, config.w2_scale

        def output_is_reduced(self) -> bool:
            return False

        supports_deferred_moe_finalize = output_is_reduced

        def apply(self, x: Any, w13: Any, w2: Any, weights: Any, ids: Any, **others: Any) -> torch.Tensor:
            total = torch.zeros_like(x)
            for expert in range(len(w13)):
                of_w13, of_w2 = (scales[expert] for scales in self.scales)
                gate, up = product(*quantised(x), w13[expert], of_w13).chunk(2, -1)
                result = product(*quantised(torch.nn.functional.silu(gate) * up), w2[expert], of_w2)
                total += result * (weights * (ids == expert)).sum(-1, keepdim=True)
            return total

    def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = x.unflatten(-1, (-1, 128))
        scale = (groups.abs().amax(-1) / 448).clamp(min=1 / (448 * 512))
        return (groups / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), scale

    methods.select_fp8_moe_backend = lambda **config: (Fp8MoeBackend.TRITON, Experts)
    methods.convert_to_fp8_moe_kernel_format = (
        lambda fp8_backend, layer, w13, w2, w13_scale, w2_scale, **more: (w13, w2, w13_scale, w2_scale)
    )
    methods.make_fp8_moe_kernel = lambda moe_quant_config, **config: ExpertKernel(moe_quant_config)
    torch.cpu._is_amx_tile_supported = lambda: False
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Blocks]
    Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])
    _custom_ops.scaled_fp8_quant = lambda x, scale: ((x / scale).to(torch.float8_e4m3fn), scale)


def save_graphs() -> None:
    """Writes the graphs that flux rewrites into the folder $SAVED_GRAPHS: the whole model's as dynamo traces
    it, and in each range, each piece's as the pass gets it, by the range's end (saved_graphs.py).
    """
    import saved_graphs
    from vllm.distributed import get_pp_group, get_tp_group

    from flux.integrations.vllm import compiled

    folder, shard, unshard = Path(os.environ["SAVED_GRAPHS"]), compiled.shard, compiled.unshard
    counts: Counter[str] = Counter()

    def save(graph: torch.fx.Graph, name: str) -> None:
        counts[name] += 1
        if get_tp_group().rank_in_group == 0 and get_pp_group().is_first_rank:
            saved_graphs.save(graph, folder / f"{name}-{counts[name]}.json")

    def save_and_shard(graph: torch.fx.Graph, *arguments: Any) -> Any:
        save(graph, "model")
        return shard(graph, *arguments)

    def save_and_unshard(graph: torch.fx.Graph, end: int | None) -> None:
        save(graph, f"piece-{end}")
        unshard(graph, end)

    compiled.shard, compiled.unshard = save_and_shard, save_and_unshard


def call_linear() -> None:
    """Makes linear layers call what they call on GPUs, instead of an operator for CPUs."""
    from vllm.model_executor.layers import utils

    def keep_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep_linear


def compile_as_on_gpus() -> None:
    """Makes vLLM on CPUs compile models as it does on GPUs; by itself it gives inductor one graph there.

    It supports that on no CPU, so five things are in the way: it wants collectives outside of graphs, one of
    its passes looks up operators that only GPUs have, its all-reduce overwrites its input, which a graph may
    still need, linear layers call oneDNN, and experts are traced.
    """
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
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
    MoERunner._select_forward = lambda self: (
        torch.ops.vllm.moe_forward_shared if self._shared_experts else torch.ops.vllm.moe_forward
    )

    call_linear()
