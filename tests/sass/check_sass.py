"""Checks the machine code of a kernel library: what makes Hopper fast must be there, what ruins it must not.

Needs no GPU, only NVIDIA's cuobjdump and nvdisasm (both on PyPI). Several mistakes compile without an error
and cost half the speed: an assert() makes ptxas serialise wgmma, relocatable code makes it drop setmaxnreg,
sm_90 without the "a" has neither wgmma nor TMA, a register too many spills, a TMA load by a thread that was
chosen by its lane becomes a loop over threads, and a thread that divides before each load is slower than
memory.

  python check_sass.py _C.so [--log build.log]
  python check_sass.py _C.so --before OLD_C.so

The second form compares two libraries, kernel by kernel: instructions, registers, and the instructions of the
mainloop, which is the shortest loop around a wgmma.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KEPT = Path(__file__).resolve().parents[2] / "build" / "sass"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
# A load, the line of its encoding, and a jump back for the next thread.
_TMA_LOOP = re.compile(r"UTMALDG[^\n]*\n[^\n]*\n[^\n]*BRA\.U\.ANY")
_LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
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
    mainloop: int = 0  # instructions; 0: no loop around a wgmma
    divisions: int = 0  # in the loop around a TMA load that has most of them

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def readable_name(self) -> str:
        """Without the number that a compilation gives to what only its file can see, and without the types of
        a template's parameters."""
        name = re.sub(r"EEvN.*", "EE", self.name)
        return re.sub(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+_cu)_[0-9a-f]{8}_?\d*", r"\1 ", name)

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
        if self.divisions:
            found.append(f"{self.divisions} divisions in a loop of TMA loads (not taken out of it?)")
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


def shortest_loops(body: str, around: tuple[str, ...]) -> Iterator[list[str]]:
    """The opcodes of the shortest loop around each instruction that begins with one of `around`."""
    lines = [(int(match[1], 16), match[2], match[3]) for match in _LINE.finditer(body)]
    at = {address: i for i, (address, _, _) in enumerate(lines)}
    loops = []
    for i, (address, opcode, operands) in enumerate(lines):
        if not opcode.startswith("BRA") or (target := re.search(r"0x([0-9a-f]+)", operands)) is None:
            continue
        if int(target[1], 16) < address:
            loops.append((at.get(int(target[1], 16), i), i))
    for i, (_, opcode, _) in enumerate(lines):
        if opcode.startswith(around) and (found := [loop for loop in loops if loop[0] <= i < loop[1]]):
            begin, end = min(found, key=lambda loop: loop[1] - loop[0])
            yield [opcode for _, opcode, _ in lines[begin : end + 1]]


def mainloop_instructions(body: str) -> int:
    return min(map(len, shortest_loops(body, ("HGMMA", "QGMMA"))), default=0)


def divisions_beside_loads(body: str) -> int:
    """The reciprocals that divisions of integers begin with."""
    loops = shortest_loops(body, ("UTMALDG",))
    return max((sum(opcode == "MUFU.RCP" for opcode in loop) for loop in loops), default=0)


def read_kernels(library: Path) -> list[Kernel]:
    """Every kernel in the library. To disassemble one takes more than a minute, so what was read is kept."""
    contents = hashlib.sha256(library.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    kept = KEPT / f"{contents[:24]}.json"
    if kept.exists():
        told = json.loads(kept.read_text())
        return [Kernel(**{**each, "opcodes": collections.Counter(each["opcodes"])}) for each in told]
    kernels = _disassembled(library)
    KEPT.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps([vars(kernel) for kernel in kernels]))
    part.replace(kept)
    return kernels


def _disassembled(library: Path) -> list[Kernel]:
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
            Kernel(
                *(name, opcodes, int(used["REG"]), int(used["STACK"])),
                *(len(_TMA_LOOP.findall(body)), mainloop_instructions(body), divisions_beside_loads(body)),
            )
        )
    return kernels


def log_faults(log: str) -> list[str]:
    """Lines of a build log in which ptxas says that it lost performance, spilled, or used local memory."""
    return sorted({line.strip() for line in log.splitlines() if _PTXAS_COMPLAINT.search(line)})


def compare(before: list[Kernel], after: list[Kernel]) -> bool:
    """Prints the kernels that differ. Whether no mainloop is longer by more than 1 %."""
    befores = {kernel.readable_name: kernel for kernel in before}
    afters = {kernel.readable_name: kernel for kernel in after}
    for name in sorted(befores.keys() - afters.keys()):
        print(f"gone  {name}")
    for name in sorted(afters.keys() - befores.keys()):
        print(f"new   {name}")
    changed = longer = 0
    for name in sorted(befores.keys() & afters.keys()):
        a, b = befores[name], afters[name]
        if (a.opcodes, a.registers, a.mainloop) == (b.opcodes, b.registers, b.mainloop):
            continue
        changed += 1
        is_longer = b.mainloop > 1.01 * a.mainloop
        longer += is_longer
        changes = (
            ("instructions", a.instructions, b.instructions),
            ("mainloop", a.mainloop, b.mainloop),
            ("registers", a.registers, b.registers),
        )
        told = "  ".join(f"{what} {old:5} -> {new:5}" for what, old, new in changes)
        print(f"{'LONG' if is_longer else 'diff'}  {told}  {name}")
    total = [sum(kernel.instructions for kernel in side) for side in (before, after)]
    print(f"{changed} of {len(afters)} kernels differ, {longer} mainloops are longer by more than 1 %")
    print(f"instructions in all: {total[0]} -> {total[1]}")
    return longer == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the machine code of a kernel library.")
    parser.add_argument("library", type=Path)
    parser.add_argument("--log", type=Path, help="output of the compiler, searched for complaints of ptxas")
    parser.add_argument("--before", type=Path, help="an older library to compare with")
    arguments = parser.parse_args()
    if arguments.before:
        return 0 if compare(read_kernels(arguments.before), read_kernels(arguments.library)) else 1

    faults = log_faults(arguments.log.read_text()) if arguments.log else []
    for line in faults:
        print(f"FAIL  {line}")
    kernels = read_kernels(arguments.library)
    for kernel in kernels:
        counts = " ".join(
            f"{op} {kernel.opcodes[op]}" for op in ("HGMMA", "QGMMA", "UTMALDG", "UTMASTG", "USETMAXREG")
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
