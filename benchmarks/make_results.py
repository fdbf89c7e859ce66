"""Writes docs/results.md, and the table of results in README.md, from the files in benchmarks/results."""

from __future__ import annotations

from pathlib import Path

from kernel_sources import History
from measurements import Judge, judging, read
from results_page import block, page

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def written(root: Path, results: Path, judge: Judge) -> dict[Path, str]:
    """What the files with results in them should contain. Raises ValueError if a result is not understood."""
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


if __name__ == "__main__":
    for path, text in written(ROOT, ROOT / "benchmarks" / "results", judging(History(ROOT))).items():
        path.write_text(text)
