"""The table of what runs on flux in Megatron-Core (tools/megatron_table.py): the row of the release here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_make_megatron_trains_with_the_releases_of_the_page() -> None:
    page = (ROOT / "docs" / "megatron.md").read_text()
    releases = re.findall(r"^\| (0\.\d+\.\d+) \|", page, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert f"MEGATRON_RELEASES := {' '.join(releases)}\n" in makefile and len(releases) == 5
    recipe = makefile.split("\nmegatron: $(MEGATRON_STAMP)\n")[1].split("\n\n")[0]
    assert [line for line in recipe.splitlines() if "pytest" in line] == [
        line for line in recipe.splitlines() if "tests/with_megatron $(ARGS)" in line
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core, which is not installed"
)
def test_the_page_has_the_row() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "megatron_table.py")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert printed.returncode == 0, printed.stderr
    row = printed.stdout.strip().splitlines()[-1]
    page = (ROOT / "docs" / "megatron.md").read_text()
    assert row in page, f"python tools/megatron_table.py: {row}"
