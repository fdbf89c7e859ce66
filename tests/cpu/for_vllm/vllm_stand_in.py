"""A small stand-in for vLLM: the names that the plugin's registration touches, and vLLM's operators."""

from __future__ import annotations

import enum
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import stand_ins
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import flux
from flux import _invariance, _log
from flux.integrations import async_tp
from flux.integrations import vllm as plugin
from flux.integrations.vllm import report as reports
from flux.integrations.vllm import rows  # defines operators, which can be done only once
from flux.ops import explain


class Linear(torch.nn.Module):
    """vLLM's RowParallelLinear, to the extent that registration and forward look at it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        registry = sys.modules["vllm.model_executor.custom_op"].op_registry_oot
        return super().__new__(registry.get(cls.__name__, cls))

    def __init__(self, weight: torch.Tensor, **changes: Any) -> None:
        super().__init__()
        self.weight = weight
        self.bias: torch.Tensor | None = None
        self.tp_size, self.reduce_results, self.input_is_parallel = 2, True, True
        self.skip_bias_add = self.return_bias = False
        self.params_dtype = weight.dtype
        self.output_size, self.input_size_per_partition = weight.shape
        self.quant_method = sys.modules["vllm.model_executor.layers.linear"].UnquantizedLinearMethod()
        for name, value in changes.items():
            setattr(self, name, value)

    @classmethod
    def register_oot(cls, name: str) -> Any:
        def decorator(other: type) -> type:
            registry = sys.modules["vllm.model_executor.custom_op"].op_registry_oot
            assert name not in registry, "registered twice"
            registry[name] = other
            return other

        return decorator

    def forward(self, input_: torch.Tensor) -> Any:
        return "vLLM's own"


class Fp8Method:
    """vLLM's, of layers with fp8 weights. kernel: how it quantises, and what it needs to know."""

    def __init__(self, kernel: Any) -> None:
        self.fp8_linear = kernel

    def process_weights_after_loading(self, layer: Any) -> None: ...

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = self.fp8_linear.apply_weights(layer, x, bias)
        return result


def _apply_weights(layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x if isinstance(x, torch.Tensor) else x.data.to(torch.float32)
    return torch.nn.functional.linear(rows, layer.weight.to(rows.dtype).t(), bias)


def fp8_kernel(weight: torch.Tensor) -> Any:
    """One that quantises by token, for a weight [n, k] with a scale for each column of the product."""
    per_token = mock.Mock(is_per_tensor=lambda: False, is_per_token=lambda: True)
    per_column = mock.MagicMock(is_per_tensor=lambda: False)
    per_column.__iter__ = lambda self: iter((-1, 1))
    keys = [mock.Mock(scale=mock.Mock(static=False, group_shape=s)) for s in (per_token, per_column)]
    return mock.Mock(
        spec=["config", "quant_fp8", "apply_weights"],
        apply_weights=_apply_weights,
        config=mock.Mock(
            activation_quant_key=keys[0],
            weight_quant_key=keys[1],
            weight_shape=weight.shape,
            out_dtype=torch.float32,
        ),
        quant_fp8=lambda x, scale, bound: flux.quantize(x, "row"),
    )


Modules = dict[str, types.ModuleType]
CompilationMode = enum.Enum("CompilationMode", {"NONE": 0, "VLLM_COMPILE": 3})


def configuration(
    use_ubatching: bool = False,
    linear_backend: str = "auto",
    mode: str = "VLLM_COMPILE",
    lora: Any = None,
    fused_bytes: int = 0,
    is_moe: bool = False,
) -> Any:
    """fused_bytes: up to which sums vLLM fuses them with RMSNorm; 0: none."""
    passes = mock.Mock(fuse_allreduce_rms=fused_bytes > 0, enable_sp=False)
    passes.flashinfer_max_size = lambda ranks: fused_bytes
    return mock.Mock(
        parallel_config=mock.Mock(use_ubatching=use_ubatching),
        kernel_config=mock.Mock(linear_backend=linear_backend),
        compilation_config=mock.Mock(
            mode=CompilationMode[mode], compile_ranges_endpoints=[512], pass_config=passes
        ),
        lora_config=lora,
        model_config=mock.Mock(get_num_experts=lambda: 8 if is_moe else 0),
    )


class Worker:
    """vLLM's worker of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def compile_or_warm_up_model(self) -> str:
        return "compiled"

    def execute_model(self, scheduler_output: Any) -> Any:
        return scheduler_output

    def sample_tokens(self, grammar_output: Any) -> Any:
        return grammar_output


class WorkerWrapperBase:
    """vLLM's wrapper of a worker, which forwards most calls."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.worker.execute_model(scheduler_output)


def _names(**names: Any) -> Any:
    return type("Names", (), names)


def _nothing(*arguments: Any) -> None: ...


def stand_in() -> Modules:
    contents: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": 300},
        "vllm.config": {
            "VllmConfig": _names(compute_hash=lambda self: "hash of vLLM", lora_config=None),
            "CompilationConfig": _names(compile_ranges_endpoints=None),
            "ParallelConfig": _names(use_ubatching=False),
            "CompilationMode": CompilationMode,
            "current": configuration(),
            "get_current_vllm_config_or_none": lambda: modules["vllm.config"].current,
        },
        "vllm.distributed": {
            "get_tp_group": lambda: mock.Mock(
                device_group=mock.Mock(group_name="7"), unique_name="tp:0", rank_in_group=1, world_size=2
            )
        },
        "vllm.distributed.parallel_state": {
            "GroupCoordinator": None,
            "all_reduce": lambda tensor, group_name: None,
        },
        "vllm.model_executor.custom_op": {"op_registry_oot": {}},
        "vllm.model_executor.layers.linear": {
            "RowParallelLinear": type("RowParallelLinear", (Linear,), {}),
            "UnquantizedLinearMethod": _names(),
            "ColumnParallelLinear": type("ColumnParallelLinear", (Linear,), {}),
        },
        "vllm.model_executor.layers.quantization.fp8": {
            "Fp8LinearMethod": type("Fp8LinearMethod", (Fp8Method,), {})
        },
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors": {
            "CompressedTensorsLinearMethod": type("CompressedTensorsLinearMethod", (Fp8Method,), {})
        },
        "vllm.model_executor.layers.quantization.compressed_tensors.schemes": {
            "CompressedTensorsW8A8Fp8": _names()
        },
        "vllm.model_executor.layers.quantization.input_quant_fp8": {"QuantFP8": None},
        "vllm.model_executor.kernels.linear": {
            "FP8ScaledMMLinearKernel": None,
            "Fp8BlockScaledMMLinearKernel": None,
            "FP8ScaledMMLinearLayerConfig": None,
        },
        "vllm.platforms": {"current_platform": mock.Mock(is_cpu=lambda: True)},
        "vllm.v1.outputs": {"AsyncModelRunnerOutput": _names(get_output=_nothing)},
        "vllm.v1.worker.worker_base": {
            "WorkerBase": Worker,
            "WorkerWrapperBase": type("WorkerWrapperBase", (WorkerWrapperBase,), {}),
        },
        "vllm.compilation.backends": {"VllmBackend": type("VllmBackend", (VllmBackend,), {})},
        "vllm.compilation.passes.inductor_pass": {
            "InductorPass": _names(
                hash_source=staticmethod(lambda *sources: str(sources[1:])),
                is_applicable_for_range=lambda self, compile_range: True,
            ),
            "PassContext": None,
            "get_pass_context": None,
        },
        "vllm.compilation.passes.pass_manager": {"PostGradPassManager": _names(configure=configure)},
    }
    modules = stand_ins.modules(contents)
    return modules


class VllmBackend:
    """Compiles a model."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        return graph


class AllReduceFusionPass:
    """Of vLLM: fuses all-reduce and RMSNorm up to some number of tokens."""

    max_tokens = 64

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return bool(compile_range.end <= self.max_tokens)


def configure(manager: Any, config: Any) -> None:
    manager.passes = ["another pass", AllReduceFusionPass()]


@pytest.fixture
def vllm(monkeypatch: MonkeyPatch) -> Iterator[Modules]:
    """A fresh vLLM of a known version, and a plugin that has seen none yet."""
    modules = stand_in()
    # What is put there is taken away again.
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.delenv("FLUX_TIMEOUT_S", raising=False)
    for name in (
        "FLUX_BATCH_INVARIANT",
        *(f"FLUX_VLLM{part}" for part in ("", "_MIN_TOKENS", "_TUNING", "_SEQUENCE")),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLUX_VLLM_MOE", "off")  # it has no MoE layers
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.32.1")
    monkeypatch.setattr(_log, "_said", set())
    monkeypatch.setattr(_invariance, "_mode", None)
    monkeypatch.setattr(explain, "why_unfused", lambda *problem, **scaling: None)
    monkeypatch.setattr(reports, "report", reports.Report())
    ours = ("layer", "compiled", "fp8", "moe", "worker")
    names = [f"flux.integrations.vllm.{name}" for name in ours]
    with mock.patch.dict(sys.modules, modules):
        for name in names:
            sys.modules.pop(name, None)
        yield modules
        async_tp.uninstall()
        for name, attribute in zip(names, ours, strict=True):
            sys.modules.pop(name, None)
            vars(plugin).pop(attribute, None)


def use(vllm: Modules, **changes: Any) -> Any:
    """Gives vLLM a configuration."""
    config = vllm["vllm.config"].current = configuration(**changes)  # type: ignore[attr-defined]
    return config


def registry(vllm: Modules) -> dict[str, type]:
    found: dict[str, type] = vllm["vllm.model_executor.custom_op"].op_registry_oot
    return found


def row_parallel(vllm: Modules, *args: Any, **kwargs: Any) -> Any:
    return vllm["vllm.model_executor.layers.linear"].RowParallelLinear(*args, **kwargs)


def define_all_reduce() -> Any:
    """vLLM's operator, through torch.distributed."""
    torch_library: Any = torch.library
    library = torch_library.Library("vllm", "FRAGMENT")
    library.define("all_reduce(Tensor tensor, str group_name) -> Tensor")

    def all_reduce(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
        assert group_name == "tp:0"
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    library.impl("all_reduce", all_reduce, "CPU")
    library.impl("all_reduce", lambda tensor, group_name: torch.empty_like(tensor), "Meta")
    return library


def moe_forward_of_vllm(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    layer_name: torch.Tensor,
    hidden_dim_unpadded: int,
) -> torch.Tensor:
    """The function behind vLLM's operator: its parameters. The name is a node in graphs, as vLLM's is."""
    raise NotImplementedError


def define_moe_forward(rank: int, ranks: int) -> Any:
    """vLLM's operator, with other experts: their results are integers, and differ from rank to rank.

    The layer's name is from how many tokens on flux sums over ranks. It overwrites its first argument, as
    vLLM's may.
    """
    torch_library: Any = torch.library
    library = torch_library.Library("vllm", "FRAGMENT")
    schema = torch_library.infer_schema(moe_forward_of_vllm, mutates_args=["hidden_states"])
    library.define(f"moe_forward{schema}")

    def moe_forward(x: Any, logits: Any, shared: Any, ids: Any, name: Any, unpadded: int) -> torch.Tensor:
        assert (shared, ids, unpadded) == (None, None, 0)
        chosen = logits.sum(-1, keepdim=True).remainder(3)
        summed = rows.rows_are_own() or len(x) >= int(name)
        factors = range(1, ranks + 1) if summed else [rank + 1]
        result: torch.Tensor = sum(factor * (x.remainder(5) - 2) + chosen for factor in factors)
        x.fill_(torch.nan)
        return result

    library.impl("moe_forward", moe_forward, "CPU")
    library.impl("moe_forward", lambda x, *others: torch.empty_like(x), "Meta")
    rows.define_experts(moe_forward_of_vllm)
    return library


def exact_norm(total: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In place of RMSNorm: rows of integers become other integers."""
    return (total.remainder(7) - 3 + total.sum(-1, keepdim=True).remainder(3)) * weight


def define_norm(norm: Callable[..., torch.Tensor] = exact_norm) -> Any:
    """vLLM's operators for norms, with other norms."""
    torch_library: Any = torch.library
    library = torch_library.Library("vllm_ir", "FRAGMENT")
    library.define(
        "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon,"
        " int? variance_size=None) -> (Tensor, Tensor)"
    )
    library.define("rms_norm(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor")

    def add_norm(x: Any, residual: Any, weight: Any, eps: float, size: Any = None) -> Any:
        return norm(x + residual, weight, eps), x + residual

    every = "CompositeExplicitAutograd"
    library.impl("fused_add_rms_norm", add_norm, every)
    library.impl("rms_norm", lambda x, weight, eps, size=None: norm(x, weight, eps), every)
    return library


@pytest.fixture(scope="module")  # graphs that several tests share hold them
def vllms_operators() -> Iterator[None]:
    """vLLM's operators in this process."""
    libraries = [define_all_reduce(), define_norm(), define_moe_forward(0, 2)]
    yield
    del libraries


def trace(run: Any, x: torch.Tensor, w: dict[str, torch.Tensor]) -> fx.GraphModule:
    """The graph of a model, as dynamo gives it to vLLM: of x, with any number of rows, and its weights."""
    found: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        found.append(graph)
        return lambda *inputs: [x] * len(graph.graph.output_node().args[0])

    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(run, backend=backend, fullgraph=True)(x, w)
    return found[0]


def inputs(graph: fx.Graph, x: torch.Tensor, w: dict[str, torch.Tensor]) -> list[Any]:
    """For a traced graph, whose placeholders are called after what they hold."""
    values = {"L_x_": x, **{f"L_w_{name}_": weight for name, weight in w.items()}}
    return [values.get(str(node.target), len(x)) for node in graph.find_nodes(op="placeholder")]


def lowered(module: fx.GraphModule, values: list[Any]) -> fx.Graph:
    """The graph in aten's operators, in which vLLM's passes see it."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = [value for value in values if not isinstance(value, torch.Tensor)]
    made: fx.GraphModule = make_fx(lambda *tensors: module(*sizes, *tensors), tracing_mode="fake")(*tensors)
    return made.graph
