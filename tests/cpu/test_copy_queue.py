"""The queue of copy engines, compiled for the host: an old epoch never lands after a newer one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def cuda_headers() -> Path | None:
    """The folder of cuda.h: nvcc may be a link into the toolkit, or a script that stands elsewhere."""
    nvcc = shutil.which("nvcc")
    roots = [Path("/usr/local/cuda")] + ([] if nvcc is None else [Path(nvcc).resolve().parents[1]])
    return next((root / "include" for root in roots if (root / "include" / "cuda.h").exists()), None)


def test_epochs_land_in_order(tmp_path: Path) -> None:
    compiler, headers = shutil.which("g++"), cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("needs g++ and CUDA's headers")
    sources = [ROOT / "tests/cpu/host/copy_queue.cc", ROOT / "csrc/runtime/copy_queue.cc"]
    binary = tmp_path / "copy_queue"
    command = [compiler, "-std=c++17", "-O1", f"-I{ROOT / 'csrc'}", "-isystem", str(headers)]
    subprocess.run([*command, *map(str, sources), "-o", str(binary)], check=True)
    run = subprocess.run([binary], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout
