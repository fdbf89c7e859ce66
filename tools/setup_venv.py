"""Makes .venv ready to build, test and run flux from the source tree. Run by make; standard library only.

If the Python that runs this already has a torch with CUDA, the environment borrows everything that Python has
and installs only what is missing, so a GPU machine without a network works. Otherwise it installs torch and
all tools: a fixed torch where there is no GPU. There the compiler runs meanwhile.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CPU_TORCH = "torch==2.13.0"
CUTLASS = "nvidia-cutlass==4.2.0.0"


def outer_torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    return bool(spec and spec.origin) and (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def gpu_visible() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def create(borrow: bool) -> Path:
    """Creates .venv unless it is there; returns its interpreter."""
    python = VENV / "bin" / "python"
    if not python.exists():
        venv.create(VENV, with_pip=not borrow, clear=True)
    if borrow:
        # --system-site-packages would skip the packages of a Python that is itself a virtual environment.
        outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        inner = next((VENV / "lib").glob("python3*")) / "site-packages"
        lines = [f"import site; site.addsitedir({path!r})" for path in outer]
        (inner / "borrowed.pth").write_text("\n".join(lines) + "\n")
    return python


def pip(python: Path, *arguments: str) -> None:
    # Without --no-compile, half of the time would go into bytecode, mostly of modules that nothing imports.
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]
    command += arguments
    print("+", *command, flush=True)
    if subprocess.run(command).returncode != 0:
        raise SystemExit(f"setup_venv: failed: {' '.join(command)}")


def importable(python: Path, module: str) -> bool:
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", probe]).returncode == 0


def requirements(borrow: bool) -> tuple[list[str], list[str]]:
    """What to ask pip for, to build and then to run; when borrowing, only what tests and benchmarks need."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = pyproject["build-system"]["requires"]
    run = [r for r in pyproject["project"]["dependencies"] if not r.startswith("torch")]
    extras = pyproject["project"]["optional-dependencies"]
    if borrow:
        return build, [*run, "pytest"]
    torch = "torch>=2.10" if gpu_visible() else CPU_TORCH
    return build, [torch, *run, *extras["dev"], *extras["docs"], *extras["plot"], *extras["transformers"]]


def start_compiling(python: Path) -> subprocess.Popen[bytes] | None:
    """Compiles the native library; None where kernels may be compiled too, which need torch's headers."""
    kernels = gpu_visible() or os.environ.get("FLUX_CUDA", "off") != "off"
    if kernels or os.environ.get("FLUX_CUDA_ARCHS") or os.environ.get("FLUX_KERNELS"):
        return None
    return subprocess.Popen([python, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT)


def module_of(requirement: str) -> str:
    return requirement.split(">")[0].split("=")[0].strip()


def main() -> None:
    borrow = outer_torch_has_cuda()
    python = create(borrow)
    build, run = requirements(borrow)
    if borrow:
        tools = ("cmake", "ninja")
        build, run = (
            [
                r
                for r in wanted
                if not importable(python, module_of(r))
                and not (module_of(r) in tools and shutil.which(module_of(r)))
            ]
            for wanted in (build, run)
        )
    if build:
        pip(python, *build)
    compiling = start_compiling(python)
    if run:
        pip(python, *run)
    if not os.environ.get("FLUX_CUTLASS_DIR") and not importable(python, "cutlass_library"):
        # Its dependencies serve its Python side; flux reads its headers.
        pip(python, "--no-deps", CUTLASS)
    if compiling is not None and compiling.wait() != 0:
        raise SystemExit("setup_venv: compiling failed; the messages above say why")
    pip(python, "--no-index", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


if __name__ == "__main__":
    main()
