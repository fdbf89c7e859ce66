"""The build refuses settings that would cost speed without an error, and a CPU-only build is complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def cmake() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "cmake"
    found = str(beside) if beside.exists() else shutil.which("cmake")
    if found is None:
        pytest.skip("cmake is not installed")
    return found


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        (["-DFLUX_CUDA_ARCHS=90"], {}, "FLUX_CUDA_ARCHS=90a"),
        (["-DFLUX_CUDA_ARCHS=80"], {}, "kernels for 90a only"),
        (["-DFLUX_CUDA_ARCHS=90a;90"], {}, "FLUX_CUDA_ARCHS=90a"),
        (["-DCMAKE_BUILD_TYPE=Debug"], {}, "NDEBUG"),
        (["-DCMAKE_CUDA_FLAGS_RELEASE=-O3"], {}, "lacks -DNDEBUG"),
        (["-DCMAKE_CUDA_FLAGS=-UNDEBUG"], {}, "-UNDEBUG"),
        (["-DCMAKE_CUDA_FLAGS=-rdc=true"], {}, "setmaxnreg"),
        (["-DCMAKE_CUDA_SEPARABLE_COMPILATION=ON"], {}, "setmaxnreg"),
        ([], {"NVCC_APPEND_FLAGS": "--relocatable-device-code=true"}, "setmaxnreg"),
        ([], {"CUDAFLAGS": "-G"}, "-G"),
        (["-DFLUX_SANITIZE=ON"], {}, "FLUX_CUDA must be OFF"),
    ],
)
def test_cmake_refuses(
    tmp_path: Path, options: list[str], environment: dict[str, str], expected: str
) -> None:
    command = [cmake(), "-S", str(ROOT), "-B", str(tmp_path), "-DFLUX_CUDA=ON", *options]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert run.returncode != 0
    assert expected in " ".join(run.stderr.split())


def setup_py(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_setup_refuses_an_unknown_choice() -> None:
    run = setup_py("build_ext", FLUX_CUDA="maybe")
    assert run.returncode != 0
    assert "FLUX_CUDA='maybe'; expected auto, on or off" in run.stderr


@pytest.fixture
def build_folder() -> Iterator[Path]:
    """An empty folder beside that of `make build`: ccache, which may see paths relative to it only, finds the
    objects of that build.
    """
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        yield Path(folder)


def test_cpu_only_wheel(tmp_path: Path, build_folder: Path) -> None:
    """FLUX_CUDA=off builds a whole package without the kernels, even where an earlier build left some."""
    stale = tmp_path / "lib" / "flux" / "_C.so"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"stale")
    run = setup_py(
        *("build", "--build-base", str(tmp_path), "--build-lib", str(tmp_path / "lib")),
        *("bdist_wheel", "--bdist-dir", str(tmp_path / "bdist"), "--dist-dir", str(tmp_path)),
        FLUX_CUDA="off",
        FLUX_BUILD_DIR=str(build_folder),
    )
    assert run.returncode == 0, run.stdout + run.stderr

    (wheel,) = tmp_path.glob("flux_kernels-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    package = tmp_path / "unpacked" / "flux"
    assert not (package / "_C.so").exists()
    assert (package / "bench" / "suites" / "default.toml").exists()
    assert any((tmp_path / "unpacked").glob("flux_kernels-*.dist-info/**/LICENSE"))

    # In a process of its own: pybind11 registers the types of one _core in a process.
    show = "import _core; print(_core.VERSION, _core.WHY_NO_KERNELS)"
    run = subprocess.run([sys.executable, "-c", show], cwd=package, capture_output=True, text=True)
    assert run.stdout.strip() == f"{project_version()} flux was built with FLUX_CUDA=off", run.stderr


def project_version() -> str:
    version: str = PROJECT["project"]["version"]
    return version


def test_one_version() -> None:
    import flux

    assert flux.__version__ == project_version()


def test_torch_is_no_build_requirement() -> None:
    """An isolated build would download gigabytes of it to read its headers."""
    assert not [name for name in PROJECT["build-system"]["requires"] if name.startswith("torch")]


def test_core_needs_neither_torch_nor_cuda() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    (library,) = (ROOT / "python" / "flux").glob(f"_core{sysconfig.get_config_var('EXT_SUFFIX')}")
    dynamic = subprocess.run([readelf, "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]\n") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert needed
    assert not [name for name in needed if "torch" in name or "cuda" in name or "c10" in name]
