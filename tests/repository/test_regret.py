"""The plan against all stored measurements: how much slower it is than the fastest way that was measured."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flux.measured import files
from flux.measured.times import NO_FACTS, Fact, Tuning, scaled

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def regret() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("regret")


@pytest.fixture(scope="module")
def facts(regret: Any) -> tuple[Fact, ...]:
    return files.read(regret.FILE)[1]


def test_the_shipped_files_are_made_of_the_stored_results(regret: Any) -> None:
    texts = importlib.import_module("tuning_facts").texts()
    assert sorted(texts) == sorted(path.name for path in files.SHIPPED.glob("*.json"))
    for name, text in texts.items():
        written, made = json.loads((files.SHIPPED / name).read_text()), json.loads(text)
        for data in (written, made):
            for row in data["rows"]:
                row.pop("older", None)  # differs where a kernel has changed since the file was made
        assert written == made, f"{name}: run benchmarks/tuning_facts.py"


def test_the_plan_is_near_the_fastest_way_that_was_measured(regret: Any, facts: tuple[Fact, ...]) -> None:
    shipped = Tuning(facts)
    held = regret.hold(facts, lambda fact: shipped)
    assert len(held) > 400
    regrets = [each.regret for each in held]
    assert regret.geomean(regrets) <= regret.MEAN and max(regrets) <= regret.WORST
    # Without measurements it is not: the test can fail.
    assert max(each.regret for each in regret.hold(facts, lambda fact: NO_FACTS)) > regret.WORST


# What nothing near it tells by 10 %, and why: docs/design/plan.md, "What neighbours do not tell".
UNTOLD = {("gemm", 128, 6144, 4096)}
FP8_BYTES = 1


@pytest.mark.parametrize("leave_out", ["without_rows", "without_weight"])
def test_interpolation_does_no_harm(regret: Any, facts: tuple[Fact, ...], leave_out: str) -> None:
    """Left out, a row is chosen within the bar by what is near it, but for UNTOLD. The bar of torch's fp8
    products is wider.
    """
    tuning_for = getattr(regret, leave_out)(facts)
    some = [fact for fact in facts if tuning_for(fact).estimates(*fact.problem)]
    held, usual = regret.hold(some, tuning_for), regret.hold(some, lambda fact: NO_FACTS)
    assert len(held) > 100
    means = [
        regret.geomean([each.regret for each in these if each.fact.dtype != FP8_BYTES])
        for these in (held, usual)
    ]
    assert means[0] <= 1.0095 < 1.016 < means[1]
    torchs = [each for each in held if each.fact.op == scaled("gemm", "tensor")]
    assert regret.geomean([each.regret for each in torchs]) <= 1.035
    assert max(each.regret for each in torchs) < 1.26
    others = [each for each in held if each not in torchs]
    over = {
        (row.op, row.m, row.n, row.k) for row in (each.fact for each in others if each.regret > regret.WORST)
    }
    assert over == UNTOLD and max(each.regret for each in others) < 1.105
    harm = [mine.regret / theirs.regret for mine, theirs in zip(held, usual, strict=True)]
    assert max(harm) <= 1.05 and sum(each > 1 for each in harm) <= 4
    assert regret.geomean(regret.errors(some, tuning_for)) < 1.05


def test_no_row_of_moe_gemm_ar_and_ag_gemm_is_slower_than_unfused(
    regret: Any, facts: tuple[Fact, ...]
) -> None:
    """By more than the noise: that of the samples, and what two measurements of one way differ by."""
    shipped = Tuning(facts)
    for each in regret.hold(facts, lambda fact: shipped):
        unfused = min(each.fact.us.get(way, 1e9) for way in ("parts", "torch"))
        if each.fact.op.split(".")[0] in ("moe", "gemm_ar", "ag_gemm"):
            assert each.fact.us[each.way] <= unfused * (1.04 + each.fact.noise), each


def test_a_wrong_choice_is_seen(regret: Any) -> None:
    fact = Fact("gemm_ar", 2, 2, 16, 4096, 2048, {"fused": 10.0, "torch": 5.0})
    (held,) = regret.hold([fact], lambda _: NO_FACTS)
    assert (held.way, held.best, held.regret) == ("fused", "torch", 2.0)
    (held,) = regret.hold([fact], lambda _: Tuning((fact,)))
    assert (held.way, held.regret) == ("torch", 1.0)
    slower = replace(fact, us={"fused": 10.0, "torch": 9.9})
    assert regret.chosen(slower, Tuning((slower,))) == "fused"  # within the margin
