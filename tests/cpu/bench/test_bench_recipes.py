"""benchmarks/peers: builds and benchmarks of other projects, with stand-ins in the place of their sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "benchmarks/peers/run.py"
# The lines of CUTLASS's example that a recipe changes.
EXAMPLE = """
using TP = _8;
using DistSchedule = cutlass::distributed::schedules::AllGather1D_TilingCD_RotatingA<TP>;
using         ElementA    = cutlass::half_t;                                // Element type
using         ElementB    = cutlass::half_t;
using         ElementC    = cutlass::half_t;
using ElementAccumulator  = cutlass::half_t;
using ElementCompute      = cutlass::half_t;
"""
# Builds nothing; the "binary" tells what it was asked for, and fails for one number of rows.
CMAKE = """#!/bin/sh
if [ "$1" = --build ]; then
  mkdir -p build/examples/65_distributed_gemm
  cat > build/examples/65_distributed_gemm/65_distributed_gemm <<'END'
#!/bin/sh
case "$*" in *--m=2048*) echo "Disposition (eps: 1e-5): Failed"; exit 255;; esac
echo "  Disposition (eps: 1e-5): Passed"
echo "  Avg runtime: 0.25 ms"
END
  chmod +x build/examples/65_distributed_gemm/65_distributed_gemm
fi
"""
LAUNCH = """#!/bin/sh
[ "$CUDA_VISIBLE_DEVICES" = 0,1 ] || exit 3
echo "torch #0: gemm 9.0 ms, comm 9.0 ms, total 18.0 ms"
echo "flux  #0: gemm 0.400 ms, comm 0.100 ms, total 0.500 ms"
echo "flux  #1: gemm 0.400 ms, comm 0.200 ms, total 0.600 ms"
echo "flux check passed"
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def recipe(*arguments: str | Path, folder: Path) -> tuple[int, str]:
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, RECIPE, *arguments], capture_output=True, text=True, env=env)
    return done.returncode, done.stdout + done.stderr


def test_distributed_gemm_of_cutlass(tmp_path: Path) -> None:
    name = "examples/65_distributed_gemm/65_distributed_gemm.cu"
    script(tmp_path / "cutlass" / name, EXAMPLE)
    script(tmp_path / "bin/cmake", CMAKE)
    out = tmp_path / "out.json"
    options = ("--sources", tmp_path / "cutlass", "--tp", "4", "--json", out)
    status, told = recipe("distgemm", "gemm_rs", *options, folder=tmp_path)
    assert status == 1, told  # one number of rows fails, the others go on
    built = (tmp_path / "cutlass-gemm_rs-tp4" / name).read_text()
    assert "using TP = _4;" in built and "schedules::ReduceScatter1D_TilingA_RotatingC<TP>" in built
    assert built.count("cutlass::bfloat16_t;") == 3 and built.count("= float;") == 2 and "half_t" not in built
    assert (tmp_path / "cutlass" / name).read_text() == EXAMPLE
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 20 and {row["ms"] for row in rows if "ms" in row} == {0.25}
    assert {row["m"] for row in rows if "failed" in row} == {2048}
    (tmp_path / "cutlass" / name).write_text(EXAMPLE.replace("using TP = _8;", ""))
    status, told = recipe("distgemm", "gemm_rs", *options, folder=tmp_path)
    assert status == 1 and "is it of another version of CUTLASS?" in told


def test_the_other_flux(tmp_path: Path) -> None:
    script(tmp_path / "other/launch.sh", LAUNCH)
    script(tmp_path / "other/build.sh", '#!/bin/sh\necho "$@" > built\n')
    out = tmp_path / "out.json"
    options = ("--sources", tmp_path / "other", "--json", out)
    status, told = recipe("bytedance", "ag_gemm", *options, "--tp", "2", folder=tmp_path)
    assert status == 0, told
    assert (tmp_path / "other/built").read_text() == "--arch 90 --sm-cores 132 --nvshmem\n"
    assert {row["ms"] for row in json.loads(out.read_text())["rows"]} == {0.6}  # of the slowest rank
    script(tmp_path / "other/launch.sh", LAUNCH.replace('echo "flux check passed"', ""))
    status, told = recipe("bytedance", "ag_gemm", *options, "--tp", "2", folder=tmp_path)
    assert status == 1 and all(
        "no right result" in row["failed"] for row in json.loads(out.read_text())["rows"]
    )
