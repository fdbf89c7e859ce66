"""The kernels of csrc on the simulated machine: seeded cases, exact integers (docs/testing-kernels.md)."""

from __future__ import annotations

import mutants
import pytest
import simulator

# Policies repeat every 18 seeds: each combination of the adversary's choices sees some shapes.
CASES = 36


@pytest.mark.parametrize(
    ("program", "case"),
    [(program.name, case) for program in simulator.PROGRAMS.values() for case in program.cases],
)
def test_kernels_are_exact_on_the_host(program: str, case: str) -> None:
    reason = simulator.why_not()
    if reason is not None:
        pytest.skip(reason)
    done = simulator.run(simulator.build(program), case, seed=1, cases=CASES)
    assert done.returncode == 0, done.stderr
    assert f"{CASES} cases exact" in done.stdout


def test_every_mutant_fits_the_sources() -> None:
    table = mutants.table()
    assert len({mutant.name for mutant in table}) == len(table)
    for mutant in table:
        source = (simulator.ROOT / "csrc" / mutant.file).read_text()
        assert source.count(mutant.old) == 1, f"{mutant.name} in {mutant.file}"
