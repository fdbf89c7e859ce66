"""What type checkers see of the installed package: a user's program passes, wrong uses of flux do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typed import user

import flux
import flux.layers
from flux.testing import spawn

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Path(__file__).with_name("typed")

# Both kinds of failure: an error that nobody expects, and an expected one that does not come.
PLANTED = """
import flux

flux.all_gather("x")
flux.check()  # type: ignore[arg-type]
"""


def test_users_program_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "planted.py").write_text(PLANTED)
    files = [PROJECT / "user.py", PROJECT / "wrong.py", tmp_path / "planted.py"]
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


def test_users_program_runs() -> None:
    """On two ranks; test_users_program_is_typed says that its annotations hold."""
    version, fused, reason, config, shape = spawn(user.run, 2, backend="gloo")[0]
    assert (version, fused, shape) == (flux.__version__, "True", "[8, 8]")
    assert reason and config


def test_users_program_uses_every_public_name() -> None:
    text = (PROJECT / "user.py").read_text()
    for prefix, module in (("flux.", flux), ("flux.moe.", flux.moe), ("", flux.layers)):
        unused = [n for n in module.__all__ if not re.search(rf"\b{re.escape(prefix + n)}\b", text)]
        assert unused == [], prefix


def test_layers_have_no_untyped_options() -> None:
    for file in (ROOT / "python" / "flux" / "layers").glob("*.py"):
        assert not re.search(r"\*\*\w+: Any", file.read_text()), file.name
