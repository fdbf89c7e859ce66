"""What the documentation says about names that a program can look up: links, variables. Its examples run in
test_doc_examples.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flux
from flux import _env

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    titles = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Some `title`, here\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#some-title-here) [y](b.md#other) [z](c.md) [w](https://arxiv.org)\n")
    assert broken_links(page) == ["b.md#other", "c.md"]


def test_environment_table_is_that_of_the_code() -> None:
    assert _env.table() in (ROOT / "docs" / "troubleshooting.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_an_unknown_variable(page: Path) -> None:
    known = {variable.name for variable in _env.VARIABLES}
    assert set(re.findall(r"\bFLUX_[A-Z_]+\b", page.read_text())) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_are_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, str(page), "exec")


def signatures(text: str) -> dict[str, str]:
    """Functions and classes whose arguments a page lists, in blocks that are no program."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    listed = "\n".join(block for language, block in blocks if not language)
    calls = re.findall(r"^(?:\w+ += +)?((?:flux\.)?[\w.]+)\(([^()]*)\)", listed, re.MULTILINE)
    return {name: arguments for name, arguments in calls if hasattr(flux.layers, name) or "flux." in name}


def taken(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_signatures_are_those_of_the_code(page: Path) -> None:
    for name, arguments in signatures(page.read_text()).items():
        told: dict[str, Any] = {"torch": torch}
        exec(f"def function({arguments}): pass", told)
        function = flux.layers
        for part in name.split("."):
            function = flux if part == "flux" else getattr(function, part)
        assert taken(told["function"]) == taken(function), name


def test_signatures_are_found() -> None:
    found = {name for page in PAGES for name in signatures(page.read_text())}
    assert found >= {"flux.gemm_rs", "flux.moe.route", "flux.moe.MoEMLP", "column_linear"}
    text = "```\nout = flux.gemm(x, weight,\n          bias=None)\n```\n```python\nflux.gemm(x, w)\n```\n"
    assert signatures(text) == {"flux.gemm": "x, weight,\n          bias=None"}
