"""The sanitizers of `make sanitize` work: each defect that is planted in such a build ends the process with a
report. Elsewhere there is nothing planted, and nothing to test.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flux._native import core
from flux.testing import SpawnError, spawn

SANITIZED = hasattr(core, "planted_defect")
if not SANITIZED and "asan" in os.environ.get("LD_PRELOAD", ""):
    pytest.fail(f"make sanitize has loaded a module without sanitizers: {core.__file__}", pytrace=False)
pytestmark = pytest.mark.skipif(not SANITIZED, reason="needs a sanitized build: make sanitize")

REPORTS = {
    "read behind the end of an array": "heap-buffer-overflow",
    "read before the start of an array": "heap-buffer-overflow",
    "use after free": "heap-use-after-free",
    "signed overflow": "signed integer overflow: 2147483647 + 1",
    "product of two extents": "signed integer overflow: 65536 * 65536",
    "misaligned access": "misaligned address",
    "division by zero": "division by zero",
    "float out of range": "1e+30 is outside the range of representable values",
}
# Without the package, whose import takes seconds here.
LOAD = (
    "import importlib.util as u, sys\n"
    f"spec = u.spec_from_file_location('flux._core', {core.__file__!r})\n"
    "core = u.module_from_spec(spec)\n"
    "spec.loader.exec_module(core)\n"
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOAD + code], capture_output=True, text=True, timeout=120)


def test_code_without_a_defect_goes_through() -> None:
    done = run("print('result', core.planted_defect('none'))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "result 1\n", "")


@pytest.mark.parametrize(("defect", "report"), REPORTS.items())
def test_a_planted_defect_is_reported(defect: str, report: str) -> None:
    done = run(f"core.planted_defect({defect!r})\nprint('survived')")
    assert done.returncode != 0 and "survived" not in done.stdout
    assert report in done.stderr and "planted.cc" in done.stderr


def test_an_array_of_python_that_is_too_small_is_reported() -> None:
    """What Python allocates is guarded too. 16 experts have 17 offsets."""
    code = (
        "import ctypes\n"
        "layout = core.MoeLayout(1, 0, 1, 16, 1, 1)\n"
        "sizes = (1, %d, 16, 1, 1, 1, 1, 1, 1, 4 * layout.max_tiles(1), 1)\n"
        "arrays = [bytearray(4 * size) for size in sizes]\n"
        "ids, *others = (ctypes.addressof(ctypes.c_char.from_buffer(array)) for array in arrays)\n"
        "core.moe_route(layout, 1, ids, others)\n"
        "print('survived', sum(arrays[1]))\n"
    )
    assert run(code % 17).stdout == "survived 16\n"
    done = run(code % 16)
    assert "survived" not in done.stdout
    assert "heap-buffer-overflow" in done.stderr and "route_on_host" in done.stderr


def planted_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        core.planted_defect("signed overflow")


def test_a_defect_on_a_rank_is_no_less_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpawnError, match="rank 1 died with exit code"):
        spawn(planted_on_rank_1, 2, backend="gloo")
    assert "signed integer overflow" in capfd.readouterr().err
