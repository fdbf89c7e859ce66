"""Builds flux: decides what to compile, then lets CMake compile it.

Environment variables (all optional):
  FLUX_CUDA         auto (default): kernels if nvcc is there and a GPU is visible or FLUX_CUDA_ARCHS is set;
                    on: kernels, and failing to build them is an error; off: the CPU path only.
  FLUX_CUDA_ARCHS   architectures to compile kernels for; Hopper's is 90a.
  FLUX_CUTLASS_DIR  CUTLASS 4 source tree; default: the one of the nvidia-cutlass package.
  FLUX_TORCH_DIR    folder of the installed torch package; default: found, not imported.
  FLUX_KERNELS      a _C.so to pack instead of compiling one: wheels for several Pythons share it.
  FLUX_LOCAL_VERSION  added to the version, such as cpu for 0.3.0+cpu.
  FLUX_COMMIT       commit that benchmark records of the installed package name.
  FLUX_BUILD_DIR    where CMake works; default: build/ in the source tree, so that rebuilds are incremental.
  MAX_JOBS          compile jobs at a time; default: one a core.
  CMAKE_ARGS        further options for CMake, such as -DFLUX_SANITIZE=ON.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "python" / "flux"
KERNELS = "_C.so"


def find_tool(name: str) -> str:
    """Path of cmake or ninja: beside this interpreter, on PATH, or inside the Python package of that name."""
    beside = Path(sysconfig.get_path("scripts")) / name
    if beside.exists():
        return str(beside)
    if on_path := shutil.which(name):
        return on_path
    if importlib.util.find_spec(name):
        package = importlib.import_module(name)
        return str(Path(getattr(package, "CMAKE_BIN_DIR", None) or package.BIN_DIR) / name)
    raise SystemExit(f"flux: building needs {name}: `pip install {name}`")


def find_nvcc() -> str | None:
    on_path = shutil.which("nvcc")
    if on_path:
        return on_path
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [Path(root) / "bin" / "nvcc" for root in roots if root]
    return next((str(path) for path in candidates if path.exists()), None)


def cuda_version(nvcc: str) -> str:
    """Such as 13.0."""
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", told)
    if found is None:
        raise SystemExit(f"flux: `{nvcc} --version` names no release: {told}")
    return found[1]


def gpu_visible() -> bool:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    smi = shutil.which("nvidia-smi")
    return bool(smi) and subprocess.run([smi, "-L"], capture_output=True).returncode == 0


def find_torch() -> str:
    """Folder of the torch package, without importing it.

    Torch is no build requirement: an isolated build would download gigabytes to read half a megabyte of
    headers. Under pip's isolation PYTHONPATH hides the environment being installed into: look there second.
    """
    if given := os.environ.get("FLUX_TORCH_DIR"):
        return given
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        return str(Path(spec.origin).parent)
    probe = "import importlib.util as u; s = u.find_spec('torch'); print(s and s.origin or '', end='')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    origin = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, text=True
    ).stdout
    if not origin:
        raise SystemExit(
            "flux: the CUDA kernels need the headers of an installed torch, and none was found. "
            "Install torch first, or set FLUX_TORCH_DIR to its folder, or set FLUX_CUDA=off for the CPU path."
        )
    return str(Path(origin).parent)


def why_no_kernels() -> str:
    """Empty if the kernels are to be built, else the reason why not, in words for the user."""
    choice = os.environ.get("FLUX_CUDA", "auto").lower()
    if choice not in ("auto", "on", "off"):
        raise SystemExit(f"flux: FLUX_CUDA={choice!r}; expected auto, on or off")
    if os.environ.get("FLUX_KERNELS"):
        if choice == "off":
            raise SystemExit("flux: FLUX_CUDA=off and FLUX_KERNELS contradict each other")
        return ""
    if choice == "off":
        return "flux was built with FLUX_CUDA=off"
    if find_nvcc() is None:
        if choice == "on":
            raise SystemExit(
                "flux: FLUX_CUDA=on, but nvcc is neither on PATH nor under CUDA_HOME or /usr/local/cuda"
            )
        return "flux was built on a machine without nvcc (FLUX_CUDA=auto)"
    if choice == "auto" and not os.environ.get("FLUX_CUDA_ARCHS") and not gpu_visible():
        return "flux was built on a machine without a visible GPU (FLUX_CUDA=auto)"
    return ""


class CMakeBuild(build_ext):
    """Runs CMake in a folder that survives pip, so that only what changed is compiled again."""

    def run(self) -> None:
        note = why_no_kernels()
        if note:
            self.announce(f"flux: no CUDA kernels: {note}", level=3)
        built = self.cmake_build(note)
        in_place = self.inplace or getattr(self, "editable_mode", False)
        target = PACKAGE if in_place else Path(self.build_lib) / "flux"
        target.mkdir(parents=True, exist_ok=True)
        if note:
            (target / KERNELS).unlink(missing_ok=True)
        for library in built:
            # Replaced, not overwritten: a running process may have the old file mapped.
            fresh = target / f".{library.name}.new"
            shutil.copy2(library, fresh)
            os.replace(fresh, target / library.name)

    def cmake_build(self, note: str) -> list[Path]:
        import pybind11

        cmake = find_tool("cmake")
        packed = None if note else os.environ.get("FLUX_KERNELS")
        compiles = not note and not packed
        flavour = "cuda" if compiles else "cpu"
        default = ROOT / "build" / f"{sys.implementation.cache_tag}-{flavour}"
        work = Path(os.environ.get("FLUX_BUILD_DIR") or default)
        configure = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "FLUX_VERSION": self.distribution.get_version(),
            "FLUX_BUILD_NOTE": note,
            "FLUX_COMMIT": os.environ.get("FLUX_COMMIT", ""),
            "FLUX_CUDA": "ON" if compiles else "OFF",
            "FLUX_CUDA_VERSION": "" if note else cuda_version(find_nvcc() or "nvcc"),
        }
        if compiles:
            configure |= {
                "CMAKE_CUDA_COMPILER": find_nvcc() or "",
                "FLUX_CUDA_ARCHS": os.environ.get("FLUX_CUDA_ARCHS") or "90a",
                "FLUX_CUTLASS_DIR": os.environ.get("FLUX_CUTLASS_DIR", ""),
                "FLUX_TORCH_DIR": find_torch(),
            }
        options = [f"-D{name}={value}" for name, value in configure.items()]
        options += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        for command in (
            [cmake, "-S", str(ROOT), "-B", str(work), "-G", "Ninja", *options],
            [cmake, "--build", str(work), "-j", jobs],
        ):
            if subprocess.run(command).returncode != 0:
                raise SystemExit(
                    f"flux: the native build failed; the messages above say why. Command: {' '.join(command)}"
                )
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        kernels = Path(packed) if packed else work / KERNELS
        return [work / f"_core{suffix}"] + ([] if note else [kernels])

    def get_outputs(self) -> list[str]:
        outputs = super().get_outputs()
        kernels = Path(self.build_lib) / "flux" / KERNELS
        return outputs + ([str(kernels)] if kernels.exists() else [])


class FreshBuildPy(build_py):
    """setuptools packs what an earlier build left in build/lib, deleted modules too: start from nothing."""

    def run(self) -> None:
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(Path(self.build_lib) / "flux", ignore_errors=True)
        super().run()


# Naming the module makes the wheel a platform wheel; CMake knows its sources.
local_version = os.environ.get("FLUX_LOCAL_VERSION")
setup(
    options={"egg_info": {"tag_build": f"+{local_version}"}} if local_version else {},
    ext_modules=[Extension("flux._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": FreshBuildPy},
)
