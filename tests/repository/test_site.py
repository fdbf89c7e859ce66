"""The documentation site builds without a warning, of which a link that leads nowhere is one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from names import example, public  # noqa: E402

NEEDED = ("sphinx", "myst_parser", "furo", "sphinx_copybutton")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needs_sphinx = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}, not installed")


class Page(HTMLParser):
    """Ids of a page, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := values.get(name))}
        source = values.get("href") if tag == "link" else values.get("src")
        if source:
            self.loads.append(source)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    options = ("-E", "-W", "--keep-going", "--quiet", "-c", str(ROOT / "docs"), "-d", str(out / "doctrees"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(source), str(out / "html")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def read(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    out = tmp_path_factory.mktemp("site")
    result = build(ROOT / "docs", out)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout
    return read(out / "html")


@needs_sphinx
def test_the_site_loads_nothing_from_elsewhere(site: dict[Path, Page]) -> None:
    """So that it can be read without a network."""
    assert [load for page in site.values() for load in page.loads if urlparse(load).netloc] == []


@needs_sphinx
def test_every_page_and_name_is_there(site: dict[Path, Page]) -> None:
    (root,) = (path.parent for path in site if path.name == "search.html")
    sources = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert sources <= {path.relative_to(root) for path in site}
    reference = set().union(*(page.ids for path, page in site.items() if path.parent.name == "api"))
    assert set(public()) <= reference


@needs_sphinx
def test_a_broken_page_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "index.md").write_text(
        "# Title\n[no file](missing.md), [no heading](#nowhere), {py:func}`flux.nothing`\n\n![](figure.svg)\n"
    )
    (source / "lost.md").write_text("# In no table of contents\n")
    result = build(source, tmp_path / "out")
    assert result.returncode != 0
    for complaint in ("missing.md", "nowhere", "flux.nothing", "figure.svg", "lost.md"):
        assert complaint in result.stdout, result.stdout


# What type checkers see of the installed package: results and examples are typed, wrong uses are found.
TYPED = Path(__file__).with_name("typed")
# Both kinds of failure: an error that nobody expects, and an expected one that does not come.
PLANTED = """
import flux

flux.all_gather("x")
flux.check()  # type: ignore[arg-type]
"""
# What an example takes for granted; what torch and other packages do to types is not what it shows.
OF_OTHERS = "union-attr, no-untyped-call, no-untyped-def, no-any-return, attr-defined, import-untyped"
BEFORE_EXAMPLE = f"""\
# mypy: disable-error-code="{OF_OTHERS}"
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flux

rank: int
p: int
config: Any

"""


def test_results_wrong_uses_and_every_example_are_typed(tmp_path: Path) -> None:
    """Every public name has an example, which test_doc_examples.py runs."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "planted.py").write_text(PLANTED)
    for name, (_, node) in public().items():
        (tmp_path / f"{name.replace('.', '_')}.py").write_text(BEFORE_EXAMPLE + example(node) + "\n")
    files = [TYPED / "user.py", TYPED / "wrong.py", *sorted(tmp_path.glob("*.py"))]
    assert len(files) > 60
    cache = ROOT / "build" / "mypy"  # without it torch is read anew, which takes half a minute
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}"]
    result = subprocess.run(
        [*command, *map(str, files)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    errors = re.findall(r"^(.+\.py):(\d+): error: .*\[([\w-]+)\]$", result.stdout, re.MULTILINE)
    expected = [("planted.py", "4", "arg-type"), ("planted.py", "5", "unused-ignore")]
    assert errors == expected, result.stdout + result.stderr
