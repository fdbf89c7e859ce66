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
        names = {
            "unshard": None,
            "settle_sums": None,
            "count_sharded": self.sharded,
            "unfuse": 3,
            "drop_products": None,
            "fuse_sum_norm_gemm": 2,
            "fuse_norm": 2,
            "count_kept": 4,
            "fuse_quantisation": 1,
            "drop_marks": None,
            "fuse_norm_gemm": (3, 1),
        }
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
    assert ours(65, 8192) == [
        ("unshard", 8192),
        ("settle_sums", 65, 8192),
        ("count_sharded",),
        ("unfuse", 8192),
        ("drop_products", 65),
        ("fuse_sum_norm_gemm", 65),
        ("fuse_norm", 65),
        ("count_kept",),
        ("fuse_quantisation",),
        ("drop_marks",),
    ]
    # Where vLLM fuses, layers are given back from whatever number of tokens on flux begins.
    assert ours(1, 64) == [
        ("unshard", None),
        ("settle_sums", 1, 64),
        ("count_sharded",),
        ("unfuse", 0),
        ("drop_products", 1),
        ("fuse_sum_norm_gemm", 1),
        ("fuse_norm", 1),
        ("count_kept",),
        ("fuse_quantisation",),
        ("drop_marks",),
        ("fuse_norm_gemm",),
    ]
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


def test_layers_are_kept_where_vllm_would_fuse(vllm: Modules, monkeypatch: MonkeyPatch) -> None:
    """In ranges that begin where all kinds of layers may be kept. vLLM's fusion applies to 1 to 64."""
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "4")
    plugin.register()
    from flux.integrations.vllm import layer, ranges

    config = stand_in.use(vllm)
    monkeypatch.setattr(ranges, "few_over_fusion", lambda *problem: range(1, 8))
    layer.rules.linear_only = True

    def build(many: int) -> None:
        monkeypatch.setattr(ranges, "over_fusion_from", lambda *problem: many)
        row_parallel(vllm, WEIGHT)

    def given_back(start: int, end: int) -> list[Any]:
        return [told for told in Pass(vllm)(start, end) if told[0] in ("unshard", "unfuse")]

    build(8)
    assert given_back(8, 64) == [("unshard", 64), ("unfuse", 64)], "flux keeps what begins there"
    assert given_back(4, 64) == [("unshard", None), ("unfuse", 0)]
    build(2)
    assert given_back(8, 64) == [("unshard", 64), ("unfuse", 64)]
    build(16)
    assert given_back(8, 64) == [("unshard", None), ("unfuse", 0)], "one kind stays vLLM's"
    assert given_back(16, 64) == [("unshard", 64), ("unfuse", 64)]
    layer.rules.linear_only = False
    assert given_back(16, 64) == [("unshard", None), ("unfuse", 0)], "of such models none was measured"
    assert config.compilation_config.compile_ranges_endpoints == [3, 7, 15, 64, 512]


def test_few_tokens_are_kept_where_vllm_would_fuse(vllm: Modules, monkeypatch: MonkeyPatch) -> None:
    """In ranges within the numbers of tokens with which all kinds of layers may be kept."""
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "1")
    plugin.register()
    from flux.integrations.vllm import layer, ranges

    config = stand_in.use(vllm, fused_bytes=BYTES_OF_A_ROW * 64)
    monkeypatch.setattr(ranges, "over_fusion_from", lambda *problem: 32)
    layer.rules.linear_only = True

    def build(few: range) -> None:
        monkeypatch.setattr(ranges, "few_over_fusion", lambda *problem: few)
        row_parallel(vllm, WEIGHT)

    def unfused(start: int, end: int) -> int:
        (found,) = [told[1] for told in Pass(vllm)(start, end) if told[0] == "unfuse"]
        return int(found)

    build(range(1, 7))
    assert [unfused(1, 6), unfused(1, 7), unfused(7, 31), unfused(32, 64)] == [6, 0, 0, 64]
    build(range(1, 21))
    assert [unfused(1, 6), unfused(1, 20)] == [6, 0], "one kind stays vLLM's"
    layer.rules.linear_only = False
    assert unfused(1, 6) == 0, "of such models none was measured"
    layer.rules.linear_only = True
    build(range(4, 6))
    assert [unfused(1, 3), unfused(3, 5), unfused(4, 5), unfused(4, 6)] == [0, 0, 5, 0]
    build(range(0))
    assert unfused(4, 5) == 0
    endpoints = config.compilation_config.compile_ranges_endpoints
    assert endpoints == [3, 5, 6, 20, 31, 64, 512], "64: no fusion, and the end of products behind norms"
    build(range(1, 101))
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
    # vLLM would fuse in the first.
    assert [told for told in Pass(vllm)(1, 64) if told[0] in ("unshard", "unfuse")] == [
        ("unshard", 64),
        ("unfuse", 64),
    ]


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
    vllm: Modules,
    monkeypatch: MonkeyPatch,
    endpoints: list[int] | None,
    begins: list[int],
    expected: list[int] | None,
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
