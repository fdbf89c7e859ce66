"""The kernels of csrc on the simulated machine: seeded cases, exact integers (docs/testing-kernels.md)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import mutants
import pytest
import simulator
from effort import some

# Policies repeat every 18 seeds: then each combination of the adversary's choices sees some shapes.
CASES = some(18)
# Of small problems that take milliseconds.
MANY = dict.fromkeys(("gemm", "fp8_gemm"), 3 * CASES)
KINDS = [
    (program.name, case, 1, MANY.get(program.name, CASES))
    for program in simulator.PROGRAMS.values()
    for case in program.cases
]
Runs = dict[tuple[str, int], Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The runs of all selected cases, side by side: each keeps one core busy."""
    reason = simulator.why_not()
    if reason is not None:
        pytest.skip(reason)
    # Only tests of kinds have a callspec.
    specs = [vars(item).get("callspec") for item in request.session.items if item.path == request.path]
    wanted = [tuple(spec.params.values()) for spec in specs if spec is not None]
    binaries = {program: simulator.build(program) for program in dict.fromkeys(name for name, *_ in wanted)}
    with ThreadPoolExecutor(simulator.JOBS) as pool:
        yield {
            (case, seed): pool.submit(simulator.run, binaries[program], case, seed, count)
            for program, case, seed, count in wanted
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("program", "case", "seed", "count"), KINDS)
def test_kernels_are_exact_on_the_host(program: str, case: str, seed: int, count: int, runs: Runs) -> None:
    done = runs[case, seed].result()
    assert done.returncode == 0, done.stderr
    assert f"{count} cases exact" in done.stdout


def test_every_mutant_fits_the_sources() -> None:
    table = mutants.table()
    assert len({mutant.name for mutant in table}) == len(table)
    for mutant in table:
        source = (simulator.ROOT / "csrc" / mutant.file).read_text()
        assert source.count(mutant.old) == 1, f"{mutant.name} in {mutant.file}"
