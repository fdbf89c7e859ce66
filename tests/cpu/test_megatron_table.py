"""The table of what runs on flux in Megatron-Core (tools/megatron_table.py): the row of the release here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
    # The same of every kind of model in all releases.
    rows = [line.split("|", 2)[2] for line in page.splitlines() if line.startswith("| 0.1")]
    assert len(rows) == 5
