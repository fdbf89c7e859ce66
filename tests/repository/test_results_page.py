"""Pages of results and README.md's numbers are what benchmarks/make_results.py writes; it notices changes."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flux.fp8.scales import Scaling
from flux.measured import files
from flux.measured.times import NO_FACTS, Fact, Tuning, scaled
from flux.plan.choose import PLANNERS, PlanInput, model_of, planned
from flux.plan.moe import choose_parts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.json"))
PAGES = ROOT / "docs" / "results"
MODULES = ("kernel_sources", "measurements", "results_text", "results_page", "make_results")


class Tools:
    """The modules in benchmarks, and the history of this repository."""

    def __init__(self) -> None:
        self.sources, self.measurements, _, self.page, self.make = map(importlib.import_module, MODULES)
        self.history = self.sources.History(ROOT)
        self.judge = self.measurements.judging(self.history)

    def written(self, results: Path = RESULTS) -> dict[Path, str]:
        found: dict[Path, str] = self.make.written(ROOT, results, self.judge)
        return found

    def stale(self, results: Path = RESULTS) -> list[Path]:
        return [path for path, text in self.written(results).items() if path.read_text() != text]


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        found = Tools()
        if found.history.contains("HEAD", found.sources.EQUAL_RESTS) is None:
            pytest.skip("needs the history of this repository: whether kernels changed since is not known")
        yield found


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A folder with the results, links that a test may replace."""
    for file in FILES:
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def rewrite(folder: Path, name: str, data: Any) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(json.dumps(data))


def test_results_are_current(tools: Tools) -> None:
    assert tools.stale() == [], "run `make results`"


def test_the_newest_row_counts(tools: Tools) -> None:
    """Also where an older one is faster."""
    groups, _ = tools.measurements.read(RESULTS, tools.judge)
    group = next(each for each in groups if (each.op, each.where) == ("gemm_ar_norm", "2× H200"))
    assert group.is_full and len({found.source.name for found in group.rows}) == 2
    newest = max(found.source.date for found in group.rows)
    row = next(found.row for found in group.rows if found.source.date == newest)
    files = [file for file in FILES if "gemm_ar_norm" in file.name or "decode-8b" in file.name]
    older = [each for file in files for each in json.loads(file.read_text())["rows"]]
    same = [each for each in older if (each["op"], each["model"], each["m"]) == (row.op, row.model, row.m)]
    assert len(same) > 1


def test_rows_that_starve_experts_are_withdrawn(tools: Tools) -> None:
    groups, _ = tools.measurements.read(RESULTS, tools.judge)
    of_layers = [group for group in groups if group.op.startswith("moe_layer")]
    assert sum(group.withdrawn for group in of_layers) > 0
    assert not [found for group in groups for found in group.rows if tools.measurements.starves(found.row)]
    assert "Withdrawn: " in (PAGES / "moe.md").read_text()


def test_a_baseline_is_without_flux(tools: Tools) -> None:
    groups, _ = tools.measurements.read(RESULTS, tools.judge)
    names = {found.derived.peer_name for group in groups for found in group.rows}
    assert "vLLM CUTLASS" in names and not [name for name in names if name and "flux" in name]


def test_a_changed_number_and_a_missing_file(tools: Tools, copies: Path) -> None:
    name = next(file.name for file in FILES if "layer-70b" in file.name)
    data = json.loads((copies / name).read_text())
    data["rows"][0]["times"]["flux"]["samples_ms"] = [1.0] * 7
    rewrite(copies, name, data)
    assert tools.stale(copies) == [ROOT / "docs" / "results.md", PAGES / "megatron.md"]
    (copies / name).unlink()
    assert tools.stale(copies)


def test_a_stale_number_of_the_readme(tools: Tools, copies: Path) -> None:
    name = next(file.name for file in FILES if "70b-40-layers-tp4-4xH200-0ed04ed" in file.name)
    data = json.loads((copies / name).read_text())
    data["runs"]["flux-graph"]["samples_s"]["prefill"] = [0.5] * 4
    rewrite(copies, name, data)
    assert ROOT / "README.md" in tools.stale(copies)


def test_a_new_file(tools: Tools, copies: Path) -> None:
    old = FILES[-1]
    data = json.loads(old.read_text()) | {"date": "2027-01-01T00:00:00+00:00"}
    rewrite(copies, "2027-01-01-new.json", data)
    marks = tools.measurements.Marks("same", True)
    written = tools.make.written(ROOT, copies, lambda *_: marks)
    assert any("/2027-01-01-new.json)" in page for page in written.values())


@pytest.mark.parametrize("data", [{"what": "tuning"}, [1], {}])
def test_a_file_of_another_kind(tools: Tools, copies: Path, data: Any) -> None:
    rewrite(copies, "2027-01-01-other.json", data)
    with pytest.raises(ValueError, match="2027-01-01-other.json: no result"):
        tools.stale(copies)


def test_an_unknown_operator(tools: Tools, copies: Path) -> None:
    data = json.loads(next(file for file in FILES if "gemm_rs-tp4" in file.name).read_text())
    for row in data["rows"]:
        row["op"] = "new_op"
    rewrite(copies, "2027-01-01-new.json", data)
    with pytest.raises(ValueError, match="which kernels new_op(_fp8)? has"):
        tools.stale(copies)


def test_a_file_whose_commit_is_nowhere(tools: Tools, copies: Path) -> None:
    rewrite(copies, "2027-01-01-new.json", json.loads(FILES[-1].read_text()) | {"commit": "f" * 40})
    with pytest.raises(ValueError, match="is not in this history"):
        tools.stale(copies)


def test_a_kernel_that_changed(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.history, "changed", lambda op, _: 0.99)
    assert PAGES / "gemm_rs.md" in tools.stale()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A kernel with headers, committed."""
    sources = {
        "gemm_rs/gemm_rs.cu": '#include "gemm_rs/store.cuh"\n#include "gemm/select.h"\nvoid k() {}\n',
        "gemm_rs/store.cuh": '#include "gemm_rs/plan.h"\nint store();  // stores\n',
        "gemm_rs/plan.h": "int plan();\n",
        "gemm/select.h": "int select();\n",
        "moe/routing.cu": "int route();\n",
    }
    for name, text in sources.items():
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "kernel")
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "text", "changes"),
    [
        ("gemm_rs/store.cuh", '#include "gemm_rs/plan.h"\n\n/* other */ int store( );\n', False),
        ("gemm_rs/store.cuh", '#include "gemm_rs/plan.h"\nint store(int);\n', True),
        ("gemm_rs/store.cuh", "int store();\n", True),  # one header less
        ("gemm_rs/plan.h", "int plan(int);\n", True),
        ("gemm/select.h", "int select(int);\n", False),  # of the host
        ("moe/routing.cu", "int route(int);\n", False),  # of another operator
    ],
)
def test_what_changes_a_kernel(tools: Tools, repository: Path, name: str, text: str, changes: bool) -> None:
    (repository / "csrc" / name).write_text(text)
    history = tools.sources.History(repository)
    assert (history.changed("gemm_rs", "HEAD") > 0) == changes
    assert history.contains("HEAD", "HEAD") and history.contains("HEAD", "0" * 40) is None
    assert history.has("HEAD") and not history.has("0" * 40)


def test_moved_lines_are_no_change(tools: Tools) -> None:
    then = {"a.cuh": ("namespaceflux{", "inta;", "intb;", "}")}
    moved = {"a.cuh": ("namespaceflux{", "inta;", "}"), "b.cuh": ("#pragmaonce", "namespaceb{", "intb;", "}")}
    assert tools.sources.share_changed(then, moved) == 0
    host = {"c.h": ("intc;",)}
    joined = {"a.cuh": (*then["a.cuh"], "intc;")}
    assert tools.sources.share_changed(then, joined) > 0
    assert tools.sources.share_changed(then, joined, {**then, **host}, joined) == 0
    assert tools.sources.share_changed(then, joined, {**then, **host}, {**joined, **host}) > 0
    assert tools.sources.share_changed(moved, {"a.cuh": ("inta;",)}) > 0


def test_every_operator_of_a_source_table_exists(tools: Tools) -> None:
    """A renamed kernel would be an older one for ever."""
    for sources in tools.sources.SOURCES.values():
        assert all((ROOT / "csrc" / source).is_file() for source in sources)


def test_speeds_show_their_side_of_one(tools: Tools) -> None:
    shown = {None: "–", 0.984: "**0.98**", 0.9996: "**1.000**", 1.0: "1.000", 1.004: "1.004", 1.2: "1.20"}
    assert {value: tools.page.speed(value) for value in shown} == shown


def test_what_requests_waited_for_is_the_median_of_samples(tools: Tools) -> None:
    def sample(first: float, rate: float) -> dict[str, Any]:
        waited = {"first_s": {"median": first, "p99": 2 * first}, "further_s": {"median": 0.004, "p99": 0.01}}
        return {"seconds": 1.0, "tokens_per_s": rate, **waited}

    runs = {
        "stock-graph": {"traces": {"at once": [sample(9, 9)], "40 per s": [sample(0.03, 900)]}},
        "flux-graph": {"traces": {"40 per s": [sample(0.01, 2000), sample(0.03, 1000), sample(0.02, 1500)]}},
        "late-graph": {},
    }
    (found,) = tools.page.arrivals(runs)
    assert found.splitlines()[2:] == [
        "| 40 per s | stock-graph | 30.0 | 60.0 | 4.0 | 10.0 | 900 | 1, 0 % |",
        "| 40 per s | flux-graph | 20.0 | 40.0 | 4.0 | 10.0 | 1,500 | 3, 200 % |",
    ]
    assert tools.page.arrivals({"stock-graph": {"traces": {"at once": [sample(9, 9)]}}}) == []


def test_raw_measurements_have_one_head() -> None:
    head = {"schema", "what", "commit", "date", "gpu", "packages", "about", "rows"}
    tuned = {"schema", "what", "flux", "commit", "date", "settings", "machine", "sources", "rows"}
    found = sorted((RESULTS / "tuning").glob("*.json"))
    assert len(found) > 40
    for file in found:
        data = json.loads(file.read_text())
        assert data.keys() == (tuned if "-tune-" in file.name else head) and data["rows"], file.name
        assert len(file.read_text().splitlines()) >= len(data["rows"]), file.name


# The plan against all stored measurements: how much slower it is than the fastest way that was measured.
FILE = files.SHIPPED / "sm90-132-4.9TBs.json"  # of the machine with most measurements


# The bar: of the geometric mean, and of the worst row.
MEAN, WORST = 1.02, 1.10
_DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class Held:
    """One measurement against the plan."""

    fact: Fact
    way: str

    @property
    def best(self) -> str:
        return min(self.fact.us, key=lambda way: self.fact.us[way])

    @property
    def regret(self) -> float:
        return self.fact.us[self.way] / self.fact.us[self.best]


def chosen(fact: Fact, tuning: Tuning) -> str:
    """The way that the plan takes on four or two H200s that have these measurements."""
    if fact.op.startswith("moe"):
        where = (fact.op, fact.ranks, fact.dtype, fact.m, fact.n, fact.k)
        return "parts" if choose_parts(tuning, *where) else "kernel"
    op, _ = _operands(fact)
    return planned(op, problem_of(fact, tuning)).way if op in PLANNERS else "kernel"


def _operands(fact: Fact) -> tuple[str, Scaling | None]:
    """The operator, and how its operands are scaled."""
    for kind in ("tensor", "row", "block"):
        op = fact.op.removesuffix(scaled("", kind))
        if op != fact.op:
            return op, Scaling(kind, torch.bfloat16, fast=False)
    return fact.op, None


def problem_of(fact: Fact, tuning: Tuning) -> PlanInput:
    """What a planner of an H200 with these measurements is asked."""
    m, n, k = fact.m, fact.n, fact.k
    if fact.op == "all_gather":
        m, k = fact.ranks, fact.m // fact.ranks
    elif not n:
        m, n = 1, fact.m
    _, scaling = _operands(fact)
    return PlanInput("cuda", m, n, k, _DTYPES[fact.dtype], False, fact.ranks, None, 132, "", tuning, scaling)


def hold(facts: Iterable[Fact], tuning_for: Callable[[Fact], Tuning]) -> list[Held]:
    """Facts with more than one way, of which the plan's was measured."""
    held = (Held(fact, chosen(fact, tuning_for(fact))) for fact in facts if len(fact.us) > 1)
    return [each for each in held if each.way in each.fact.us]


def without_weight(facts: Sequence[Fact]) -> Callable[[Fact], Tuning]:
    """What remains without all measurements of a fact's weight: the plan must interpolate."""
    return lambda left: Tuning(tuple(fact for fact in facts if fact.weight != left.weight))


def without_rows(facts: Sequence[Fact]) -> Callable[[Fact], Tuning]:
    """What remains without this number of rows of its weight."""
    return lambda left: Tuning(tuple(fact for fact in facts if fact.problem != left.problem))


def errors(facts: Sequence[Fact], tuning_for: Callable[[Fact], Tuning]) -> list[float]:
    """By how much the estimated ratio of two ways is off, as a factor of 1 or more."""
    found = []
    for fact in facts:
        tuning = tuning_for(fact)
        model = model_of(_operands(fact)[0], problem_of(fact, tuning))
        us = {each.way: each.us for each in tuning.estimates(*fact.problem, model) if each.way in fact.us}
        first, *others = us or [""]
        for way in others:
            off = math.log((us[way] / us[first]) / (fact.us[way] / fact.us[first]))
            found.append(math.exp(abs(off)))
    return found


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0


@pytest.fixture(scope="module")
def facts() -> tuple[Fact, ...]:
    return files.read(FILE)[1]


def test_the_shipped_files_are_made_of_the_stored_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    texts = importlib.import_module("tuning_facts").texts()
    assert sorted(texts) == sorted(path.name for path in files.SHIPPED.glob("*.json"))
    for name, text in texts.items():
        written, made = json.loads((files.SHIPPED / name).read_text()), json.loads(text)
        for data in (written, made):
            for row in data["rows"]:
                row.pop("older", None)  # differs where a kernel has changed since the file was made
        assert written == made, f"{name}: run benchmarks/tuning_facts.py"


def test_the_plan_is_near_the_fastest_way_that_was_measured(facts: tuple[Fact, ...]) -> None:
    shipped = Tuning(facts)
    held = hold(facts, lambda fact: shipped)
    assert len(held) > 400
    regrets = [each.regret for each in held]
    assert geomean(regrets) <= MEAN and max(regrets) <= WORST
    # Without measurements it is not: the test can fail.
    assert max(each.regret for each in hold(facts, lambda fact: NO_FACTS)) > WORST


# What nothing near it tells by 10 %, and why: docs/design/plan.md, "What neighbours do not tell".
UNTOLD = {("gemm", 128, 6144, 4096)}
FP8_BYTES = 1


@pytest.mark.parametrize("leave_out", [without_rows, without_weight])
def test_interpolation_does_no_harm(
    facts: tuple[Fact, ...], leave_out: Callable[..., Callable[[Fact], Tuning]]
) -> None:
    """Left out, a row is chosen within the bar by what is near it, but for UNTOLD. The bar of torch's fp8
    products is wider.
    """
    tuning_for = leave_out(facts)
    some = [fact for fact in facts if tuning_for(fact).estimates(*fact.problem)]
    held, usual = hold(some, tuning_for), hold(some, lambda fact: NO_FACTS)
    assert len(held) > 100
    means = [
        geomean([each.regret for each in these if each.fact.dtype != FP8_BYTES]) for these in (held, usual)
    ]
    assert means[0] <= 1.0095 < 1.016 < means[1]
    torchs = [each for each in held if each.fact.op == scaled("gemm", "tensor")]
    assert geomean([each.regret for each in torchs]) <= 1.035
    assert max(each.regret for each in torchs) < 1.26
    others = [each for each in held if each not in torchs]
    over = {(row.op, row.m, row.n, row.k) for row in (each.fact for each in others if each.regret > WORST)}
    assert over == UNTOLD and max(each.regret for each in others) < 1.105
    without = {each.fact.problem: each.regret for each in usual}
    harm = [each.regret / without[each.fact.problem] for each in held if each.fact.problem in without]
    assert max(harm) <= 1.05 and sum(each > 1 for each in harm) <= 4
    assert geomean(errors(some, tuning_for)) < 1.05


def test_no_row_of_moe_gemm_ar_and_ag_gemm_is_slower_than_unfused(facts: tuple[Fact, ...]) -> None:
    """By more than the noise: that of the samples, and what two measurements of one way differ by."""
    shipped = Tuning(facts)
    for each in hold(facts, lambda fact: shipped):
        unfused = min(each.fact.us.get(way, 1e9) for way in ("parts", "torch"))
        if each.fact.op.split(".")[0] in ("moe", "gemm_ar", "ag_gemm"):
            assert each.fact.us[each.way] <= unfused * (1.04 + each.fact.noise), each


def test_a_wrong_choice_is_seen() -> None:
    fact = Fact("gemm_ar", 2, 2, 16, 4096, 2048, {"parts": 10.0, "torch": 5.0})
    (held,) = hold([fact], lambda _: NO_FACTS)
    assert (held.way, held.best, held.regret) == ("parts", "torch", 2.0)
    (held,) = hold([fact], lambda _: Tuning((fact,)))
    assert (held.way, held.regret) == ("torch", 1.0)
    slower = replace(fact, us={"parts": 10.0, "torch": 9.9})
    assert chosen(slower, Tuning((slower,))) == "parts"  # within the margin
