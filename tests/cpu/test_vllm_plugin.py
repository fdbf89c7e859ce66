"""When the vLLM plugin registers, and which layers and ranges of token counts it serves, without vLLM."""

from __future__ import annotations

import sys
import tomllib
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import vllm_stand_in as stand_in

from flux.integrations import async_tp
from flux.integrations import vllm as plugin

vllm, registry = stand_in.vllm, stand_in.registry


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
    for config in (
        stand_in.configuration(use_ubatching=True),
        stand_in.configuration(linear_backend="another"),
    ):
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
