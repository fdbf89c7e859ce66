"""When the vLLM plugin registers, and which layers and ranges of token counts it serves, without vLLM."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import sys
import tomllib
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import vllm_stand_in as stand_in
from pytest import LogCaptureFixture, MonkeyPatch

import flux
from flux import _env
from flux.comm import workspace as workspace_of_flux
from flux.integrations import async_tp
from flux.integrations import vllm as plugin
from flux.integrations.vllm import graph, op, ranges, smoke_test
from flux.integrations.vllm import report as reports
from flux.ops import explain
from flux.ops.gemm_ar import row_norm
from flux.testing import spawn

vllm, registry, row_parallel = stand_in.vllm, stand_in.registry, stand_in.row_parallel
Modules = stand_in.Modules


WEIGHT = torch.ones(16, 8)


def test_entry_point() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"flux": "flux.integrations.vllm:register"}


def test_register_any_number_of_times(vllm: Modules) -> None:
    with mock.patch.object(torch.cuda, "init", side_effect=AssertionError("it touched a GPU")):
        for _ in range(3):
            plugin.register()
    assert [cls.__name__ for cls in registry(vllm).values()] == ["FluxRowParallelLinear"]
    assert type(row_parallel(vllm, WEIGHT)) is registry(vllm)["RowParallelLinear"]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_what_vllms_own_passes_call(vllm: Modules, monkeypatch: MonkeyPatch, mode: str) -> None:
    """Once registered, torch's operators for asynchronous tensor parallelism are flux's."""
    monkeypatch.setenv("FLUX_VLLM", mode)
    async_tp.uninstall()
    plugin.register()
    once = list(async_tp._installed)
    plugin.register()
    assert async_tp._installed == once
    assert bool(once) == bool(registry(vllm)) == (mode == "auto")
    assert ("flux.integrations.vllm.layer" in sys.modules) == (mode == "auto"), "off is off"


NOT_SERVED: dict[str, dict[str, Any]] = {
    "they are not sharded over ranks": {"tp_size": 1},
    "results are not reduced": {"reduce_results": False},
    "the input has to be split": {"input_is_parallel": False},
    "weights are quantised (object)": {"quant_method": object()},
    "the dtype is torch.float64": {"params_dtype": torch.float64},
    "sizes are not multiples of 8": {"output_size": 12},
}


def start(vllm: Modules, rank: int = 0) -> None:
    """What vLLM does in a worker when the model is there."""
    wrapper = vllm["vllm.v1.worker.worker_base"].WorkerWrapperBase(stand_in.Worker(rank))
    assert wrapper.compile_or_warm_up_model() == "compiled"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_line_tells_what_flux_does(
    vllm: Modules, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, rank: int
) -> None:
    for _ in range(2):
        plugin.register()
    row_parallel(vllm, WEIGHT)
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "64")
    for changes in ({}, {}, *NOT_SERVED.values(), {"input_size_per_partition": 20}):
        row_parallel(vllm, WEIGHT, **changes)
    reports.report.ranges |= {(64, 512): "flux 2", (1, 63): "vLLM 2"}
    with caplog.at_level("INFO", "vllm.flux"):
        for _ in range(2):
            start(vllm, rank)
    refused = [f"1 row-parallel linear layer: {reason}" for reason in list(NOT_SERVED)[:-1]]
    refused.append("2 row-parallel linear layers: sizes are not multiples of 8")
    expected = (
        f"flux {flux.__version__}: 1 row-parallel linear [16, 8] layer from 196608 tokens on "
        "(no measurement of 2 such GPUs: only large sums); "
        "2 row-parallel linear [16, 8] layers from 64 tokens on "
        "(FLUX_VLLM_MIN_TOKENS). Compiled for 1 to 63 tokens: vLLM 2; 64 to 512 tokens: flux 2. "
        f"vLLM's own: {'; '.join(refused)}"
    )
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == (
        [("vllm.flux", "INFO", expected)] if rank == 0 else []
    )


NO_KERNEL = "flux would run unfused: no kernel for (16, 8, torch.float32)"
# By configurations of vLLM.
LEFT: dict[str, dict[str, Any]] = {
    "LoRA is on": {"lora": "a LoRAConfig"},
    "the model is eager": {"mode": "NONE"},
    "micro-batches overlap": {"use_ubatching": True},
    "vLLM is told which GEMM to use": {"linear_backend": "another"},
}


@pytest.mark.parametrize("reason", [*NOT_SERVED, *LEFT, NO_KERNEL, ""])
def test_why_flux_is_not_used(
    vllm: Modules, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, reason: str
) -> None:
    if reason == "the model is eager":
        monkeypatch.setenv("FLUX_VLLM", "pass")
    if reason == NO_KERNEL:  # a GPU of another kind, or a build without kernels
        monkeypatch.setattr(explain, "why_unfused", lambda *problem, **how: f"no kernel for {problem[2:5]}")
    plugin.register()
    stand_in.use(vllm, **LEFT.get(reason, {}))
    layers = [row_parallel(vllm, WEIGHT, **NOT_SERVED.get(reason, {})) for _ in range(2 * bool(reason))]
    assert all(layer(torch.ones(3, 8)) == "vLLM's own" for layer in layers)
    with caplog.at_level("INFO", "vllm.flux"):
        start(vllm)
    (line,) = [record.message for record in caplog.records]
    what = "2 row-parallel linear layers: " if reason else "The model has no layers that flux knows"
    assert "not used. " in line and what in line and line.endswith(reason)


@pytest.mark.parametrize(
    "name, value, valid",
    [
        ("FLUX_VLLM", "on", "auto, pass, layer, off"),
        ("FLUX_VLLM_MIN_TOKENS", "0", "auto or a positive number"),
        ("FLUX_VLLM_TUNING", "/no/such", "a file"),
        ("FLUX_VLLM_SEQUENCE", "-1", "auto, off or a positive number"),
        ("FLUX_VLLM_MOE", "on", "auto, off"),
    ],
)
def test_a_setting_that_means_nothing(
    vllm: Modules, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, name: str, value: str, valid: str
) -> None:
    """vLLM starts as if it were not set, and the user is told what could be."""
    monkeypatch.setenv(name, value)
    for _ in range(2):
        plugin.register()
        row_parallel(vllm, WEIGHT)
    assert list(registry(vllm)) == ["RowParallelLinear"]
    line, *others = [record for record in caplog.records if record.levelname == "WARNING"]
    # Then its default holds, and the stand-in has no MoE layers.
    assert ["does not fit (MoE)" in other.message for other in others] == [True] * (name == "FLUX_VLLM_MOE")
    assert line.name == "vllm.flux", "vLLM shows what its own logger gets"
    for word in (f"{name}='{value}'", valid, "the default is used"):
        assert word in line.message


@pytest.mark.parametrize("parent", [None, "a process"])
def test_without_vllm(
    vllm: Modules, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, parent: str | None
) -> None:
    """Processes that vLLM starts do not repeat it."""
    monkeypatch.setattr(plugin, "installed_version", lambda: "")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    for _ in range(2):
        plugin.register()
    assert registry(vllm) == {}
    told = [record.message.split(": ")[1] for record in caplog.records]
    assert told == ([] if parent else ["not used, because vLLM is not installed"])


@pytest.mark.parametrize("version", ["0.19.0", "0.26.0", "0.33.0", "1.0.dev5+cpu"])
@pytest.mark.parametrize("lack", ["", "a class", "a method", "a parameter", "a module"])
def test_a_version_is_known_by_what_it_has(
    vllm: Modules, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, version: str, lack: str
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    monkeypatch.setattr(smoke_test, "failure", lambda version: None)
    names = {
        "a class": "vllm.model_executor.layers.linear.UnquantizedLinearMethod",
        "a method": "vllm.config.VllmConfig.compute_hash",
        "a parameter": "vllm.compilation.passes.pass_manager.PostGradPassManager.configure",
        "a module": "vllm.model_executor.custom_op",
    }
    if lack == "a module":
        monkeypatch.setitem(sys.modules, names[lack], None)
    elif lack == "a parameter":
        manager = vllm["vllm.compilation.passes.pass_manager"].PostGradPassManager
        monkeypatch.setattr(manager, "configure", lambda self, settings: None)
    elif lack:
        *owner, name = names[lack].removeprefix("vllm.").split(".")
        found: Any = vllm["vllm"]
        for step in owner:
            found = getattr(found, step)
        monkeypatch.delattr(found, name)
    for _ in range(2):
        plugin.register()
    if lack == "a module":
        monkeypatch.undo()  # so that the registry is there to be looked at
    assert list(registry(vllm)) == ([] if lack else ["RowParallelLinear"])
    lines = [record.message for record in caplog.records]
    assert len(lines) == bool(lack)
    for line in lines:
        assert f"not used, because flux does not fit vLLM {version}: it" in line and names[lack] in line


def test_an_unknown_version_that_fails_its_trial_is_not_served(
    vllm: Modules, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.34.0")
    monkeypatch.setattr(smoke_test, "failure", lambda version: f"{version} does something else")
    plugin.register()
    assert registry(vllm) == {}
    (line,) = (record.message for record in caplog.records)
    assert "not used, because flux does not fit vLLM 0.34.0: 0.34.0 does something else" in line


@pytest.mark.parametrize("part", ["worker", "MoE"])
def test_parts_of_the_plugin_stand_alone(
    vllm: Modules, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, part: str
) -> None:
    monkeypatch.setenv("FLUX_VLLM_MOE", "auto")  # the stand-in has no MoE layers
    if part == "worker":
        monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", None)
    plugin.register()
    assert list(registry(vllm)) == ["RowParallelLinear"]
    told = [record.message for record in caplog.records]
    assert any(f"does not fit ({part}): it has no vllm." in line for line in told)


@pytest.mark.parametrize("given", [None, "7"])
def test_waits_as_long_as_vllm(vllm: Modules, monkeypatch: MonkeyPatch, given: str | None) -> None:
    if given is not None:
        monkeypatch.setenv("FLUX_TIMEOUT_S", given)
    plugin.register()
    assert _env.timeout_s() == float(given or 300)


@pytest.mark.parametrize("step", ["execute_model", "sample_tokens", "a result that comes later"])
def test_a_timeout_is_raised_after_the_step(vllm: Modules, monkeypatch: MonkeyPatch, step: str) -> None:
    """Also if the step made no call of flux, as a CUDA graph that is replayed."""
    for _ in range(2):
        plugin.register()
    wrapper = vllm["vllm.v1.worker.worker_base"].WorkerWrapperBase(stand_in.Worker(1))
    group, device = mock.Mock(name="group"), torch.device("cpu")
    monkeypatch.setattr(workspace_of_flux, "turns", {})
    monkeypatch.setattr(workspace_of_flux, "made", {})
    its_turn = workspace_of_flux.turn(group, device)
    workspace = mock.Mock(check=mock.Mock(return_value=None))
    workspace_of_flux.made[group, device] = workspace
    lost = flux.CommTimeoutError("gemm_ar", 1, 0, 5)
    if step == "a result that comes later":
        later = types.SimpleNamespace(get_output=lambda: setattr(workspace.check, "side_effect", lost))
        assert wrapper.execute_model(None) is None
        assert wrapper.sample_tokens(later) is later
        assert workspace.check.call_count == 0, "the GPU may not even have begun"
        call = later.get_output
    else:
        assert getattr(wrapper, step)("a step") == "a step" and workspace.check.call_count == 1
        workspace.check.side_effect = lost
        call = functools.partial(getattr(wrapper, step), "a step")
    before = workspace.check.call_count
    with pytest.raises(flux.CommTimeoutError, match="rank 1 waited"):
        call()
    assert workspace.check.call_count == before + 1
    assert its_turn.broken_by is None


def test_a_result_that_comes_later_is_freed_when_it_is_used(vllm: Modules) -> None:
    """It holds pinned memory and an event, which the next step can use again."""
    plugin.register()
    wrapper = vllm["vllm.v1.worker.worker_base"].WorkerWrapperBase(stand_in.Worker(1))

    class Later:
        def get_output(self) -> str:
            return "tokens"

    result = wrapper.sample_tokens(Later())
    assert result.get_output() == "tokens"
    alive = weakref.ref(result)
    gc.disable()
    try:
        del result
        assert alive() is None, "it waits for the garbage collector"
    finally:
        gc.enable()


def test_a_layer_that_differs(vllm: Modules) -> None:
    plugin.register()
    linear = vllm["vllm.model_executor.layers.linear"].RowParallelLinear
    build = linear.__init__

    def without_tp_size(self: Any, weight: torch.Tensor) -> None:
        build(self, weight)
        del self.tp_size

    with mock.patch.object(linear, "__init__", without_tp_size):
        assert row_parallel(vllm, WEIGHT)(torch.ones(3, 8)) == "vLLM's own"
    ((_, reason),) = reports.report.refused
    assert reason.startswith("this version of vLLM differs: ") and "tp_size" in reason


def test_another_plugin(vllm: Modules, caplog: LogCaptureFixture) -> None:
    registry(vllm)["RowParallelLinear"] = other = type("TheirLinear", (), {})
    before = vllm["vllm.config"].VllmConfig.compute_hash
    async_tp.uninstall()
    plugin.register()
    assert async_tp._installed == [], "off is off"
    assert registry(vllm) == {"RowParallelLinear": other}
    assert vllm["vllm.config"].VllmConfig.compute_hash is before
    assert [(r.levelname, r.message.split(": ")[1]) for r in caplog.records] == [
        ("WARNING", "not used, because another plugin has replaced RowParallelLinear by TheirLinear")
    ]


def test_which_layers(vllm: Modules, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "64")
    plugin.register()
    x = torch.ones(3, 8)
    packed = row_parallel(vllm, WEIGHT)
    packed.weight = torch.ones(0)
    assert packed(x) == "vLLM's own"
    layer = row_parallel(vllm, WEIGHT, bias=torch.ones(16), return_bias=True)
    with mock.patch("flux.integrations.vllm.layer.linear_all_reduce", return_value="flux's") as ours:
        assert layer(x) == ("flux's", None)
        assert ours.call_args.args[2:] == (layer.bias, 64, "7", "tp:0")
        layer.skip_bias_add = True
        assert layer(x) == ("flux's", layer.bias)
        assert ours.call_args.args[2] is None


@pytest.mark.parametrize("kept", [True, False])
def test_batch_invariant(vllm: Modules, monkeypatch: MonkeyPatch, kept: bool) -> None:
    """All batches of a layer are flux's, whatever limits are set; or none, if flux is told not to be so."""
    for name in ("MIN_TOKENS", "SEQUENCE"):
        monkeypatch.setenv(f"FLUX_VLLM_{name}", "64")
    if not kept:
        monkeypatch.setenv("FLUX_BATCH_INVARIANT", "off")
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = True  # type: ignore[attr-defined]
    plugin.register()
    config = stand_in.use(vllm)
    row_parallel(vllm, WEIGHT)
    row_parallel(vllm, WEIGHT, quant_method=object())
    assert config.compilation_config.compile_ranges_endpoints == [512]
    assert sys.modules["flux.integrations.vllm.layer"].rules.sums == {}
    served = {("row-parallel linear [16, 8]", 1, "batch invariant"): 1}
    assert reports.report.served == (served if kept else {})
    off = "VLLM_BATCH_INVARIANT is set, and FLUX_BATCH_INVARIANT is off"
    refused = [reason for _, reason in reports.report.refused]
    assert refused == [*([] if kept else [off]), "weights are quantised (object)"]


def rows_that_differ(rank: int, world_size: int) -> list[str]:
    """Rows of batches of other sizes and at other places, through a layer's operators."""
    library = stand_in.define_all_reduce()
    group, wrong = dist.group.WORLD.group_name, []
    generator = torch.Generator().manual_seed(rank)
    x, weight = (torch.randn(rows, 96, generator=generator) for rows in (40, 64))
    residual, norm_weight = torch.ones(40, 64), torch.ones(64)
    with flux.batch_invariant():
        begins = ranges.ranges_on(x.device, ranges.Layer(64, 96, world_size, 4)).begin
        run = lambda rows: op.linear_all_reduce(x[rows], weight, None, begins, group, "tp:0")  # noqa: E731
        normed = lambda rows: torch.ops.flux_vllm.linear_all_reduce_norm(  # noqa: E731
            x[rows], weight, None, residual[rows], norm_weight, 1e-5, group
        )[0]
        for name, of in (("sum", run), ("norm", normed)):
            whole = of(slice(40))
            for first, last in ((0, 1), (7, 9), (3, 20), (39, 40)):
                if not torch.equal(of(slice(first, last)), whole[first:last]):
                    wrong.append(f"{name} of rows {first} to {last}")
        with mock.patch.object(op.gemm, "in_graph", lambda x: True), mock.patch.object(op, "gemm_ar") as fast:
            if not torch.equal(normed(slice(40)), whole) or fast.serving.called:
                wrong.append("in a CUDA graph, whose products depend on the number of tokens")
    del library
    return wrong


def test_rows_have_the_same_bits_in_any_batch(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "5")
    assert spawn(rows_that_differ, 2, backend="gloo") == [[], []]


# The smoke test of versions of vLLM that flux has not been run with.


def failure(*defined: Callable[[], Any]) -> str | None:
    """What the test finds where these operators are defined."""
    libraries = [define() for define in defined]
    with mock.patch.dict(sys.modules, stand_in.stand_in()):
        for known in ("0.26.0", "0.33.1+cpu"):
            assert smoke_test.failure(known) is None
        found = [smoke_test.failure(version) for version in ("0.34.0", "0.3.3", "1.0.dev5", "main")]
    del libraries
    assert found == found[:1] * len(found)
    return found[0]


def all_found(rank: int, world_size: int) -> dict[str, str | None]:
    """Where nothing else defines vLLM's operators."""
    as_vllms = (
        stand_in.define_all_reduce,
        functools.partial(stand_in.define_norm, row_norm),
    )  # what flux takes for granted
    told = {
        "the same": failure(*as_vllms),
        "no norm": failure(stand_in.define_all_reduce),
        "another norm": failure(stand_in.define_all_reduce, stand_in.define_norm),
        "no sum": failure(*as_vllms[1:]),
    }
    for broken in ("fuse_norm", "unfuse"):  # rewrites that find nothing
        assert hasattr(graph, broken)
        with mock.patch.object(smoke_test, broken, lambda *arguments: 0):
            told[broken] = failure(*as_vllms)
    return told


def test_what_is_found_of_versions() -> None:
    (told,) = spawn(all_found, 1, backend="gloo")
    assert told["the same"] is None
    assert told["no norm"] is None, "flux fuses none then"
    assert told["another norm"] == "its fused_add_rms_norm gives something else"
    assert told["no sum"].startswith("a smoke test raised AttributeError") and "all_reduce" in told["no sum"]
    for broken in ("fuse_norm", "unfuse"):
        assert told[broken].startswith("flux cannot") and told[broken].endswith("in a graph")
