"""Compiled models of the vLLM plugin: where ranges of token counts begin, and what becomes of each."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import vllm_stand_in as stand_in
from pytest import MonkeyPatch

from flux.integrations import vllm as plugin
from flux.integrations.vllm import predict
from flux.integrations.vllm import report as reports
from flux.integrations.vllm.graph import SumRule

vllm, registry, row_parallel = stand_in.vllm, stand_in.registry, stand_in.row_parallel
Modules = stand_in.Modules
WEIGHT = torch.ones(16, 8)
BYTES_OF_A_ROW = 4 * 16


class Pass:
    """What the pass is told to do in a range; instead of a graph. sharded: what it finds in that."""

    def __init__(self, vllm: Modules, **sharded: int) -> None:
        self.sharded = {kind.replace("_", " "): count for kind, count in sharded.items()}
        manager = vllm["vllm.compilation.passes.pass_manager"].PostGradPassManager()
        manager.configure("a configuration")
        self.passes = manager.passes

    def __call__(self, start: int, end: int) -> list[Any]:
        context = mock.Mock(compile_range=mock.Mock(start=start, end=end))
        told: list[Any] = []
        names: dict[str, Any] = dict.fromkeys(("unshard", "settle_sums", "drop_products", "drop_marks"))
        names |= {"count_sharded": self.sharded, "unfuse": 3, "fuse_sum_norm_gemm": 2, "fuse_norm": 2}
        names |= {"count_kept": 4, "fuse_quantisation": 1, "fuse_norm_gemm": (3, 1)}
        with contextlib.ExitStack() as stack:
            module = "flux.integrations.vllm.compiled"
            stack.enter_context(mock.patch(f"{module}.get_pass_context", lambda: context))
            for name, count in names.items():
                call = lambda graph, *limits, name=name, count=count: told.append((name, *limits)) or count  # noqa: E731
                stack.enter_context(mock.patch(f"{module}.{name}", call))
            self.passes[0]("a graph")
        return told


def test_ranges_of_token_counts(vllm: Modules, monkeypatch: MonkeyPatch) -> None:
    plugin.register()
    row_parallel(vllm, WEIGHT)
    row_parallel(vllm, WEIGHT)
    ours = Pass(vllm)
    assert len(ours.passes) == 3 and ours.passes[1] == "another pass", "ours is the first, and there once"

    def steps(start: int, end: int, gives: int | None, *more: str) -> list[Any]:
        begun = [("unshard", gives), ("settle_sums", start, end), ("count_sharded",), ("unfuse", gives or 0)]
        begun += [(name, start) for name in ("drop_products", "fuse_sum_norm_gemm", "fuse_norm")]
        return begun + [(name,) for name in ("count_kept", "fuse_quantisation", "drop_marks", *more)]

    assert ours(65, 8192) == steps(65, 8192, 8192)
    # Where vLLM fuses, layers are given back from whatever number of tokens on flux begins.
    assert ours(1, 64) == steps(1, 64, None, "fuse_norm_gemm")
    once = "flux 4 linear layers, 2 with norm, vLLM 3"
    assert reports.report.ranges == {
        (1, 64): f"{once} (AllReduceFusionPass applies), 3 products behind them, 1 with SwiGLU, "
        "quantised behind 1 norms",
        (65, 8192): f"{once}, quantised behind 1 norms",
    }
    ours(65, 8192)  # another graph of the model
    twice = "flux 8 linear layers, 4 with norm, vLLM 6, quantised behind 2 norms"
    assert reports.report.ranges[65, 8192] == twice
    sharded = Pass(vllm, linear_layers=2, other_sums=0, MoE_layers=1)
    for _ in range(2):
        sharded(128, 256)
    told = "flux 4 linear layers, 2 MoE layers sequence parallel"
    assert reports.report.ranges[128, 256] == f"{told}, {twice}"


def test_what_is_kept_where_vllm_would_fuse(vllm: Modules, monkeypatch: MonkeyPatch) -> None:
    """Ranges that begin where all kinds of layers may be kept, and those within the numbers of tokens with
    which all may. vLLM's fusion applies to 1 to 64.
    """
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "1")
    plugin.register()
    from flux.integrations.vllm import layer, ranges

    config = stand_in.use(vllm, fused_bytes=BYTES_OF_A_ROW * 64)
    layer.rules.linear_only = True

    def build(few: range, many: int) -> None:
        monkeypatch.setattr(ranges, "few_over_fusion", lambda *problem: few)
        monkeypatch.setattr(ranges, "over_fusion_from", lambda *problem: many)
        row_parallel(vllm, WEIGHT)

    def kept(*limits: tuple[int, int]) -> list[bool]:
        found = []
        for start, end in limits:
            told = [told[1] for told in Pass(vllm)(start, end) if told[0] in ("unshard", "unfuse")]
            assert told in ([end, end], [None, 0])
            found.append(told == [end, end])
        return found

    build(range(1, 7), 8)
    assert kept((8, 64), (4, 64), (1, 6), (1, 7), (7, 31)) == [True, False, True, False, False]
    build(range(1, 21), 2)
    assert kept((8, 64), (2, 64), (1, 6), (1, 20)) == [True, False, True, False], "one kind stays vLLM's"
    build(range(1, 21), 16)
    assert kept((8, 64), (16, 64)) == [False, True]
    layer.rules.linear_only = False
    assert kept((16, 64), (1, 6)) == [False, False], "of such models none was measured"
    layer.rules.linear_only = True
    build(range(4, 6), 32)
    assert kept((1, 3), (3, 5), (4, 5), (4, 6)) == [False, False, True, False]
    build(range(0), 32)
    assert kept((4, 5), (16, 64), (32, 64)) == [False, False, True]
    endpoints = config.compilation_config.compile_ranges_endpoints
    ends, begins = [3, 5, 6, 20], [1, 7, 15, 31]
    # 64: no fusion, and the end of products behind norms.
    assert endpoints == sorted([*ends, *begins, 64, 512])
    build(range(1, 101), 32)
    assert config.compilation_config.compile_ranges_endpoints == endpoints, "100 are no end: vLLM's is 64"


@pytest.mark.parametrize("is_moe", [False, True])
@pytest.mark.parametrize("settings", [{}, {"MIN_TOKENS": "9"}, {"SEQUENCE": "32"}, {"SEQUENCE": "off"}])
def test_what_is_predicted_of_a_model_is_what_its_layers_do(
    vllm: Modules, monkeypatch: MonkeyPatch, settings: dict[str, str], is_moe: bool
) -> None:
    """`flux doctor --vllm` sees sizes of a model, layers see vLLM's configuration."""
    for name, value in settings.items():
        monkeypatch.setenv(f"FLUX_VLLM_{name}", value)
    plugin.register()
    from flux.integrations.vllm import layer

    stand_in.use(vllm, fused_bytes=predict.FUSED_BY_VLLM_BYTES[2], is_moe=is_moe)
    row_parallel(vllm, torch.ones(16, 8, dtype=torch.bfloat16))
    model = predict.Model("", 16, 16, 0, experts=is_moe)
    found = predict.predict(model, 2, torch.device("cpu"))
    assert layer.rules.kinds == {found.layers["o_proj"][1]}
    (ranges,) = layer.rules.kinds
    assert found.sequence == ranges.sequence and (found.few, found.many) == (ranges.few, ranges.many)


def test_vllms_own_sequence_parallelism_comes_first(vllm: Modules, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "4")
    plugin.register()
    from flux.integrations.vllm import layer, ranges

    monkeypatch.setattr(ranges, "over_fusion_from", lambda *problem: 1)
    layer.rules.linear_only = True
    row_parallel(vllm, WEIGHT)
    ours = Pass(vllm)
    assert ("unfuse", 64) in ours(8, 64)
    applies = {"is_applicable_for_range": lambda self, compile_range: True}
    ours.passes[0].fusions.append(type("SequenceParallelismPass", (), applies)())
    assert ("unfuse", 0) in ours(8, 64)


def test_all_ranges_are_alike_where_calls_must_be_batch_invariant(vllm: Modules) -> None:
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = True  # type: ignore[attr-defined]
    plugin.register()
    row_parallel(vllm, WEIGHT)
    found = [told for told in Pass(vllm)(1, 64) if told[0] in ("unshard", "unfuse")]
    assert found == [("unshard", 64), ("unfuse", 64)], "vLLM would fuse there"


def test_mode_layer_has_no_pass(vllm: Modules, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_VLLM", "layer")
    plugin.register()
    row_parallel(vllm, WEIGHT)
    assert len(Pass(vllm).passes) == 2


@pytest.mark.parametrize(
    "endpoints, begins, expected",
    [
        ([64], [64], [63, 64]),
        ([16, 64], [33, 8, 33], [7, 16, 32, 64]),
        ([64], [65], [64]),
        ([64], [1], [64]),
        ([], [33], []),
        (None, [33], None),
    ],
)
def test_a_range_begins_where_a_layer_does(
    vllm: Modules, monkeypatch: MonkeyPatch, endpoints: Any, begins: list[int], expected: Any
) -> None:
    plugin.register()
    config = stand_in.use(vllm)
    config.compilation_config.compile_ranges_endpoints = endpoints
    for tokens in begins:
        monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", str(tokens))
        row_parallel(vllm, WEIGHT)
    assert config.compilation_config.compile_ranges_endpoints == expected


def test_compiled_graphs_are_told_apart(vllm: Modules, monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    config = vllm["vllm.config"].VllmConfig()
    hashes = [config.compute_hash()]
    tuning = tmp_path / "tuning.json"
    tuning.write_text('{"rows": []}')
    for setting in ({}, {"MIN_TOKENS": "64"}, {"TUNING": str(tuning)}):
        registry(vllm).clear()
        for name, value in setting.items():
            monkeypatch.setenv(f"FLUX_VLLM_{name}", value)
        from flux.integrations.vllm import layer

        assert layer.replace_row_parallel("auto") is None
        hashes.append(config.compute_hash())
        assert hashes[-1] == config.compute_hash()
    assert len(set(hashes)) == 4


@pytest.mark.parametrize(
    "case",
    ["quantised", "served", "not measured", "eager", "layer", "batch-invariant", "unfused", "one rank"],
)
def test_sums_of_layers_that_stay_vllms(vllm: Modules, monkeypatch: MonkeyPatch, case: str) -> None:
    """Compiled graphs use flux.all_reduce for them, up to as many tokens as is known to be faster."""
    if case == "layer":
        monkeypatch.setenv("FLUX_VLLM", "layer")
    plugin.register()
    from flux.integrations.vllm import layer, ranges

    nbytes = 0 if case == "not measured" else 4 * 16 * 100
    monkeypatch.setattr(ranges, "sums", lambda *layer: (3, nbytes))
    if case == "unfused":
        op_of_sums = "all_reduce_norm"
        monkeypatch.setattr(
            layer, "why_unfused", lambda op, *rest, **how: "why" if op == op_of_sums else None
        )
    if case == "batch-invariant":
        vllm["vllm.envs"].VLLM_BATCH_INVARIANT = True  # type: ignore[attr-defined]
    config = stand_in.use(vllm, mode="NONE" if case == "eager" else "VLLM_COMPILE")
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "9")
    changes: dict[str, Any] = {} if case == "served" else {"quant_method": object()}
    if case == "one rank":
        changes["tp_size"] = 1
    row_parallel(vllm, WEIGHT, **changes)
    endpoints = config.compilation_config.compile_ranges_endpoints
    if case in ("quantised", "served"):
        assert layer.rules.sums == {"tp:0": SumRule("7", 3, nbytes)}
        assert endpoints == ([2, 8, 64, 100, 512] if case == "served" else [2, 100, 512])
        assert len(Pass(vllm).passes) == 3
    else:
        assert layer.rules.sums == {} and endpoints == [512]


@pytest.mark.parametrize(
    ("setting", "others", "told", "endpoints"),
    [
        ("9", 0, "Sequence parallel from 9 tokens on", [5, 8, 512]),
        ("9", 2, "Sequence parallel from 9 tokens on", [5, 8, 512]),
        ("auto", 0, "Not sequence parallel: a reason", [5, 64, 512]),
        ("off", 0, "", [5, 64, 512]),
    ],
)
def test_models_become_sequence_parallel_before_they_are_split(
    vllm: Modules, monkeypatch: MonkeyPatch, setting: str, others: int, told: str, endpoints: list[int]
) -> None:
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", setting)
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "6")
    plugin.register()
    config = stand_in.use(vllm)
    row_parallel(vllm, WEIGHT)
    model = mock.Mock()
    sharded = 9 if setting == "9" else "a reason"
    module, counts = "flux.integrations.vllm.compiled", {"linear layers": 64, "other sums": others}
    with (
        mock.patch(f"{module}.shard", return_value=sharded) as shard,
        mock.patch(f"{module}.count_sharded", return_value=counts),
    ):
        backend = vllm["vllm.compilation.backends"].VllmBackend(config)
        assert backend(model, []) is model
    assert shard.called == (setting != "off")
    from flux.integrations.vllm import layer

    assert layer.rules.linear_only == (setting == "9" and not others)
    assert model.recompile.called == (setting == "9")
    with mock.patch("flux.integrations.vllm.compiled.shard", return_value="a reason"):
        vllm["vllm.compilation.backends"].VllmBackend(config)(mock.Mock(), [])  # a draft model
    assert reports.report.sequence == told
    assert (told in reports.report.line()) and config.compilation_config.compile_ranges_endpoints == endpoints
