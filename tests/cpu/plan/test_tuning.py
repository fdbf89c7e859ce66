"""Measured ways: estimates, files, machines, and ranks that must decide alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dense_forms import FORMS

import flux
from flux import _files
from flux import machine as machines
from flux.comm import registry
from flux.fp8.scales import Scaling
from flux.measured import files, machine
from flux.measured.machine import Machine
from flux.measured.times import Fact, Modelled, Tuning, choose
from flux.plan.choose import PlanInput, facts_key, model_of, planned, workspace_plan
from flux.testing import AgGemmCase, GemmRsCase, spawn

CPU = torch.device("cpu")
HOST = Machine("cpu")
H200 = Machine("sm_90", 132, 1980, 4916.7, 478.1)


def fact(m: int, n: int = 4096, k: int = 2048, **us: float) -> Fact:
    return Fact("gemm_ar", 2, 2, m, n, k, us, source="a.json")


FACTS = Tuning(
    (
        fact(16, kernel=10.0, parts=20.0),
        fact(64, kernel=40.0, parts=20.0, torch=80.0),
        fact(64, n=1024, kernel=1.0, parts=9.0),
    )
)


@pytest.mark.parametrize(
    ("m", "n", "k", "us", "words"),
    [
        (16, 4096, 2048, {"kernel": 10.0, "parts": 20.0}, "measured in a.json"),
        (32, 4096, 2048, {"kernel": 20.0, "parts": 20.0}, "between m = 16 and 64 of a.json"),
        # Twice the weight, but for 3 us that any call takes.
        (64, 8192, 2048, {"kernel": 77.0, "parts": 37.0, "torch": 157.0}, "like 1 similar weight, measured"),
        (15, 4096, 2048, {}, ""),
        (65, 4096, 2048, {}, ""),
        (64, 16384, 2048, {}, ""),
        (64, 8192, 4096, {}, ""),
    ],
)
def test_estimates(m: int, n: int, k: int, us: dict[str, float], words: str) -> None:
    found = FACTS.estimates("gemm_ar", 2, 2, m, n, k)
    assert {each.way: round(each.us, 6) for each in found} == us
    assert all(words in each.source for each in found)
    assert [each.us for each in found] == sorted(each.us for each in found)
    assert not FACTS.estimates("gemm_ar", 4, 2, m, n, k) and not FACTS.estimates("gemm_rs", 2, 2, m, n, k)


def test_the_cost_model_bends_estimates_of_the_fused_way() -> None:
    """It knows in which steps tiles fill SMs. Here: one time up to 16 rows, and four times that above."""

    def model(m: int, n: int, k: int) -> Modelled:
        return Modelled((1.0 if m <= 16 else 4.0) * n / 4096)

    def us(m: int, n: int) -> dict[str, float]:
        found = FACTS.estimates("gemm_ar", 2, 2, m, n, 2048, model)
        return {each.way: round(each.us, 6) for each in found}

    # 10 us at 16 rows and 40 at 64 are both what the model says: so are 40 at 32. Of parts it knows nothing.
    assert us(32, 4096) == {"kernel": 40.0, "parts": 20.0}
    assert us(16, 4096) == {"kernel": 10.0, "parts": 20.0}
    assert us(64, 8192) == {"kernel": 80.0, "parts": 37.0, "torch": 157.0}
    # A model without a time for a problem is none.
    none = FACTS.estimates("gemm_ar", 2, 2, 32, 4096, 2048, lambda m, n, k: Modelled(0.0))
    assert none == FACTS.estimates("gemm_ar", 2, 2, 32, 4096, 2048)


def test_other_rows_and_similar_weights_count_by_their_distance() -> None:
    # 16 and 64 rows are one doubling from 32, and so is the weight that was measured for 32: here 19 us.
    known = Tuning((*FACTS.facts, fact(32, n=8192, kernel=35.0)))
    found = {each.way: each for each in known.estimates("gemm_ar", 2, 2, 32, 4096, 2048)}
    assert found["kernel"].us == pytest.approx((20.0 * 19.0) ** 0.5) and found["parts"].us == pytest.approx(
        20.0
    )
    assert found["kernel"].source == "between m = 16 and 64 of a.json; 1 similar weight"
    # 30 rows are nearer to 32 than to 16 and 64 for both.
    nearer = Tuning((*FACTS.facts, fact(30, kernel=1.0), fact(32, n=8192, kernel=35.0)))
    (fused,) = (each for each in nearer.estimates("gemm_ar", 2, 2, 32, 4096, 2048) if each.way == "kernel")
    assert fused.us < found["kernel"].us
    # A measurement of the problem decides alone.
    (fused,) = known.estimates("gemm_ar", 2, 2, 32, 8192, 2048)
    assert (fused.us, fused.margin) == (pytest.approx(35.0), 0.02)
    # Errors of both kinds are independent.
    between = Tuning((fact(16, n=8192, kernel=10.0), fact(64, n=8192, kernel=40.0)))
    (fused,) = between.estimates("gemm_ar", 2, 2, 32, 4096, 2048)
    assert fused.margin == pytest.approx((0.04**2 + 0.05**2) ** 0.5)


@pytest.mark.parametrize(
    ("m", "times", "us"),
    [
        (300, {100: 10.0, 200: 18.0, 400: 60.0, 800: 100.0}, 50.0),  # the line through 400 and 800
        (300, {100: 10.0, 200: 18.0, 400: 63.0}, 48.0),  # 3 us, and a rate
        (300, {200: 18.0, 400: 60.0, 800: 60.0}, 60.0),
        (300, {200: 18.0, 400: 60.0, 800: 180.0}, 45.0),  # no less than its share
        (150, {100: 10.0, 200: 40.0, 400: 60.0}, 20.0),  # by SMs
    ],
)
def test_times_are_not_interpolated_between_carriers(m: int, times: dict[int, float], us: float) -> None:
    """SMs send up to 250 elements, copy engines more. Both continue with their own rates."""

    def model(m: int, n: int, k: int) -> Modelled:
        return Modelled(0.0, "SMs" if m <= 250 else "copy engines")

    facts = tuple(
        Fact("all_gather", 4, 2, m, 0, 0, {"kernel": us, "torch": 1.0 * m}) for m, us in times.items()
    )
    found = {each.way: each.us for each in Tuning(facts).estimates("all_gather", 4, 2, m, 0, 0, model)}
    low, high = max(each for each in times if each <= m), min(each for each in times if each >= m)
    assert found["torch"] == pytest.approx(m)
    if model(low, 0, 0) != model(high, 0, 0):
        assert found["kernel"] == pytest.approx(us)
    else:
        assert times[low] < found["kernel"] < times[high]


def test_a_product_that_was_measured_alone_bends_its_sum() -> None:
    product = {16: 8.0, 32: 16.0, 64: 16.0}
    alone = tuple(Fact("gemm", 1, 2, m, 4096, 2048, {"kernel": us}) for m, us in product.items())
    known = Tuning((fact(16, kernel=10.0, parts=15.0), fact(64, kernel=20.0, parts=20.0), *alone))
    for op, way in (("gemm_ar", "parts"), ("gemm_ar_norm", "parts")):
        facts_of_op = tuple(replace(each, op=op) if each.op == "gemm_ar" else each for each in known.facts)
        plan = planned(op, replace(gpu(), m=32, tuning=Tuning(facts_of_op)))
        told = {way: us for way, us, _ in plan.estimates}
        assert plan.way == way and told["kernel"] == pytest.approx(20.0), told
    without = planned("gemm_ar", replace(gpu(), m=32, tuning=Tuning(known.facts[:2])))
    assert without.way == "kernel" and {way: us for way, us, _ in without.estimates}["kernel"] < 15.0


def test_what_sends_a_gather_is_the_plans() -> None:
    problem = replace(gpu(), m=4, k=2**22, world_size=4)
    model = model_of("all_gather", problem)
    assert model is not None and model_of("ag_gemm", problem) is None
    small, large = model(2**22, 0, 0).carrier, model(2**27, 0, 0).carrier
    assert (small, "copy engines" in large) == ("links", True)


def test_a_way_must_gain_more_than_the_margin() -> None:
    def chosen(us: float, **change: Any) -> str:
        known = Tuning((replace(fact(16, kernel=100.0, parts=us), **change),))
        found = choose(known.estimates("gemm_ar", 2, 2, 16, 4096, 2048), "kernel", ("kernel", "parts"))
        return found[0].way if found else "kernel"

    assert [chosen(97.9), chosen(98.1)] == ["parts", "kernel"]
    assert [chosen(96.9, summed=("parts",)), chosen(97.1, summed=("parts",))] == ["parts", "kernel"]
    assert [chosen(89.0, noise=0.1), chosen(91.0, noise=0.1)] == ["parts", "kernel"]
    estimates = FACTS.estimates("gemm_ar", 2, 2, 64, 4096, 2048)
    assert choose(estimates, "kernel", ("kernel", "torch")) is None  # parts are not possible here
    assert choose(estimates, "composed", ("composed", "parts")) is None  # nothing is known of the default


def gpu(**change: Any) -> PlanInput:
    return PlanInput("cuda", 64, 4096, 2048, torch.bfloat16, False, 2, None, 132, "links", FACTS, **change)


def test_the_plan_takes_the_way_and_explains_it() -> None:
    sooner = replace(gpu(), tuning=Tuning((fact(64, kernel=20.0, parts=40.0, torch=80.0),)))
    plan = planned("gemm_ar", sooner)
    assert (plan.way, plan.by_flux) == ("kernel", True)
    text = str(plan)
    assert "runs       by kernel: 20.0 us, in parts 40.0 us (measured in a.json)" in text
    assert "  torch      80.0 us, measured in a.json" in text
    assert planned("gemm_ar", replace(gpu(), tuning=Tuning())).way == "parts"
    # Nothing changes a plan that cannot run fused, or that must be batch invariant.
    assert planned("gemm_ar", replace(sooner, why_not="no way")).reason == "no way"
    with flux.batch_invariant():
        assert planned("gemm_ar", sooner).way == "parts"
    # A plan is made of the problem alone: neither of time nor of a capture.
    with mock.patch("torch.cuda.is_current_stream_capturing", lambda: True):
        assert planned("gemm_ar", sooner) == plan


def test_what_was_measured_of_kernels_that_are_gone_does_not_count() -> None:
    of_fp8: dict[str, Any] = {"scaling": Scaling("row", torch.bfloat16, fast=False)}
    nothing: dict[str, Any] = {}
    for m, change in ((16, nothing), (512, nothing), (64, of_fp8)):
        scales = ", row scales" if change else ""
        facts = replace(fact(m, kernel=20.0, parts=40.0), op=f"gemm_ar{scales}", dtype=1 if scales else 2)
        problem = replace(gpu(), m=m, tuning=Tuning((facts,)), **change)
        problem = replace(problem, dtype=torch.float8_e4m3fn) if change else problem
        plan = planned("gemm_ar", problem)
        assert plan.way == "parts" and ("kernel", 20.0) in [each[:2] for each in plan.estimates]


def test_unfused_by_choice_is_unfused() -> None:
    known = Tuning((fact(64, parts=40.0, torch=20.0),))
    plan = planned("gemm_ar", replace(gpu(), tuning=known))
    assert (plan.way, plan.by_flux, plan.transport) == ("torch", False, "torch.distributed.all_reduce")
    assert plan.reason == "20.0 us, in parts 40.0 us (measured in a.json)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"sm_mhz": 1960.0, "memory_gb_per_s": 4800.0}, None),
        ({"link_gb_per_s": None}, None),
        ({"sms": 131}, "sms 132, not 131"),
        ({"memory_gb_per_s": 3352.0}, "memory_gb_per_s 4916.7, not 3352.0"),
        ({"link_gb_per_s": 212.5}, "link_gb_per_s 478.1, not 212.5"),
        ({"sm_mhz": 1785.0}, "sm_mhz 1980, not 1785.0"),
        ({"arch": "sm_100"}, "arch sm_90, not sm_100"),
    ],
)
def test_machines_differ_by_rates(change: dict[str, Any], words: str | None) -> None:
    assert H200.difference(replace(H200, **change)) == words


def test_each_shipped_file_is_for_such_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        clock_rate=1_980_000,
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
        uuid="1",
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    here = machine.of_device(torch.device("cuda", 0))
    assert here == Machine("sm_90", 132, 1980.0, 4916.7, None)
    # Results of bench tell it.
    properties.name = "a GPU"
    monkeypatch.setattr(machines, "smi", lambda: [])
    assert machine.of_result(machines.describe("cuda"), "a result") == here
    h200, h100 = (files._shipped(replace(here, memory_gb_per_s=rate)) for rate in (4916.7, 3352.0))
    assert len(h200.facts) > 400 and not any("another machine" in fact.source for fact in h200.facts)
    assert not files._shipped(replace(here, memory_gb_per_s=2000.0, link_gb_per_s=100.0)).facts
    # Four ranks were measured on an H200 only: an H100 follows it where a way gains enough.
    assert {fact.op for fact in h100.facts if fact.ranks == 2 and "another" not in fact.source} >= {"gemm_rs"}
    for m, n, k, way in ((512, 4096, 14336, "parts"), (4096, 4096, 14336, "kernel")):
        found = h100.estimates("gemm_rs", 4, 2, m, n, k // 4)
        assert found[0].way == way and found[0].margin >= 0.05 and "another machine" in found[0].source


def test_links_are_counted_by_the_drivers_library() -> None:
    class Library:
        nvmlInit_v2 = staticmethod(lambda: 0)
        nvmlDeviceGetHandleByUUID = staticmethod(lambda name, gpu: 0 if name == b"GPU-1" else 2)

        @staticmethod
        def nvmlDeviceGetNvLinkState(gpu: Any, link: int, up: Any) -> int:
            up._obj.value = link < 18
            return 0

        @staticmethod
        def nvmlDeviceGetNvLinkVersion(gpu: Any, link: int, version: Any) -> int:
            version._obj.value = 4
            return 0

    assert machine.link_gb_per_s("1", Library()) == 478.1
    assert machine.link_gb_per_s("2", Library()) is None
    assert machine.link_gb_per_s("1", object()) is None


def written(path: Path, *facts: Fact, here: Machine = HOST) -> Path:
    _files.replace(path, files.to_json(here, list(facts)))
    return path


def test_files_are_read_as_written(tmp_path: Path) -> None:
    facts = (
        replace(fact(1, kernel=1.0, parts=2.0), summed=("parts",), older=True, noise=0.5),
        fact(2, torch=3.0),
    )
    path = written(tmp_path / "a", *facts, here=H200)
    assert files.read(path) == (H200, facts)
    path.write_text(path.read_text().replace('"kernel"', '"fused"'))  # as before 0.2
    assert files.read(path) == (H200, facts)
    assert files.read(written(tmp_path / "b")) == (Machine("cpu"), ())


def with_files(rank: int, world_size: int, settings: list[str]) -> str:
    with mock.patch.dict("os.environ", {"FLUX_TUNING": settings[rank]}):
        try:
            flux.gemm_ar(torch.ones(2, 4), torch.ones(8, 4))
        except ValueError as error:
            told = str(error)
        else:
            told = registry.existing(dist.group.WORLD)[0].tuning.source
    # All ranks have refused, so the group remains usable.
    with mock.patch.dict("os.environ", {"FLUX_TUNING": "off"}):
        assert (flux.gemm_ar(torch.ones(2, 4), torch.ones(8, 4)) == 4 * world_size).all()
    return told


def test_ranks_with_different_files_are_refused(tmp_path: Path) -> None:
    one = str(written(tmp_path / "one.json", fact(1, kernel=1.0)))
    two = str(written(tmp_path / "two.json", fact(1, kernel=2.0)))
    other = str(written(tmp_path / "other.json", fact(1, kernel=1.0), here=H200))
    for settings, words in (
        ([one, two], ["the same measurements on all ranks", f"rank 0 {one}", f"rank 1 {two}"]),
        ([one, "auto"], ["the same measurements", f"rank 0 {one}", "rank 1 no measurements"]),
        (
            [one, other],
            ["the same measurements", f"rank 1 {other}, of another machine (arch sm_90, not cpu)"],
        ),
        ([one, str(tmp_path / "none")], [f"rank 1: FLUX_TUNING: tuning file {tmp_path}/none: No such file"]),
    ):
        for told in spawn(with_files, 2, settings, backend="gloo"):
            assert all(word in told for word in words), told
    assert spawn(with_files, 2, [one, one], backend="gloo") == [one, one]


OPS = {
    "gemm_rs": ("parts", "torch"),
    "ag_gemm": ("parts", "torch"),
    "gemm_ar": ("composed", "parts", "torch"),
}


def in_every_way(rank: int, world_size: int) -> list[str]:
    """Every way of every operator on integers that carry each rank's mark, with all options."""
    wrong = []
    flux.all_reduce(torch.ones(1))
    workspace = registry.existing(dist.group.WORLD)[0]
    for op, ways in OPS.items():
        kind: Any = AgGemmCase if op == "ag_gemm" else GemmRsCase
        case = kind(6 * world_size, 24, 16, world_size, torch.float32, bias=True)
        for way in ("kernel", *ways):
            workspace.tuning = Tuning(forced=way)
            workspace.plans.clear()
            forms = FORMS[op](case, rank)
            wrong += [f"{op} {way}: {what}" for what, got, want in forms if not torch.equal(got, want)]
            plan = workspace_plan(workspace, op, case.m, 24, 16, torch.float32, False)
            if op != "ag_gemm" and plan.way != way:
                wrong.append(f"{op} ran {plan.way}, not {way}")
    return wrong


def test_every_way_gives_the_result() -> None:
    assert spawn(in_every_way, 3, backend="gloo") == [[]] * 3


def test_a_norm_may_run_another_way_than_the_sum_alone() -> None:
    """Sums of 16 MiB with a norm took 131 us composed, where the norm is one more pass, and 111 in parts."""
    sizes = (2, 2, 2048, 4096, 2048)
    alone = Fact("gemm_ar", *sizes, {"kernel": 108.0, "composed": 100.0, "parts": 107.0, "torch": 150.0})
    normed = Fact(
        "gemm_ar_norm", *sizes, {"kernel": 120.0, "composed": 131.0, "parts": 111.0, "torch": 152.0}
    )

    def way(op: str, *facts: Fact) -> str:
        problem = PlanInput("cuda", 2048, 4096, 2048, torch.bfloat16, world_size=2, num_sms=132)
        return planned(op, replace(problem, tuning=Tuning(facts))).way

    assert [way(op, alone, normed) for op in ("gemm_ar", "gemm_ar_norm")] == ["composed", "parts"]
    assert way("gemm_ar_norm", alone) == "parts", "a norm behind what is composed was not measured"
    other = replace(alone, us={"parts": 105.0, "torch": 90.0})
    assert way("gemm_ar_norm", other) == "torch", "not measured with a norm: as without"
    assert way("gemm_ar", replace(other, op="gemm_ar_norm")) == "parts", (
        "a norm says nothing of the sum alone"
    )


def calls_with_facts(rank: int, world_size: int, file: str) -> list[str]:
    """The ways in which gemm_ar runs with and without a norm, which differ; both results are exact. A file
    that changes meanwhile changes no plan, also not of problems that are new.
    """
    with mock.patch.dict("os.environ", {"FLUX_TUNING": file, "FLUX_RECORD_SHAPES": f"{file}.shapes"}):
        ways = []
        for m in (16, 32):
            case = GemmRsCase(m, 8, 4, world_size, torch.float32)
            x, weight, _ = case.inputs(rank)
            total = case.expected_sum(CPU)
            assert torch.equal(flux.gemm_ar(x, weight), total)
            for _ in range(2):
                assert torch.equal(flux.gemm_ar(x, weight, norm_weight=torch.ones(8))[1], total)
            ways += [flux.explain("gemm_ar", m, 8, 4, torch.float32, norm=norm).way for norm in (False, True)]
            dist.barrier()
            if rank == 0:
                Path(file).write_text("{}")
            dist.barrier()
        plans = registry.existing(dist.group.WORLD)[0].plans.items()
        ran = [found.plan.way for key, found in plans if key[0] in ("gemm_ar", "gemm_ar_norm")]
        return [*ways, *ran]


def test_calls_with_a_norm_look_for_their_own_facts_and_plans_do_not_change(tmp_path: Path) -> None:
    facts = [
        Fact(op, 2, 4, m, 8, 4, {"kernel": kernel, "parts": 11.0 - kernel})
        for m in (16, 32)
        for op, kernel in (("gemm_ar", 2.0), ("gemm_ar_norm", 9.0))
    ]
    file = str(written(tmp_path / "a", *facts))
    assert spawn(calls_with_facts, 2, file, backend="gloo") == [["kernel", "parts"] * 4] * 2
    told = [json.loads(line) for line in Path(f"{file}.shapes").read_text().splitlines()]
    shapes = [each for each in told if each["op"].startswith("gemm")]
    assert [(each["op"], each["m"]) for each in shapes] == [(fact.op, fact.m) for fact in facts]
    assert shapes[0] == {
        **{"op": "gemm_ar", "dtype": "float32", "m": 16, "n": 8, "k": 4},
        **{"world_size": 2, "transpose_weight": False},
    }


def test_sums_are_known_by_their_elements() -> None:
    problem = PlanInput("cuda", 4, 512, 64, torch.float16, world_size=2)
    assert facts_key("all_reduce", problem) == ("all_reduce", 2, 2, 2048, 0, 0)
    assert facts_key("all_gather", problem) == ("all_gather", 2, 2, 256, 0, 0)
    assert facts_key("gemm", problem) == ("gemm", 2, 2, 4, 512, 64)
