"""Writes docs/results.md, docs/results and the numbers in README.md from the files in benchmarks/results."""

from __future__ import annotations

from pathlib import Path

from kernel_sources import History
from measurements import Judge, judging, read
from results_page import block, pages

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def written(root: Path, results: Path, judge: Judge) -> dict[Path, str]:
    """What the files with results in them should contain. Raises ValueError if a result is not understood."""
    groups, others = read(results, judge)
    readme = root / "README.md"
    before, found, rest = readme.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"README.md: expected {BEGIN} and {END}")
    docs = root / "docs"
    texts = {docs / name: text for name, text in pages(groups, others, docs / "figures").items()}
    return {**texts, readme: f"{before}{BEGIN}\n{block(groups, others)}{END}{after}"}


if __name__ == "__main__":
    for path, text in written(ROOT, ROOT / "benchmarks" / "results", judging(History(ROOT))).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
