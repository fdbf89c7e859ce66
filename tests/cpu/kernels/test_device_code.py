"""Device code in threads of the host, under ThreadSanitizer: a GPU's threads would race where these do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "device"
CSRC = HERE.parents[3] / "csrc"


@pytest.mark.parametrize("program", sorted(path.stem for path in HERE.glob("*.cc")))
def test_threads_of_a_cta_do_not_race(program: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    binary = tmp_path / program
    command = [compiler, "-std=c++20", "-O1", "-g", "-pthread", "-fsanitize=thread", "-x", "c++"]
    command += ["-include", str(HERE / "cuda_on_cpu.h"), f"-I{HERE}", f"-I{CSRC}"]
    # clang calls itself g++ on some machines, and libtsan is a package of its own.
    probe = subprocess.run(
        [*command, "-", "-o", str(tmp_path / "probe")], input="int main() {}", capture_output=True, text=True
    )
    if probe.returncode != 0 or subprocess.run([tmp_path / "probe"], capture_output=True).returncode != 0:
        pytest.skip(f"ThreadSanitizer does not work on this machine: {probe.stderr[-300:]}")
    subprocess.run([*command, str(HERE / f"{program}.cc"), "-o", str(binary)], check=True)
    # A race with what a thread did before it waited long is only told if its history goes back that far.
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 history_size=7"}
    run = subprocess.run([binary], env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0 and "all exact" in run.stdout, run.stdout + run.stderr[:4000]
