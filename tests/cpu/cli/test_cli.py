"""The command line on a machine without a GPU: what users type, what they see, and the exit status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flux_kernels
from flux import _native
from flux.bench import record
from flux.bench.runner import Settings
from flux.cli import app, findings, links, verify_cases, verify_moe
from flux.cli.bench import Asked, choose
from flux.cli.findings import Finding
from flux.testing.compare import compare

runner = CliRunner()
no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests the CPU path's defaults; this machine has a GPU"
)

_TINY = ["--cpu", "--world", "2", "--iters", "1", "--rounds", "2", "--dtype", "fp32"]


def choose_cpu(ops: list[str], **changes: object) -> Settings:
    return choose(Asked.of({"ops": ops, "cpu": True, **changes}))


def test_bench_two_processes(tmp_path: Path) -> None:
    """Fused against unfused on a shape of several tiles; table, JSON, picture; then the stored file."""
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    file, picture = tmp_path / "r.json", tmp_path / "p.png"
    shape = ["--n", "264", "--k", "128", "--m", "264", "--json", str(file), "--plot", str(picture)]
    result = runner.invoke(app, ["bench", "gemm_rs", "ag_gemm", "gemm", *shape, *_TINY])
    assert result.exit_code == 0, result.output
    assert "unfused" in result.stdout and "exact" in result.stdout
    stored = record.read(file)
    assert stored.complete and stored.settings["world"] == 2
    fused, gathering, plain = stored.rows
    assert fused.check == gathering.check == plain.check == "exact"
    assert fused.local == (264, 264, 64) and plain.local == (264, 264, 128)
    assert gathering.local == (264, 132, 128)
    assert set(fused.times) == {"flux", "flux, parts", "torch", "gloo", "torch+gloo"}
    assert set(gathering.times) == {"flux", "flux, parts", "torch", "gloo", "gloo+torch"}
    assert all(len(t.samples) == 2 and t.min > 0 for t in fused.times.values())
    # Each of two ranks keeps half of its fp32 partial and sends the other half.
    assert (fused.wire_bytes, plain.wire_bytes) == (264 * 264 * 4 // 2, 0)
    # Each sends its half of x.
    assert gathering.wire_bytes == 132 * 128 * 4
    assert picture.read_bytes().startswith(b"\x89PNG")

    shown = runner.invoke(app, ["bench", "--show", str(file), "--plot", str(tmp_path / "again.png")])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.split("picture:")[0] == result.stdout.split("picture:")[0]
    assert (tmp_path / "again.png").exists()


def test_bench_alone_leaves_peers_out_and_still_checks(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    shape = ["--n", "64", "--k", "64", "--m", "64", "--json", str(file)]
    result = runner.invoke(app, ["bench", "gemm_rs", "--alone", *shape, *_TINY])
    assert result.exit_code == 0, result.output
    (row,) = record.read(file).rows
    assert row.check == "exact" and set(row.times) == {"flux", "torch"}


def test_bench_says_what_failed_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_TIMEOUT_S", "soon")
    done = runner.invoke(app, ["bench", "gemm_rs", *_TINY, "--n", "64", "--k", "64", "--m", "64"])
    assert done.exit_code == 1
    assert "rank 0 raised" in done.stderr or "rank 1 raised" in done.stderr
    assert done.stderr.count("Traceback") == 1, "the first rank in full, the other in a line"
    assert done.stderr.count("FLUX_TIMEOUT_S='soon'") >= 2


def test_verify_two_processes(tmp_path: Path) -> None:
    result = runner.invoke(app, ["verify", "--cpu", "--world", "2", "--json", str(tmp_path / "v.json")])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "v.json").read_text())
    assert report["ok"] and {o["op"] for o in report["outcomes"]} == {"gemm", *verify_cases.ALL}
    for op in verify_cases.COLLECTIVES:
        names = [name for name, _ in verify_cases.named_cases(2, "cpu", op)]
        assert [o["case"] for o in report["outcomes"] if o["op"] == op] == names
    mixtures = [name for name, _ in verify_moe.named_cases(2)]
    assert [o["case"] for o in report["outcomes"] if o["op"] == "moe"] == mixtures
    assert {o["state"] for o in report["outcomes"]} == {"exact"}


def test_verify_reaches_both_transports_on_gpus() -> None:
    for op in ("ag_gemm", "all_gather"):
        cases = verify_cases.named_cases(2, "cuda", op)
        copied = [name for name, case in cases if verify_cases.is_copied(case)]
        assert copied == ["by copy engine"] and len(cases) > 5


def test_verify_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1 and a place in the result if one element of one op is off by one."""
    import flux

    exact = flux.gemm

    def off_by_one(*args: object, **kwargs: object) -> torch.Tensor:
        result = exact(*args, **kwargs)  # type: ignore[arg-type]
        result[-1, -1] += 1
        return result

    monkeypatch.setattr(flux, "gemm", off_by_one)
    monkeypatch.setattr(verify_cases, "ranks", lambda *a: iter(()))
    result = runner.invoke(app, ["verify", "--cpu"])
    assert result.exit_code == 1
    assert "1 of" in result.stdout and "0 exact" in result.stdout


@no_gpu
def test_emulation_says_why_it_cannot() -> None:
    (outcome,) = verify_cases.emulated(4, torch.device("cuda", 0))
    assert (outcome.state, outcome.detail) == ("skipped", "there is no GPU")


def test_compare_points_at_the_difference() -> None:
    want = torch.arange(6.0).view(2, 3)
    got = want.clone()
    assert compare(got, want) == "exact"
    got[1, 2] = 9
    assert compare(got, want) == "1 of 6 wrong; at [1, 2] got 9, expected 5"
    assert compare(got[:1], want) == "shape [1, 3], expected [2, 3]"
    got[0, 0] = float("nan")
    assert compare(got, want).startswith("2 of 6 wrong")


@no_gpu
def test_defaults_without_a_gpu() -> None:
    settings = choose_cpu([], cpu=False)
    assert (settings.device, settings.world, settings.tp, settings.suite) == ("cpu", 4, 4, "cpu")
    assert {p.op for p in settings.problems} == {"gemm_rs", "ag_gemm", "gemm_ar", "all_reduce"}


def test_gemm_alone_may_have_another_tp() -> None:
    settings = choose_cpu(["gemm"], world=1, tp=4, suite="default", model=["llama3-70b-attn"], m=[512])
    assert {p.local(settings.tp) for p in settings.problems} == {(512, 8192, 2048), (512, 2560, 8192)}
    both = choose_cpu(["gemm", "gemm_rs"], world=1, tp=4)
    assert {p.op for p in both.problems} == {"gemm"}
    assert "gemm_rs left out" in both.skipped[0]


def test_torchrun_decides_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_cpu(["gemm_rs"]).world == 2
    with pytest.raises(ValueError, match="torchrun started 2"):
        choose_cpu(["gemm_rs"], world=4)


@no_gpu
def test_doctor_on_a_healthy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUX_COMMIT", raising=False)
    result = runner.invoke(app, ["doctor", "--json", str(tmp_path / "d.json")])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "d.json").read_text())
    assert report["ok"]
    sections = {f["section"] for f in report["findings"]}
    assert sections == {"versions", "native library", "GPUs", "shared memory", "environment"}
    assert "FLUX_* variables" in result.stdout


@no_gpu
def test_doctor_fails_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_TIMEOUT_S", "soon")
    monkeypatch.setenv("FLUX_TIMEOUTS", "3")
    monkeypatch.setenv("FLUX_UNRELATED_THING", "3")
    result = runner.invoke(app, ["doctor", "--quick"])
    assert result.exit_code == 1
    assert "is FLUX_TIMEOUT_S meant?" in result.stdout
    assert result.stdout.count("✗ FLUX") == 4, "two bad lines, each with its advice"


def test_small_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_frsize, f_blocks, f_bavail = 2**20, 64, 60

    monkeypatch.setattr(findings.os, "statvfs", lambda path: Small)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = findings.shared_memory()
    assert finding.state == "bad" and "--shm-size" in (finding.advice or "")


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31\t0
GPU1\tNV18\t X \tSYS\t0-31\t0
NIC0\tPIX\tSYS\t X
"""
NVLINK = """GPU 0: Some GPU (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: Some GPU (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def test_topology_and_links_are_parsed() -> None:
    assert links.parse_topology(TOPOLOGY) == [["X", "NV18"], ["NV18", "X"]]
    speeds = links.parse_nvlink(NVLINK)
    assert speeds == {0: [26.562, 26.562], 1: [26.562]}
    assert links.expected_gb_per_s(speeds) == pytest.approx(0.8 * 26.562)
    assert links.expected_gb_per_s({}) is None
    assert links.expected_gb_per_s({0: []}) is None


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, object]]:
    """A machine with two linked GPUs, as far as the doctor's report can tell; returns the probes' answers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    full = "".join(
        f"GPU {g}: x\n" + "".join(f"\t Link {i}: 26.562 GB/s\n" for i in range(18)) for g in range(2)
    )
    monkeypatch.setattr(links, "run_text", lambda command: TOPOLOGY if command[1] == "topo" else full)
    answers: dict[str, dict[str, object]] = {
        "symm": {"backend": "cuda", "peers": 2, "gemm_rs": "exact"},
        "push": {"pairs": {"0-1": 385.0, "1-0": 388.0}, "ring": 384.0},
    }
    monkeypatch.setattr(links, "probe", lambda what, timeout_s: answers[what])
    return answers


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {f.name: f for f in found}


def test_good_links(two_gpus: dict[str, dict[str, object]]) -> None:
    found = by_name(list(links.links()))
    assert {f.state for f in found.values()} == {"ok"}
    assert "should give 382" in found["copy-engine push"].value


def test_bad_links_come_with_advice(
    two_gpus: dict[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus["push"] = {"pairs": {"0-1": 385.0, "1-0": 30.0}, "ring": 30.0}
    two_gpus["symm"] = {"error": "no answer within 120 s"}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != (1, 0))
    found = list(links.links())
    bad = by_name([f for f in found if f.state == "bad"])
    assert set(bad) == {"peer access", "symmetric memory", "copy-engine push", "push, all GPUs at once"}
    assert "missing: 1→0" in bad["peer access"].value
    assert "slow: 1→0 30" in (bad["copy-engine push"].advice or "")
    assert all(f.advice for f in bad.values())


def test_quick_doctor_measures_nothing(
    two_gpus: dict[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "probe", lambda *a: pytest.fail("a measurement"))
    assert "copy-engine push" not in by_name(list(links.links(active=False)))


@no_gpu
def test_a_probe_that_fails_is_an_answer() -> None:
    """The real process, on a machine where the measurement cannot work."""
    assert "error" in links.probe("push", 60.0)


# PyPI has another project called flux, which installs into the same folder: the command says so.


def doctor_at(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`flux doctor` where `path` comes before all other packages."""
    run = [sys.executable, *options, "-m", "flux_kernels", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(run, cwd=path, env=environment, capture_output=True, text=True)


def test_another_package_in_the_way(tmp_path: Path) -> None:
    package = tmp_path / "flux"
    package.mkdir()
    (package / "__init__.py").write_text("from .timeline import Timeline\n")
    shutil.copy2(flux_kernels.__file__, tmp_path)
    run = doctor_at(tmp_path)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.startswith(f"flux: `import flux` finds {package / '__init__.py'}, which is not part of")
    assert run.stderr.count("\n") == 1 and "rename what is in the way" in run.stderr


def test_a_package_that_an_uninstallation_has_hollowed_out(tmp_path: Path) -> None:
    (tmp_path / "flux").mkdir()
    shutil.copy2(flux_kernels.__file__, tmp_path)
    run = doctor_at(tmp_path, "-S")
    assert run.returncode == 1
    assert "has lost its __init__.py" in run.stderr
    assert "pip install --force-reinstall --no-deps flux-kernels" in run.stderr


def test_doctor_sees_the_other_project_before_it_does_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flux_kernels.shadowed() is None and flux_kernels.other_project() is None
    assert "other project" not in [finding.name for finding in findings.versions()]
    told = tmp_path / "flux-1.4.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.4\nName: flux\nVersion: 1.4.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = [finding for finding in findings.versions() if finding.name == "other project"]
    assert found.state == "bad" and found.advice is not None
    assert "`flux` 1.4.0" in found.advice and "pip uninstall flux, then pip install" in found.advice


@pytest.mark.parametrize(
    ("torch_version", "torch_cuda", "expected"),
    [
        ("2.10.0+cu130", "13.0", None),
        ("2.14.0a0+gitabc", "13.2", None),
        ("2.9.1+cu130", "13.0", "need torch 2.10 or later, and this is torch 2.9.1+cu130"),
        ("2.13.0+cpu", None, "need a torch with CUDA 13.0, and torch 2.13.0+cpu has no CUDA"),
        ("2.13.0+cu128", "12.8", "need a torch with CUDA 13, and this one has CUDA 12.8"),
    ],
)
def test_kernels_that_this_torch_cannot_load(
    monkeypatch: pytest.MonkeyPatch, torch_version: str, torch_cuda: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(_native.core, "CUDA_VERSION", "13.0")
    why = _native._misfit(torch_version, torch_cuda)
    assert why is None if expected is None else why is not None and expected in why


def test_help_needs_no_torch_and_says_what_each_command_says(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path), str(Path(flux_kernels.__file__).parent)])
    run = subprocess.run(
        [sys.executable, "-m", "flux_kernels", "--help"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and all(line in run.stdout for line in flux_kernels.COMMANDS.values())
    of_typer = {each.name: each.callback.__doc__.strip() for each in app.registered_commands}  # type: ignore[union-attr]
    assert of_typer.keys() == flux_kernels.COMMANDS.keys()
    assert all(of_typer[name].startswith(what) for name, what in flux_kernels.COMMANDS.items())
