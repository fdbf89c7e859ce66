"""Builds programs that run the kernels of csrc on the host, and runs cases of them.

A program is the engine, kernel sources compiled as plain C++, and cases. Objects are kept in build/sim
under the hash of their content, so that only what has changed is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "sim"
JOBS = len(os.sched_getaffinity(0))

_COMMON = ["-std=c++20", "-g1", "-fno-strict-aliasing"]
# Thread-local variables stand for shared memory: none of them has a constructor that could be asked for.
_KERNEL = [*_COMMON, "-O1", "-fno-extern-tls-init", "-w", "-include", "tests/sim/include/cuda_on_host.h"]
_KERNEL += ["-Itests/sim/include", "-Icsrc", "-x", "c++"]
# Of device code, the compiler announces each load and store to the engine (engine/shadow.cc).
_DEVICE = [*_KERNEL, "-fsanitize=thread", "-fsanitize=alignment", "--param=tsan-instrument-func-entry-exit=0"]
# The host is one thread. Its thread-local variables must not lie among those that stand for shared memory.
_HOST = [*_KERNEL, "-Dthread_local="]
_ENGINE = [*_COMMON, "-O2", "-Wall", "-Wextra", "-Itests/sim/include", "-Itests/sim/engine", "-x", "c++"]
_CASE = [*_KERNEL, "-Itests/sim/engine"]
_RUNTIME = ["runtime/tensor_map.cc"]


def _instances(*names: str) -> list[str]:
    return [f"instances/{name}.cu" for name in names]


_GEMM = ["gemm/gemm.cu", "gemm/select.cc", "gemm/quantize.cu", "gemm/add_norm.cu"]
_GEMM += _instances("gemm", "gemm_split_k", "gemm_swap_ab", "gemm_fp8")


@dataclass(frozen=True)
class Program:
    """A case file, the kernels that it runs, the names of its cases, and files that share code of cases."""

    name: str
    kernels: tuple[str, ...]
    cases: tuple[str, ...]
    helpers: tuple[str, ...] = ()


_RANKS_CASES = ("gemm_rs", "gemm_rs_frozen", "all_reduce", "overlap", "gemm_ar", "add_norm", "norm_bits")
_GATHER = ["ag_gemm/ag_gemm.cu", "ag_gemm/all_gather.cu", "gemm/select.cc"]
_GATHER += _instances("ag_gemm", "ag_gemm_fp8")
_MOE = ["moe/routing.cu", "moe/grouped_gemm.cu", "moe/expert_rows.cu", "gemm/select.cc"]
_MOE += ["moe/ag_scatter_gemm.cu", "moe/gemm_gather_rs.cu"]
_MOE += _instances("grouped_gemm_fp8", "ag_scatter_gemm", "gemm_gather_rs", "moe_layers_fp8")
_RANKS = ["gemm_rs/gemm_rs.cu", "gemm_ar/gemm_ar.cu", "gemm_ar/int8_sum.cu"]
_RANKS += _instances("gemm_rs", "gemm_rs_fp8")
_ALL = (*dict.fromkeys((*_GATHER, *_RANKS, *_GEMM, *_MOE)), *_RUNTIME)

PROGRAMS = {
    program.name: program
    for program in (
        Program("gemm", (*_GEMM, *_RUNTIME), ("ordinary", "split_k", "swap_ab")),
        Program("ranks", (*_RANKS, *_GEMM, *_RUNTIME), _RANKS_CASES, helpers=("fp8",)),
        Program(
            "fp8_gemm",
            (*_GEMM, *_RUNTIME),
            ("fp8_ordinary", "fp8_split_k", "fp8_swap_ab", "fp8_promotion", "quantize"),
            helpers=("fp8",),
        ),
        Program(
            "fp8_ranks",
            (*dict.fromkeys((*_RANKS, *_GATHER, *_GEMM)), *_RUNTIME),
            ("fp8_gemm_rs", "fp8_ag_gemm"),
            helpers=("fp8",),
        ),
        Program("int8", ("gemm_ar/int8_sum.cu", *_RUNTIME), ("int8_sum", "int8_sum_frozen")),
        Program("gather", (*_GATHER, *_RUNTIME), ("all_gather", "ag_gemm")),
        Program(
            "moe",
            (*_MOE, *_RUNTIME),
            ("moe_route", "grouped_gemm", "moe_combine", "expert_rows", "moe_layers"),
        ),
        Program("wgrad", ("moe/grouped_wgrad.cu", *_RUNTIME), ("grouped_wgrad",)),
        Program("fp8_moe", (*_MOE, *_RUNTIME), ("fp8_grouped_gemm", "fp8_moe_layers"), helpers=("fp8",)),
        Program("dead", _ALL, ("dead_rank", "too_late_rank", "graphs"), helpers=("ops", "graphs")),
        Program("copies", tuple(_RUNTIME), ("copy_queue",)),
        Program("refused", _ALL, ("refused",), helpers=("fp8",)),
    )
}


class BuildFailed(Exception):
    """The compiler refused a source."""


def why_not() -> str | None:
    """Why this machine cannot run the simulator, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the simulator switches stacks with x86-64 code on Linux"
    compiler = shutil.which("g++")
    if compiler is None:
        return "needs g++"
    probe = "#if !defined(__GNUC__) || defined(__clang__) || __GNUC__ < 12\n#error\n#endif\n"
    command = [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(command, input=probe, text=True, capture_output=True).returncode != 0:
        return "needs g++ 12"
    return None


def _run(command: Sequence[str], root: Path) -> str:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return done.stdout


def _key(flags: Sequence[str], files: Sequence[str], root: Path) -> str | None:
    digest = hashlib.sha256(" ".join(flags).encode())
    for name in files:
        path = root / name
        if not path.is_file():
            return None
        digest.update(f"\n{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _object(source: str, flags: Sequence[str], root: Path) -> Path:
    """The object of a source of the tree `root`; compiles it if none of the same content is there."""
    objects = BUILD / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    listing = objects / (source.replace("/", "-") + ".deps")
    if listing.is_file():
        key = _key(flags, listing.read_text().split(), root)
        if key is not None and (objects / f"{key}.o").is_file():
            return objects / f"{key}.o"
    work = objects / f"{source.replace('/', '-')}-{os.getpid()}-{threading.get_ident()}"
    made, rules = Path(f"{work}.o"), Path(f"{work}.d")
    # Another clone's objects serve too: ccache takes debug information into account, with its folder.
    cache = ["ccache"] if shutil.which("ccache") else []
    compiler = [*cache, "g++", f"-fdebug-prefix-map={root}=."]
    _run([*compiler, *flags, "-MD", "-MF", str(rules), "-c", source, "-o", str(made)], root)
    words = rules.read_text().replace("\\\n", " ").split()[1:]
    files = list(dict.fromkeys(word for word in words if not word.startswith("/")))
    key = _key(flags, files, root)
    assert key is not None
    made.rename(objects / f"{key}.o")
    rules.unlink()
    listing.write_text("\n".join(files))
    return objects / f"{key}.o"


def build(name: str, root: Path = ROOT, changed: Collection[str] = ()) -> Path:
    """The program. Its kernels in `changed`, and its case if it is there, are compiled from the tree `root`.

    That tree has csrc and tests/sim in it. Those kernels are linked first: of inline functions that differ
    between the trees, the linker takes the first.
    """
    program = PROGRAMS[name]
    kernels = sorted(program.kernels, key=lambda kernel: kernel not in changed)
    engine = sorted(str(path.relative_to(ROOT)) for path in (HERE / "engine").glob("*.cc"))
    # Last: its thread-local array ends the block (engine/shared_memory.cc).
    engine.sort(key=lambda path: path.endswith("shared_memory.cc"))
    wanted = [
        (f"csrc/{kernel}", _DEVICE if kernel.endswith(".cu") else _HOST, root if kernel in changed else ROOT)
        for kernel in kernels
    ]
    for case in (f"cases/{case}.cc" for case in ("case", *program.helpers, name)):
        wanted.append((f"tests/sim/{case}", _CASE, root if case in changed else ROOT))
    wanted += [(source, _ENGINE, ROOT) for source in engine]
    with ThreadPoolExecutor(JOBS) as pool:
        objects = list(pool.map(lambda each: _object(*each), wanted))
    binary = BUILD / f"{name}-{hashlib.sha256(' '.join(map(str, objects)).encode()).hexdigest()[:16]}"
    if not binary.is_file():
        made = Path(f"{binary}-{os.getpid()}-{threading.get_ident()}")
        _run(["g++", "-no-pie", "-rdynamic", *map(str, objects), "-ldl", "-o", str(made)], ROOT)
        made.rename(binary)
    return binary


def run(
    binary: Path, case: str, seed: int, cases: int, cpu_seconds: int = 600
) -> subprocess.CompletedProcess[str]:
    """Runs successive seeds of a case. The report of a failure is in stderr.

    A program without end stops after so many seconds of processor time, whatever else the machine does.
    """
    command = [str(binary), "--only", case, "--seed", str(seed), "--cases", str(cases)]
    limited = ["sh", "-c", f'ulimit -t {cpu_seconds}; exec "$@"', "sh", *command]
    done = subprocess.run(limited, capture_output=True, text=True)
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        done.stderr += f"sim: no end after {cpu_seconds} s\n"
    return done
