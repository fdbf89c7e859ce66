"""Writes docs/results.md, and the table of results in README.md, from the files in benchmarks/results.

python benchmarks/make_results.py            # or `make results`
python benchmarks/make_results.py --check    # exit status 1 if one of them is not what it would write
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kernel_sources import History
from measurements import Judge, Marker, read
from results_page import block, page

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def written(root: Path, results: Path, judge: Judge) -> dict[Path, str]:
    """What the files with results in them should contain."""
    measurements, others = read(results, judge)
    readme = root / "README.md"
    before, found, rest = readme.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"README.md: expected {BEGIN} and {END}")
    return {
        root / "docs" / "results.md": page(measurements, others, root / "docs" / "figures"),
        readme: f"{before}{BEGIN}\n{block(measurements)}{END}{after}",
    }


def stale(root: Path, results: Path, judge: Judge) -> list[str]:
    """Which of these files are not current, and their first line that differs."""
    found = []
    for path, text in written(root, results, judge).items():
        is_text = path.read_text() if path.exists() else ""
        if is_text == text:
            continue
        have, want = is_text.splitlines(), text.splitlines()
        at = next(
            (i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want))
        )
        expected = want[at] if at < len(want) else "nothing"
        found.append(f"{path.relative_to(root)} is not current: line {at + 1} should be {expected!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if not current")
    check = parser.parse_args().check
    existing = ROOT / "docs" / "results.md"
    history = History(ROOT)
    judge = Marker(history, existing.read_text() if existing.exists() else "")
    try:
        if check:
            lines = stale(ROOT, ROOT / "benchmarks" / "results", judge)
            print("\n".join([*lines, "run `make results`"]) if lines else "results are current")
            return 1 if lines else 0
        for path, text in written(ROOT, ROOT / "benchmarks" / "results", judge).items():
            path.write_text(text)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        history.close()
    if judge.unchecked:
        print(f"{len(set(judge.unchecked))} files keep their marks: the history here lacks their commits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
