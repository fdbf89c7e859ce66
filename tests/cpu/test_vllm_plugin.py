"""The vLLM plugin as far as it goes without vLLM: when it registers, and the operator and graph pass that it
puts into vLLM's graphs. A small stand-in has the names of vLLM that registration touches.
"""

from __future__ import annotations

import operator as operator_module
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import flux
from flux import _log
from flux.integrations import async_tp
from flux.integrations import vllm as plugin
from flux.integrations.vllm import graph as graphs
from flux.integrations.vllm import op
from flux.testing import spawn


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


def configuration(use_ubatching: bool = False, linear_backend: str = "auto") -> Any:
    return mock.Mock(
        parallel_config=mock.Mock(use_ubatching=use_ubatching),
        kernel_config=mock.Mock(linear_backend=linear_backend),
    )


def stand_in() -> dict[str, types.ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.config": {
            "VllmConfig": type(
                "VllmConfig",
                (),
                {"compute_hash": lambda self: "hash of vLLM", "_set_compile_ranges": lambda self: None},
            ),
            "get_current_vllm_config_or_none": configuration,
        },
        "vllm.distributed": {
            "get_tp_group": lambda: mock.Mock(
                device_group=mock.Mock(group_name="7"), unique_name="tp:0", rank_in_group=1, world_size=2
            )
        },
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"op_registry_oot": {}},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {
            "RowParallelLinear": type("RowParallelLinear", (Linear,), {}),
            "UnquantizedLinearMethod": type("UnquantizedLinearMethod", (), {}),
        },
        "vllm.platforms": {"current_platform": mock.Mock(is_cpu=lambda: True)},
        "vllm.compilation": {},
        "vllm.compilation.passes": {},
        "vllm.compilation.passes.inductor_pass": {
            "InductorPass": type("InductorPass", (), {"hash_source": staticmethod(lambda *s: str(s[1:]))}),
            "get_pass_context": None,
        },
        "vllm.compilation.passes.pass_manager": {
            "PostGradPassManager": type("PostGradPassManager", (), {"configure": configure})
        },
    }
    modules = {name: types.ModuleType(name) for name in contents}
    for name, attributes in contents.items():
        vars(modules[name]).update(attributes)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, modules[name])
    return modules


class AllReduceFusionPass:
    """Of vLLM: fuses all-reduce and RMSNorm up to some number of tokens."""

    max_tokens = 64

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return bool(compile_range.end <= self.max_tokens)


def configure(manager: Any, config: Any) -> None:
    manager.passes = ["another pass", AllReduceFusionPass()]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, types.ModuleType]]:
    """A fresh vLLM of a known version, and a plugin that has seen none yet."""
    modules = stand_in()
    for name in ("FLUX_VLLM", "FLUX_VLLM_MIN_TOKENS", "FLUX_VLLM_MOE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.32.1")
    monkeypatch.setattr(_log, "_said", set())
    ours = ("layer", "compiled", "moe")
    names = [f"flux.integrations.vllm.{name}" for name in ours]
    with mock.patch.dict(sys.modules, modules):
        for name in names:
            sys.modules.pop(name, None)
        yield modules
        async_tp.uninstall()
        for name, attribute in zip(names, ours, strict=True):
            sys.modules.pop(name, None)
            vars(plugin).pop(attribute, None)


def registry(vllm: dict[str, types.ModuleType]) -> dict[str, type]:
    found: dict[str, type] = vllm["vllm.model_executor.custom_op"].op_registry_oot
    return found


def row_parallel(vllm: dict[str, types.ModuleType], *args: Any, **kwargs: Any) -> Any:
    return vllm["vllm.model_executor.layers.linear"].RowParallelLinear(*args, **kwargs)


WEIGHT = torch.ones(16, 8)


def test_entry_point() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"flux": "flux.integrations.vllm:register"}


def test_register_any_number_of_times(vllm: dict[str, types.ModuleType]) -> None:
    with mock.patch.object(torch.cuda, "init", side_effect=AssertionError("it touched a GPU")):
        for _ in range(3):
            plugin.register()
    assert [cls.__name__ for cls in registry(vllm).values()] == ["FluxRowParallelLinear"]
    assert type(row_parallel(vllm, WEIGHT)) is registry(vllm)["RowParallelLinear"]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_what_vllms_own_passes_call(
    vllm: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Once registered, torch's operators for asynchronous tensor parallelism are flux's."""
    monkeypatch.setenv("FLUX_VLLM", mode)
    async_tp.uninstall()
    for _ in range(2):
        plugin.register()
    assert len(async_tp._installed) == (1 if mode == "auto" else 0)


def test_off(vllm: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_VLLM", "off")
    plugin.register()
    assert registry(vllm) == {} and "flux.integrations.vllm.layer" not in sys.modules


@pytest.mark.parametrize(
    "name, value", [("FLUX_VLLM", "on"), ("FLUX_VLLM_MIN_TOKENS", "0"), ("FLUX_VLLM_MOE", "on")]
)
def test_a_setting_that_means_nothing(
    vllm: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0", "", "dev"])
def test_unknown_versions(
    vllm: dict[str, types.ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    for _ in range(2):
        plugin.register()
    assert registry(vllm) == {}
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("vllm: flux stays off: ") and "0.26 to 0.32" in line and version in line


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.30.1rc2"])
def test_known_versions(version: str) -> None:
    assert plugin.why_not_version(version) is None


def test_another_plugin(vllm: dict[str, types.ModuleType], caplog: pytest.LogCaptureFixture) -> None:
    registry(vllm)["RowParallelLinear"] = other = type("TheirLinear", (), {})
    before = vllm["vllm.config"].VllmConfig.compute_hash
    async_tp.uninstall()
    plugin.register()
    assert async_tp._installed == [], "off is off"
    assert registry(vllm) == {"RowParallelLinear": other}
    assert vllm["vllm.config"].VllmConfig.compute_hash is before
    assert [r.message for r in caplog.records] == [
        "vllm: flux stays off: another plugin has replaced RowParallelLinear by TheirLinear"
    ]


def test_which_layers(vllm: dict[str, types.ModuleType]) -> None:
    plugin.register()
    x = torch.ones(3, 8)
    for changes in (
        {"tp_size": 1},
        {"reduce_results": False},
        {"input_is_parallel": False},
        {"quant_method": object()},
        {"params_dtype": torch.float64},
        {"output_size": 12},
        {"input_size_per_partition": 20},
    ):
        assert row_parallel(vllm, WEIGHT, **changes)(x) == "vLLM's own", changes
    packed = row_parallel(vllm, WEIGHT)
    packed.weight = torch.ones(0)
    assert packed(x) == "vLLM's own"
    layer = row_parallel(vllm, WEIGHT, bias=torch.ones(16), return_bias=True)
    with mock.patch("flux.integrations.vllm.layer.linear_all_reduce", return_value="flux's") as ours:
        assert layer(x) == ("flux's", None)
        assert ours.call_args.args[2:] == (layer.bias, 128, "7", "tp:0")
        layer.skip_bias_add = True
        assert layer(x) == ("flux's", layer.bias)
        assert ours.call_args.args[2] is None


def test_pass_mode_leaves_eager_models_alone(
    vllm: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUX_VLLM", "pass")
    plugin.register()
    assert row_parallel(vllm, WEIGHT)(torch.ones(3, 8)) == "vLLM's own"


def test_settings_of_vllm_that_flux_leaves_alone(vllm: dict[str, types.ModuleType]) -> None:
    plugin.register()
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = True  # type: ignore[attr-defined]
    assert row_parallel(vllm, WEIGHT)(torch.ones(3, 8)) == "vLLM's own"
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = False  # type: ignore[attr-defined]
    for config in (configuration(use_ubatching=True), configuration(linear_backend="another")):
        with mock.patch("flux.integrations.vllm.layer.get_current_vllm_config_or_none", lambda c=config: c):
            assert row_parallel(vllm, WEIGHT)(torch.ones(3, 8)) == "vLLM's own"


@pytest.mark.parametrize("mode", ["auto", "layer"])
def test_ranges_of_token_counts(
    vllm: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("FLUX_VLLM", mode)
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "33")
    plugin.register()
    row_parallel(vllm, WEIGHT)
    row_parallel(vllm, WEIGHT)
    manager = vllm["vllm.compilation.passes.pass_manager"].PostGradPassManager()
    manager.configure("a configuration")
    if mode == "layer":
        assert len(manager.passes) == 2
        return
    ours, *others = manager.passes
    assert others[0] == "another pass" and len(others) == 2, "ours is the first, and there once"
    told = []
    for start, end in ((1, 32), (33, 64), (65, 8192), (1, 8192)):
        context = mock.Mock(compile_range=mock.Mock(start=start, end=end))
        with (
            mock.patch("flux.integrations.vllm.compiled.get_pass_context", lambda c=context: c),
            mock.patch(
                "flux.integrations.vllm.compiled.settle_sums",
                side_effect=lambda g, reduced: told.append("summed" if reduced else "to be summed"),
            ),
            mock.patch("flux.integrations.vllm.compiled.unfuse", side_effect=lambda g: told.append("vLLM")),
            mock.patch(
                "flux.integrations.vllm.compiled.fuse_norm", side_effect=lambda g: told.append("flux")
            ),
        ):
            ours(None)
    # Below the limit; where vLLM fuses; flux's; and one in which the operator decides.
    assert told == ["to be summed", "vLLM", "summed", "vLLM", "summed", "flux"]
    assert "33" in ours.uuid()


@pytest.mark.parametrize(
    "ranks, endpoints, min_tokens, expected",
    [
        (2, [64], 64, [63, 64]),
        (2, [16, 64], 33, [16, 32, 64]),
        (2, [64], 65, [64]),
        (2, [64], 1, [64]),
        (2, [], 33, []),
        (1, [64], 33, [64]),
    ],
)
def test_where_a_range_is_split(
    vllm: dict[str, types.ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    endpoints: list[int],
    min_tokens: int,
    expected: list[int],
) -> None:
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", str(min_tokens))
    for _ in range(2):
        plugin.register()
    config = vllm["vllm.config"].VllmConfig()
    config.parallel_config = mock.Mock(tensor_parallel_size=ranks)
    config.compilation_config = mock.Mock(compile_ranges_endpoints=endpoints)
    config._set_compile_ranges()
    assert config.compilation_config.compile_ranges_endpoints == expected


def test_compiled_graphs_are_told_apart(vllm: dict[str, types.ModuleType]) -> None:
    config = vllm["vllm.config"].VllmConfig()
    hashes = [config.compute_hash()]
    for mode, min_tokens in (("auto", 128), ("auto", 64), ("layer", 64)):
        registry(vllm).clear()
        from flux.integrations.vllm import layer

        assert layer.replace_row_parallel(mode, min_tokens) is None
        hashes.append(config.compute_hash())
        assert hashes[-1] == config.compute_hash()
    assert len(set(hashes)) == 4


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


def operator(rank: int, world_size: int) -> list[str]:
    library = define_all_reduce()
    group = dist.group.WORLD.group_name
    g = torch.Generator().manual_seed(rank)
    weight = torch.randint(-2, 3, (24, 16), generator=g).float()
    bias = torch.arange(24.0)
    answers = []
    for tokens, min_tokens, with_bias in ((4, 5, True), (5, 5, True), (6, 5, False), (3, 5, False)):
        x = torch.randint(-2, 3, (tokens, 16), generator=g).float()
        expected = x @ weight.t()
        dist.all_reduce(expected)
        arguments = (x, weight, bias if with_bias else None, min_tokens, group, "tp:0")
        expected += bias if with_bias else 0
        with mock.patch.object(flux, "gemm_ar", wraps=flux.gemm_ar) as ours:
            result = op.linear_all_reduce(*arguments)
        if not torch.equal(result, expected) or ours.called != (tokens >= min_tokens):
            answers.append(f"{tokens} tokens: {(result - expected).abs().max()}, {ours.call_count} calls")
        compiled = torch.compile(op.linear_all_reduce, backend="aot_eager", fullgraph=True, dynamic=True)
        if not torch.equal(compiled(*arguments), expected):
            answers.append(f"{tokens} tokens: compiled differs")
    torch.library.opcheck(torch.ops.flux_vllm.linear_all_reduce.default, arguments)
    residual, norm_weight = torch.arange(72.0).view(3, 24), torch.arange(24.0) + 1
    arguments = (x, weight, bias, residual, norm_weight, 1e-5, group)
    normalised, total = torch.ops.flux_vllm.linear_all_reduce_norm(*arguments)
    expected += bias + residual
    if not torch.equal(total, expected):
        answers.append("the next residual differs")
    torch.testing.assert_close(normalised, torch.nn.functional.rms_norm(expected, (24,), norm_weight, 1e-5))
    torch.library.opcheck(torch.ops.flux_vllm.linear_all_reduce_norm.default, arguments)
    del library
    return answers


def test_operator() -> None:
    assert spawn(operator, 2, backend="gloo") == [[]] * 2


@pytest.mark.parametrize("bias", [False, True])
def test_unfused_graph(bias: bool) -> None:
    library = define_all_reduce()
    with FakeTensorMode():
        values = [torch.empty(7, 8), torch.empty(16, 8), torch.empty(16), torch.empty(2, 3, 8)]
    graph = torch.fx.Graph()
    x, weight, b, cube = (graph.placeholder(name) for name in ("x", "weight", "b", "cube"))
    for node, value in zip((x, weight, b, cube), values, strict=True):
        node.meta["val"] = value
    target = torch.ops.flux_vllm.linear_all_reduce.default
    one = graph.call_function(target, (x, weight, b if bias else None, 5, "7", "tp:0"))
    two = graph.call_function(target, (cube, weight, None, 5, "7", "tp:0"))
    graph.output((one, two))
    assert graphs.unfuse(graph) == 1, "vLLM's patterns know matrices only"
    graph.lint()
    kept, *made = [node for node in graph.nodes if node.op == "call_function"][::-1]
    assert kept.target is target and kept.args[0] is cube
    aten = torch.ops.aten
    expected = [torch.ops.vllm.all_reduce.default, aten.mm.default, aten.permute.default]
    assert [node.target for node in made] == ([aten.add.Tensor] if bias else []) + expected
    assert made[0].meta["val"].shape == (7, 16)
    assert made[-3].args[1] == "tp:0"
    del library


def define_norm() -> Any:
    """vLLM's operator for the norm, as far as a graph looks at it."""
    torch_library: Any = torch.library
    library = torch_library.Library("vllm_ir", "FRAGMENT")
    library.define(
        "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon,"
        " int? variance_size=None) -> (Tensor, Tensor)"
    )
    return library


@pytest.mark.parametrize(
    "case", ["plain", "another user", "part of a row", "no weight", "another dtype", "as residual", "cube"]
)
def test_norm_is_taken_in(case: str) -> None:
    library = define_norm()
    values: dict[str, torch.Tensor] = {}
    with FakeTensorMode():
        values["x"] = torch.empty(2, 3, 8) if case == "cube" else torch.empty(6, 8)
        values["weight"], values["bias"] = torch.empty(16, 8), torch.empty(16)
        values["residual"] = values["x"].new_empty(*values["x"].shape[:-1], 16)
        dtype = torch.bfloat16 if case == "another dtype" else torch.float32
        values["norm_weight"] = torch.empty(16, dtype=dtype)
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in values}
    for name, node in nodes.items():
        node.meta["val"] = values[name]
    x, weight, bias, residual, norm_weight = nodes.values()
    arguments = (x, weight, bias, 5, "7", "tp:0")
    linear = graph.call_function(torch.ops.flux_vllm.linear_all_reduce.default, arguments)
    linear.meta["val"] = values["residual"]
    pair = (residual, linear) if case == "as residual" else (linear, residual)
    others = {"part of a row": (norm_weight, 1e-5, 8), "no weight": (None, 1e-5)}
    more = others.get(case, (norm_weight, 1e-5, None))
    norm = graph.call_function(torch.ops.vllm_ir.fused_add_rms_norm.default, (*pair, *more))
    norm.meta["val"] = (values["residual"], values["residual"])
    first, second = (graph.call_function(operator_module.getitem, (norm, i)) for i in (0, 1))
    graph.output((first, second, linear) if case == "another user" else (first, second))
    assert graphs.fuse_norm(graph) == (case == "plain")
    graph.lint()
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    if case == "plain":
        fused = first.args[0]
        assert targets == [torch.ops.flux_vllm.linear_all_reduce_norm.default, *[operator_module.getitem] * 2]
        assert fused.args == (x, weight, bias, residual, norm_weight, 1e-5, "7")
        assert len(fused.meta["val"]) == 2
    else:
        assert targets[0] is torch.ops.flux_vllm.linear_all_reduce.default
    del library
