"""What type checkers see of the installed package: results and examples are typed, wrong uses are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Path(__file__).with_name("typed")
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from names import example, public  # noqa: E402

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
    files = [PROJECT / "user.py", PROJECT / "wrong.py", *sorted(tmp_path.glob("*.py"))]
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
