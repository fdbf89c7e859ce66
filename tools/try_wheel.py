"""Installs the wheel of dist/ as a user does, and runs tests against it. Run by `make try-wheel`.

The environment is fresh and outside of the source tree, and PATH holds no compiler. Torch is there before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH = "torch==2.13.0"
# Folders of tests that are copied beside the environment; the rest of the tree stays out of reach.
HELPERS = (
    "tests/conftest.py",
    "tests/helpers/effort.py",
    "tests/helpers/cases.py",
    "tests/helpers/dense_forms.py",
    "tests/helpers/references.py",
    "tests/stress/dense_calls.py",
)
TESTS = (
    "tests/wheel/test_wheel.py",
    "tests/cpu/operators/test_dense.py",
    "tests/cpu/moe/test_moe.py::test_moe_is_exact",
    "tests/cpu/operators/test_import.py",
)


def newest_wheel() -> Path:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = sorted((ROOT / "dist").glob(f"flux_kernels-*-{tag}-*.whl"), key=lambda p: p.stat().st_mtime)
    if not wheels:
        raise SystemExit(f"try_wheel: dist/ holds no wheel for {tag}: run `make wheel`")
    return wheels[-1]


def pip(python: Path, *arguments: str | Path) -> float:
    """Seconds that pip took."""
    start = time.monotonic()
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    if subprocess.run([*command, *map(str, arguments)]).returncode != 0:
        raise SystemExit(f"try_wheel: pip could not install {arguments[-1]}")
    return time.monotonic() - start


def main() -> None:
    wheel = newest_wheel()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        venv.create(work / "env", with_pip=True)
        python = work / "env" / "bin" / "python"
        pip(python, CPU_TORCH, "numpy", "typer>=0.12", "rich>=13", "pytest")
        seconds = pip(python, wheel)
        print(f"{wheel.name}: installed beside torch in {seconds:.1f} s", flush=True)
        for name in (*HELPERS, *(test.partition("::")[0] for test in TESTS)):
            target = work / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        environment = {
            "PATH": f"{python.parent}:/usr/bin:/bin",
            "HOME": str(work),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "TRIED_WHEEL": str(wheel),
        }
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        sys.exit(subprocess.run(command, cwd=work, env=environment).returncode)


if __name__ == "__main__":
    main()
