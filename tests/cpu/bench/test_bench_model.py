"""The arithmetic behind the tables: derived columns, footers, suites."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
from bench_rows import row as made_row

from flux.bench import suites
from flux.bench.cases import OPS
from flux.bench.model import Bar, derive, e_overlap, geomean, summarise, wire_bytes
from flux.bench.suites import Problem

# docs/benchmarks.md: model -> (N, K) of the all-gather GEMM, (N, K) of the GEMM reduce-scatter; global sizes.
DEFAULT = {
    "gpt3-175b-mlp": ((49152, 12288), (12288, 49152)),
    "llama3-70b-mlp": ((57344, 8192), (8192, 28672)),
    "llama3-70b-attn": ((10240, 8192), (8192, 8192)),
    "llama3-8b-mlp": ((28672, 4096), (4096, 14336)),
}


row = partial(made_row, spread=9)  # no mean
FULL = {
    "flux": ("flux", 1.2),
    "cuBLAS": ("gemm", 1.0),
    "flux.gemm": ("gemm", 0.9),
    "NCCL": ("comm", 0.5),
    "cuBLAS+NCCL": ("serial", 1.5),
    "async-TP": ("peer", 1.44),
}


def test_default_suite_is_the_documented_one() -> None:
    suite = suites.load("default")
    assert suite.m == (512, 1024, 2048, 4096, 8192)
    assert suite.dtype == "bfloat16"
    assert {m.name: (m.shapes["ag_gemm"], m.shapes["gemm_rs"]) for m in suite.models} == DEFAULT
    assert len(suite.problems("gemm_rs", OPS["gemm_rs"].patterns)) == 20
    assert len(suite.problems("ag_gemm", OPS["ag_gemm"].patterns)) == 20
    gemm = suite.problems("gemm", OPS["gemm"].patterns)
    assert len(gemm) == 40
    local = {p.local(4) for p in gemm if p.model == "llama3-70b-attn" and p.m == 512}
    assert local == {(512, 8192, 2048), (512, 2560, 8192)}


@pytest.mark.parametrize("name", suites.available())
def test_every_suite_loads_and_divides(name: str) -> None:
    suite = suites.load(name)
    assert suite.name == name
    for spec_name, spec in OPS.items():
        for problem in suite.problems(spec_name, spec.patterns):
            for tp in (2, 4, 8):
                m, n, k = problem.local(tp)
                assert n % 8 == 0 and k % 8 == 0
                assert m % tp == 0 or not (spec.collective and spec.deals_rows)


def test_select_narrows_and_names_what_there_is() -> None:
    suite = suites.load("default").select(["llama3-8b-mlp"], [16, 32])
    assert [(p.model, p.m) for p in suite.problems("gemm_rs", ("gemm_rs",))] == [
        ("llama3-8b-mlp", 16),
        ("llama3-8b-mlp", 32),
    ]
    with pytest.raises(ValueError, match="expected to be one of gpt3-175b-mlp.*got 'bert'"):
        suites.load("default").select(["bert"])
    with pytest.raises(ValueError, match="one of cpu, decode, default, served or a .toml file, got 'tiny'"):
        suites.load("tiny")


_SUITE = "[suite]\nname='a'\ndtype='float16'\nm=[1]\n[[model]]\nname='x'\ngemm_rs={n=1,k=1}\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("m=[1]", "", "suite: suite: expected a field 'm'"),
        ("[[model]]", "[[other]]", "suite: expected a field 'model'|no field but suite, model"),
        (",k=1", "", "model\\[0\\].gemm_rs: expected a field 'k'"),
        ("name='x'", "", "model\\[0\\]: expected a field 'name'"),
        ("'float16'", "'b'", "suite.dtype: expected 'bfloat16' or 'float16' or 'float32', got 'b'"),
        ("[1]", "[0]", "suite.m\\[0\\]: expected a number from 1 .* got 0"),
        ("[1]", "[]", "suite.m: expected a number of entries from 1 .* got 0"),
        ("[1]", "'1'", "suite.m: expected a list, got '1'"),
        ("m=", "rows=", "suite: expected no field but name, dtype, m, description, got 'rows'|a field 'm'"),
        ("gemm_rs", "gemm_r", "model\\[0\\]: expected no field but name, ag_gemm, .*gemm_r"),
        ("n=1", "n=-1", "model\\[0\\].gemm_rs.n: expected a number from 1 .* got -1"),
        ("n=1", "n=true", "model\\[0\\].gemm_rs.n: expected a whole number, got True"),
        ("[suite]\n", "suite = 3\n[x]\n", "suite: expected"),
    ],
)
def test_bad_suites_are_refused(old: str, new: str, message: str) -> None:
    suites.parse(_SUITE)
    with pytest.raises(ValueError, match=message):
        suites.parse(_SUITE.replace(old, new))


def test_local_shapes_refuse_what_does_not_divide() -> None:
    assert Problem("gemm", "a", "local", 8, 9, 10).local(4) == (8, 9, 10)
    with pytest.raises(ValueError, match="k must be divisible by the 4 ranks, got k=10"):
        Problem("gemm_rs", "a", "gemm_rs", 8, 9, 10).local(4)


def test_wire_bytes() -> None:
    # 4 ranks: 3 of 4 shards of the partial [M, N] leave; the own shard [M/4, K] goes to 3 peers.
    assert wire_bytes("gemm_rs", 8, 6, 100, 4, 2) == 3 * 2 * 6 * 2
    assert wire_bytes("ag_gemm", 8, 6, 100, 4, 2) == 3 * 2 * 100 * 2
    assert wire_bytes("gemm_rs", 8, 6, 100, 1, 2) == 0
    assert wire_bytes("gemm_ar", 8, 6, 100, 4, 2) == 2 * 3 * 2 * 6 * 2
    assert wire_bytes("all_reduce", 8, 6, 100, 2, 2) == 8 * 6 * 2
    assert wire_bytes("local", 8, 6, 100, 4, 2) == 0
    with pytest.raises(ValueError, match="pattern"):
        wire_bytes("gather", 8, 6, 100, 4, 2)


def test_e_overlap() -> None:
    assert e_overlap(1.0, 1.0, 1.5) == 1.0
    assert e_overlap(1.5, 1.0, 1.5) == 0.0
    assert e_overlap(2.0, 1.0, 1.5) == -1.0
    assert e_overlap(1.0, 1.5, 1.5) is None


def test_derived_columns() -> None:
    d = derive(row(FULL, wire_bytes=100), 380.0)
    assert (d.flux, d.gemm, d.comm, d.serial) == (1.2, 0.9, 0.5, 1.5)
    assert (d.peer, d.peer_name) == (1.44, "async-TP")
    assert d.speedup == pytest.approx(1.2)
    assert d.e_overlap == pytest.approx(0.5)
    assert d.floor == 0.9
    assert d.over_floor == pytest.approx(4 / 3)
    assert d.tflops == pytest.approx(2 * 512 * 64 * 64 / 1.2e-3 / 1e12)
    bound_by_link = derive(row(FULL, wire_bytes=760_000_000), 380.0)
    assert bound_by_link.floor == pytest.approx(2.0)
    assert derive(row(FULL), with_floor=False).floor is None, "without links of GPUs"
    slower = derive(row({**FULL, "async-TP": ("peer", 1.6)}))
    assert slower.peer_name == "cuBLAS+NCCL", "serial counts as a peer"
    d = derive(row({"cuBLAS": ("peer", 1.0)}))
    missing = (d.flux, d.speedup, d.floor, d.e_overlap, d.over_floor)
    assert missing == (None,) * 5, "without flux"


def test_summary_counts_rows_under_the_bar() -> None:
    bar = Bar(row=0.98, geomean=1.15, geomean_tp=4, over_floor=1.15)
    good = row({**FULL, "flux": ("flux", 1.0)})
    slow = row({**FULL, "flux": ("flux", 1.6)})
    wrong = row({k: v for k, v in FULL.items() if k != "flux"}, check="3 of 9 wrong")
    rows = [good, slow, wrong]
    s = summarise(rows, [derive(r) for r in rows], bar)
    assert (s.rows, s.wrong, s.under_row_bar) == (3, 1, 1)
    assert s.min_speedup == pytest.approx(0.9)
    assert s.geomean_speedup == pytest.approx(math.sqrt(1.44 * 0.9))
    with pytest.raises(ValueError):
        geomean([])
    assert (s.over_floor_bar, s.floor_bar_rows) == (1, 2)
    assert s.geomean_bar_met is False
    assert not s.meets_bar
    two = row(FULL, tp=2)
    assert summarise([two], [derive(two)], bar).geomean_bar_met is None, "the bar is for 4"
    assert summarise([good], [derive(good)], bar).meets_bar


def test_short_rows_are_not_held_to_the_floor() -> None:
    bar = Bar(row=0.98, over_floor=1.15, floor_from_ms=0.15)
    short = row(
        {"flux": ("flux", 0.1), "cuBLAS": ("gemm", 0.05), "NCCL": ("comm", 0.05), "s": ("serial", 0.2)}
    )
    s = summarise([short], [derive(short)], bar)
    assert (s.floor_bar_rows, s.over_floor_bar, s.meets_bar) == (0, 0, True)


def test_host_and_time_of_a_call_have_bars() -> None:
    fast = row(FULL)
    fast.host_us = {"flux": 24.0, "NCCL": 90.0}
    late = row(FULL)
    late.host_us = {"flux": 26.0}
    both = [derive(fast), derive(late)]
    assert summarise([fast], both[:1], Bar(row=0.5)).meets_bar
    s = summarise([fast, late], both, Bar(row=0.5))
    assert (s.over_host_bar, s.meets_bar) == (1, False)
    assert summarise([fast, late], both, Bar(row=0.5, host_us=None)).meets_bar
    us = 1e3 * row(FULL).times["flux"].median
    s = summarise([fast], both[:1], Bar(row=0.5, us=us - 1))
    assert (s.over_time_bar, s.meets_bar) == (1, False)
    assert summarise([fast], both[:1], Bar(row=0.5, us=us)).meets_bar


def test_a_suite_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[suite]\nname = 'mine'\ndtype = 'float16'\nm = [8]\n"
        "[[model]]\nname = 'a'\ngemm_rs = { n = 16, k = 24 }\n"
    )
    suite = suites.load(str(file))
    assert suite.problems("gemm_rs", ("gemm_rs",)) == [Problem("gemm_rs", "a", "gemm_rs", 8, 16, 24)]
    assert suite.problems("gemm", ("ag_gemm",)) == []
    with pytest.raises(ValueError, match="suite file not found"):
        suites.load(str(tmp_path / "other.toml"))
