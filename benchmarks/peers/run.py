"""Times libraries that flux bench cannot import, by their own benchmarks, on the shapes of a suite of flux.

    python benchmarks/peers/run.py distgemm ag_gemm --sources CUTLASS --tp 4 --json OUT
    python benchmarks/peers/run.py bytedance gemm_rs --sources FLUX --tp 4 --json OUT

distgemm: CUTLASS's Distributed GEMM, example 65 (CUTLASS 3.8 or newer, CUDA 12.4 or newer). A copy of the
example is built for this many GPUs, this operator, bf16 and sums in fp32.
bytedance: bytedance/flux, which is imported as `flux`, too. Run this with an interpreter that has torch and
what its README asks for, and not this project. It is built in its own folder.

Each measures in its own way (one burst, all calls alike), so compare these times with a row's `flux` only
roughly. A shape whose result its own check rejects has no time. Exit status: 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SUITES = Path(__file__).parents[2] / "python/flux/bench/suites"
_SCHEDULES = {"ag_gemm": "AllGather1D_TilingCD_RotatingA", "gemm_rs": "ReduceScatter1D_TilingA_RotatingC"}
_TESTS = {"ag_gemm": "ag_gemm/test_ag_kernel.py", "gemm_rs": "gemm_rs/test_gemm_rs.py"}
_EXAMPLE = "65_distributed_gemm"


class Failed(Exception):
    """A command that did not end well, with the end of what it said."""


@dataclass(frozen=True)
class Peer:
    """A library's own benchmark.

    build: of its sources for an operator and a number of GPUs; returns the command without sizes.
    sizes: the arguments for m, n, k of the whole model. times: in the output; the slowest rank counts.
    right: in the output if its check has passed.
    """

    build: Callable[[Path, str, int], list[str]]
    sizes: Callable[[int, int, int], list[str]]
    times: str
    right: str


def run(command: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)}: status {done.returncode}: {done.stdout[-1500:]}")
    return done.stdout


def example(text: str, op: str, tp: int) -> str:
    """CUTLASS's example for this operator and number of GPUs, in bf16 with sums in fp32."""
    changes = (
        (r"using TP = _\d+;", f"using TP = _{tp};"),
        (r"schedules::\w+<TP>", f"schedules::{_SCHEDULES[op]}<TP>"),
        (r"(using\s+Element[ABC]\s+=) cutlass::half_t;", r"\1 cutlass::bfloat16_t;"),
        (r"(using Element(?:Accumulator|Compute)\s+=) cutlass::half_t;", r"\1 float;"),
    )
    for pattern, to in changes:
        text, count = re.subn(pattern, to, text)
        if not count:
            raise Failed(f"the example has no {pattern!r}: is it of another version of CUTLASS?")
    return text


def build_distgemm(sources: Path, op: str, tp: int) -> list[str]:
    copy = sources.with_name(f"{sources.name}-{op}-tp{tp}")
    shutil.copytree(sources, copy, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
    file = copy / "examples" / _EXAMPLE / f"{_EXAMPLE}.cu"
    file.write_text(example((sources / file.relative_to(copy)).read_text(), op, tp))
    options = ["-DCUTLASS_NVCC_ARCHS=90a", "-DCUTLASS_ENABLE_GDC_FOR_SM90=1", "-DCUTLASS_ENABLE_LIBRARY=OFF"]
    run(["cmake", "-S", ".", "-B", "build", *options], copy)
    run(["cmake", "--build", "build", "--target", _EXAMPLE, "-j"], copy)
    return [str(copy / "build" / "examples" / _EXAMPLE / _EXAMPLE), "--iterations=50", "--eps=1e-5"]


def build_bytedance(sources: Path, op: str, tp: int) -> list[str]:
    # By the name of the GPU it finds no kernels for an H100 or H200.
    run(["./build.sh", "--arch", "90", "--sm-cores", "132", "--nvshmem"], sources)
    return [str(sources / "launch.sh"), f"test/python/{_TESTS[op]}"]


PEERS = {
    "distgemm": Peer(
        build_distgemm,
        lambda m, n, k: [f"--m={m}", f"--n={n}", f"--k={k}"],
        r"Avg runtime: ([\d.e+-]+) ms",
        r"Disposition .*: Passed",
    ),
    "bytedance": Peer(
        build_bytedance,
        lambda m, n, k: [str(m), str(n), str(k), "--iters", "50"],
        r"flux\s+#\d+: .*?total ([\d.]+) ms",
        "flux check passed",
    ),
}


def time_of(peer: Peer, command: list[str], folder: Path, tp: int) -> float:
    """Milliseconds a call, on the slowest rank. Raises Failed if the result is wrong, or none is told."""
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(tp)))}
    # flux bench never uses multicast either.
    told = run(command, folder, **gpus, NCCL_NVLS_ENABLE="0", NVSHMEM_DISABLE_NVLS="1")
    times = [float(text) for text in re.findall(peer.times, told)]
    if not times or not re.search(peer.right, told):
        raise Failed(f"{' '.join(command)}: no right result: {told[-1500:]}")
    return max(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("op", choices=_SCHEDULES)
    parser.add_argument("--sources", type=Path, required=True, help="a checkout, with its submodules")
    parser.add_argument("--tp", type=int, required=True, help="GPUs")
    parser.add_argument("--suite", default="default")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    peer, sources = PEERS[given.peer], given.sources.resolve()
    suite = tomllib.loads((SUITES / f"{given.suite}.toml").read_text())
    commit = subprocess.run(
        ["git", "-C", sources, "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    what = f"{given.op} at TP {given.tp} by {given.peer} {commit}, by its own benchmark, ms a call"
    rows: list[dict[str, object]] = []
    failed = 0
    try:
        command = peer.build(sources, given.op, given.tp)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    for model in suite["model"]:
        shape = model.get(given.op)
        for m in suite["suite"]["m"] if shape else ():
            row: dict[str, object] = {"model": model["name"], "m": m, **shape}
            try:
                row["ms"] = time_of(
                    peer, [*command, *peer.sizes(m, shape["n"], shape["k"])], sources, given.tp
                )
            except Failed as error:
                failed += 1
                row["failed"] = str(error)
            rows.append(row)
            print(row, flush=True)
            given.json.write_text(json.dumps({"what": what, "rows": rows}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
