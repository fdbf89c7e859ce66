"""Checks the machine code of a kernel library: what makes Hopper fast must be there, what ruins it must not.

Needs no GPU, only NVIDIA's cuobjdump and nvdisasm (both on PyPI). Several mistakes compile without an error
and cost half the speed: an assert() makes ptxas serialise wgmma, relocatable code makes it drop setmaxnreg,
sm_90 without the "a" has neither wgmma nor TMA, a register too many spills, and a TMA load by a thread that
was chosen by its lane becomes a loop over threads.

  python check_sass.py _C.so [--log build.log]
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
# A load, the line of its encoding, and a jump back for the next thread.
_TMA_LOOP = re.compile(r"UTMALDG[^\n]*\n[^\n]*\n[^\n]*BRA\.U\.ANY")
_RESOURCES = re.compile(r"Function (\S+):\s+(REG:.*)")
_PTXAS_COMPLAINT = re.compile(
    r"\(C7\d{3}\)|Potential Performance Loss|[1-9]\d* bytes (?:spill|stack)|Local memory used"
)


@dataclass(frozen=True)
class Kernel:
    """Instruction counts (by opcode, without modifiers) and resources of one kernel."""

    name: str
    opcodes: collections.Counter[str]
    registers: int
    stack_bytes: int
    tma_loops: int

    @property
    def is_gemm(self) -> bool:
        return "sm90_gemm" in self.name

    def faults(self) -> list[str]:
        found = []
        local = self.opcodes["LDL"] + self.opcodes["STL"]
        if local or self.stack_bytes:
            found.append(f"local memory: {local} loads and stores, {self.stack_bytes} bytes of stack")
        if self.tma_loops:
            found.append(f"{self.tma_loops} TMA loads in loops over threads (not behind ptx::elect_one?)")
        if self.is_gemm:
            if not self.opcodes["HGMMA"] + self.opcodes["QGMMA"]:
                found.append("no wgmma (compiled for sm_90 instead of sm_90a?)")
            if not self.opcodes["UTMALDG"]:
                found.append("no TMA load")
            # Few rows need few accumulators: that kernel hands no registers over.
            if self.opcodes["USETMAXREG"] < 2 and "swap_ab" not in self.name:
                found.append("setmaxnreg dropped (compiled with -rdc=true?)")
        return found


def tool(name: str) -> str | None:
    """Path of a CUDA binary tool: on PATH, beside nvcc, or in the package that pip installs."""
    if on_path := shutil.which(name):
        return on_path
    roots = [Path(path) / "nvidia" for path in sys.path] + [Path("/usr/local/cuda")]
    return (
        next((str(path) for root in roots for path in root.glob(f"**/bin/{name}")), None) if roots else None
    )


def _dump(option: str, library: Path) -> str:
    cuobjdump, nvdisasm = tool("cuobjdump"), tool("nvdisasm")
    if not cuobjdump or not nvdisasm:
        raise FileNotFoundError(
            "cuobjdump or nvdisasm is missing: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    path = os.pathsep.join([str(Path(nvdisasm).parent), os.environ.get("PATH", "")])
    run = subprocess.run(
        [cuobjdump, option, str(library)], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    if run.returncode != 0:
        raise RuntimeError(f"cuobjdump {option} {library}: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout


def read_kernels(library: Path) -> list[Kernel]:
    """Every kernel in the library."""
    resources = {
        match[1]: dict(entry.split(":", 1) for entry in match[2].split())
        for match in _RESOURCES.finditer(_dump("--dump-resource-usage", library))
    }
    kernels = []
    for part in re.split(r"\n\s*Function : ", _dump("--dump-sass", library))[1:]:
        name, body = part.split("\n", 1)
        used = resources[name]
        opcodes = collections.Counter(_INSTRUCTION.findall(body))
        kernels.append(
            Kernel(name, opcodes, int(used["REG"]), int(used["STACK"]), len(_TMA_LOOP.findall(body)))
        )
    return kernels


def log_faults(log: str) -> list[str]:
    """Lines of a build log in which ptxas says that it lost performance, spilled, or used local memory."""
    return sorted({line.strip() for line in log.splitlines() if _PTXAS_COMPLAINT.search(line)})


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the machine code of a kernel library.")
    parser.add_argument("library", type=Path)
    parser.add_argument("--log", type=Path, help="output of the compiler, searched for complaints of ptxas")
    arguments = parser.parse_args()

    faults = log_faults(arguments.log.read_text()) if arguments.log else []
    for line in faults:
        print(f"FAIL  {line}")
    kernels = read_kernels(arguments.library)
    for kernel in kernels:
        counts = " ".join(
            f"{op} {kernel.opcodes[op]}" for op in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG")
        )
        verdict = "; ".join(kernel.faults())
        mark = "FAIL" if verdict else "ok  "
        print(f"{mark}  {kernel.registers:3} registers  {counts}  {kernel.name}  {verdict}")
    if not any(kernel.is_gemm for kernel in kernels):
        faults.append("no GEMM kernel in the library")
        print(f"FAIL  {faults[-1]}")
    failed = len(faults) + sum(bool(kernel.faults()) for kernel in kernels)
    print(f"{len(kernels)} kernels in {arguments.library}, {failed} faults")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
