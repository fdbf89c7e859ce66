"""flux bench --html: one page that needs nothing else, with every row and every sample."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_bench_record import make_record
from typer.testing import CliRunner

from flux.bench import html, plot, record
from flux.cli import app

_VOID = {"meta", "line", "br"}
# What would be loaded from somewhere.
_LOADS = {"link", "script", "img", "iframe", "object", "use", "image"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[str] = []
        self.hovers: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in _LOADS and not given.keys() & {"src", "href", "onload"}
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "tr" and "title" in given:
            self.rows.append(given["title"] or "")
        if tag == "title":
            self.hovers.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["title"]:
            self.hovers[-1] += data
        if self.open[-1:] == ["h2"]:
            self.titles.append(data)


def test_a_page_has_rows_samples_and_where_they_are_from() -> None:
    result = make_record()
    result.rows[0].model = "<b>small & bold"
    result.rows[0].conditions = {"at sustained clocks": {"flux": 0.25}}
    result.machine["peers"] = {"vllm": "0.32.0"}
    text = html.page(result)
    page = Page(text)
    assert page.titles == ["gemm_rs · TP 4 · bfloat16 · ms per call, median of 3 rounds", "Notes"]
    assert len(page.rows) == 3 and page.rows[0].startswith("gemm_rs <b>small & bold, M = 512: exact")
    assert "flux (flux): 0.204, 0.2, 0.198 ms" in page.rows[0] and "cuBLAS+NCCL (serial): " in page.rows[0]
    assert "flux, at sustained clocks: 0.25 ms" in page.rows[0]
    # The page's title, a bar for flux and its peer in each row, and one for the speed-up.
    assert len(page.hovers) == 1 + 3 * 3
    assert any(said.startswith("1.300 times as fast as cuBLAS+NCCL") for said in page.hovers)
    for told in ("4× Some GPU", "flux 0.1.0 (abc)", "vllm 0.32.0", "2026-01-02", "async-TP could not run"):
        assert told in text
    assert "<b>" not in text and "cut off" not in text
    assert "This run was cut off" in html.page(make_record(complete=False))


def test_labels_do_not_overlap_and_lie_within_their_picture() -> None:
    """Seen in a browser: names of models ran into each other, and beyond the picture."""
    result = make_record()
    for row in result.rows:
        row.model = "a model with a name of forty letters, so"
    picture = html.page(result).split("<svg")[1].split("</svg>")[0]
    found = re.search(r'width="(\d+)" height="(\d+)"', picture)
    labels = re.findall(r'translate\((\d+) (\d+)\) rotate\(45\)">([^<]+)<', picture)
    assert found is not None and len(labels) == 3
    lefts = [int(left) for left, _, _ in labels]
    assert (
        min(right - left for left, right in itertools.pairwise(lefts)) >= 14
    )  # a line's height at 45 degrees
    for left, top, text in labels:  # a letter of 10 pixels is 6 wide
        reach = 6 * 0.71 * len(text)
        assert int(left) + reach < int(found[1]) and int(top) + reach < int(found[2])


def test_each_peer_has_a_colour_and_both_modes_have_their_own() -> None:
    result = make_record()
    timing = result.rows[0].times["cuBLAS+NCCL"]
    result.rows[0].times |= {f"peer {i}": timing for i in range(8)}
    colours = list(plot.colours_of(result.rows).values())
    assert len(colours) == 10 == len(set(colours))
    text = html.page(result)
    light, dark = text.split("prefers-color-scheme: dark")
    names = set(re.findall(r"(--[a-z]+): #", light))
    assert names == set(re.findall(r"(--[a-z]+): #", dark.split("</style>")[0])) and len(names) == 8
    assert not re.findall(r"<(?:text|line|td|th)[^>]*#", text)


def test_wrong_rows_are_loud_and_have_no_bars() -> None:
    result = make_record()
    result.rows[0].check, result.rows[0].times = "rank 1: 7 of 9 wrong", {}
    page = html.page(result)
    assert '<td class="red left">rank 1: 7 of 9 wrong</td>' in page and len(Page(page).hovers) == 1 + 2 * 3


def test_a_stored_result_becomes_a_page(tmp_path: Path) -> None:
    file, target = tmp_path / "r.json", tmp_path / "folder" / "r.html"
    record.write(make_record("cpu"), file)
    done = CliRunner().invoke(app, ["bench", "--show", str(file), "--html", str(target)])
    assert done.exit_code == 0 and "report: " in done.output
    assert len(Page(target.read_text()).rows) == 3
    with pytest.raises(ValueError, match="no row to report"):
        html.write(record.Record("0", "c", "d", "s", "cpu", {}, {}), target)
    refused = CliRunner().invoke(
        app, ["bench", "--show", str(file), "--html", str(file), "--json", str(file)]
    )
    assert refused.exit_code == 2 and "--html expected another file than --json" in refused.output
