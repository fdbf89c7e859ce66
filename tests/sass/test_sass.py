"""The machine code of the built kernels, and that the check finds what it looks for."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import check_sass
import pytest

from flux import _native

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = [ROOT / "python" / "flux" / "_C.so", ROOT / "build" / "kernels" / "lib" / "flux" / "_C.so"]

needs_tools = pytest.mark.skipif(
    not (check_sass.tool("cuobjdump") and check_sass.tool("nvdisasm")),
    reason="cuobjdump or nvdisasm is missing: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm",
)


def built_library() -> Path:
    """The newest kernel library of this source tree, unless the sources have changed since."""
    built = [path for path in LIBRARIES if path.exists()]
    if not built:
        pytest.skip("no kernel library was built: run `make kernels` (needs nvcc, no GPU)")
    newest = max(built, key=lambda path: path.stat().st_mtime)
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    if max(path.stat().st_mtime for path in sources) > newest.stat().st_mtime:
        pytest.skip(f"{newest.relative_to(ROOT)} is older than csrc/: run `make kernels`")
    return newest


@functools.cache
def built_kernels() -> list[check_sass.Kernel]:
    return check_sass.read_kernels(built_library())


@needs_tools
def test_kernels_use_hopper_and_no_local_memory() -> None:
    kernels = built_kernels()
    assert any(kernel.is_gemm for kernel in kernels)
    assert {kernel.name: kernel.faults() for kernel in kernels if kernel.faults()} == {}


def is_of_fp8_tile(kernel: check_sass.Kernel) -> bool:
    """By the number of its tile, which follows the type and, of dense GEMMs, the layout of the weight."""
    found = re.search(
        r"sm90_(?:grouped_)?gemm(_swap_ab)?I\d+[a-z_0-9]+?(?:L\w+?MajorE\dE)?Li(\d+)E", kernel.name
    )
    assert found is not None, kernel.name
    tile, core = int(found[2]), _native.core
    return tile >= core.NUM_SWAP_AB if found[1] else core.tile_config(tile).operand_bytes == 1


@needs_tools
def test_fp8_tiles_multiply_fp8_and_others_do_not() -> None:
    """And fit into the registers of a CTA: 384 threads may have 168 each at launch."""
    gemms = [kernel for kernel in built_kernels() if kernel.is_gemm]
    of_fp8 = [kernel for kernel in gemms if is_of_fp8_tile(kernel)]
    assert of_fp8 and len(of_fp8) < len(gemms)
    for kernel in gemms:
        right, wrong = ("QGMMA", "HGMMA") if kernel in of_fp8 else ("HGMMA", "QGMMA")
        assert kernel.opcodes[right] and not kernel.opcodes[wrong], kernel.name
        assert kernel.registers <= 168, kernel.name


def test_library_loads_without_a_driver() -> None:
    # In a process of its own: flux may have loaded the file already, and a crash must not take pytest down.
    code = f"import torch; torch.ops.load_library({str(built_library())!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def compile_kernel(folder: Path, source: str, *flags: str) -> Path:
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("nvcc is not on PATH")
    (folder / "kernel.cu").write_text(source)
    command = [nvcc, "-cubin", "-O3", *flags, "-o", "kernel.cubin", "kernel.cu"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "kernel.cubin"


@needs_tools
def test_check_finds_a_gemm_without_tensor_cores_and_local_memory(tmp_path: Path) -> None:
    source = """
extern "C" __global__ void sm90_gemm_by_hand(const int* index, float* out) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = out[i];
  for (int i = 0; i < 64; ++i) values[index[i]] += 1.0f;
  for (int i = 0; i < 64; ++i) out[i] = values[index[i]];
}
"""
    (kernel,) = check_sass.read_kernels(
        compile_kernel(tmp_path, source, "-gencode=arch=compute_90,code=sm_90")
    )
    faults = "\n".join(kernel.faults())
    assert kernel.name == "sm90_gemm_by_hand"
    for expected in ("local memory", "no wgmma", "no TMA load", "setmaxnreg dropped"):
        assert expected in faults


def test_a_longer_mainloop_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    sass = """
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0020*/                   HGMMA.64x64x16.F32 R24, gdesc[UR8], R24, UP0 ;
        /*0030*/              @!P1 IADD3 R2, R2, 0x1, RZ ;
        /*0040*/               @P0 BRA 0x20 ;
        /*0050*/               @P0 BRA 0x10 ;
        /*0060*/                   EXIT ;
"""
    assert check_sass.mainloop_instructions(sass) == 3
    assert check_sass.mainloop_instructions(sass.replace("HGMMA", "FFMA")) == 0
    kernels = [
        check_sass.Kernel("gemm", Counter(HGMMA=n), registers=90, stack_bytes=0, tma_loops=0, mainloop=n)
        for n in (100, 101, 102)
    ]
    assert check_sass.compare(kernels[:1], kernels[1:2])
    assert not check_sass.compare(kernels[:1], kernels[2:])
    assert "LONG  instructions   100 ->   102  mainloop   100 ->   102" in capsys.readouterr().out


def test_a_division_before_each_load_is_reported() -> None:
    sass = """
        /*0010*/                   MUFU.RCP R4, R4 ;
        /*0020*/                   MUFU.RCP R5, R5 ;
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0040*/              @!P0 BRA 0x30 ;
        /*0050*/                   UTMALDG.2D [UR8], [UR4] ;
        /*0060*/               @P1 BRA 0x20 ;
        /*0070*/               @P2 BRA 0x10 ;
        /*0080*/                   EXIT ;
"""
    assert check_sass.divisions_beside_loads(sass) == 1
    assert check_sass.divisions_beside_loads(sass.replace("UTMALDG.2D", "LDG.E")) == 0
    kernel = check_sass.Kernel("sum", Counter(), 90, 0, 0, divisions=1)
    assert kernel.faults() == ["1 divisions in a loop of TMA loads (not taken out of it?)"]


def test_log_check_finds_complaints_only() -> None:
    good = """
ptxas info    : Used 168 registers, used 10 barriers
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
[3/10] Building CUDA object CMakeFiles/flux_gemm.dir/csrc/gemm/gemm.cu.o
"""
    bad = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    0 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas warning : Registers are spilled to local memory in function 'f', 16 bytes spill stores
"""
    assert check_sass.log_faults(good) == []
    assert len(check_sass.log_faults(bad)) == 5
