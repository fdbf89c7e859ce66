"""compute-sanitizer over small problems, all ranks on one GPU: no access out of bounds, no race in shared
memory, no barrier that some threads miss.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@pytest.mark.parametrize("check", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(check: str) -> None:
    if TOOL is None:
        pytest.skip("compute-sanitizer is not installed")
    script = Path(__file__).parent / "sanitizer_cases.py"
    command = [
        TOOL,
        f"--tool={check}",
        "--error-exitcode=9",
        "--kernel-name=kns=flux",
        sys.executable,
        str(script),
    ]
    # The tool cannot follow memory that a caching allocator hands out in pieces.
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    # The first error says what is wrong, the last lines how it ended.
    said = run.stdout[:6000] + "\n...\n" + run.stdout[-1000:] + run.stderr[-2000:]
    assert run.returncode == 0 and "all exact" in run.stdout, said
