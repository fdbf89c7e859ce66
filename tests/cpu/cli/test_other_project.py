"""PyPI has another project called flux, which installs into the same folder: the command says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flux_kernels
from flux import _native
from flux.cli import app, findings


def command(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`flux doctor` where `path` comes before all other packages."""
    run = [sys.executable, *options, "-m", "flux_kernels", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(run, cwd=path, env=environment, capture_output=True, text=True)


def test_another_package_in_the_way(tmp_path: Path) -> None:
    package = tmp_path / "flux"
    package.mkdir()
    (package / "__init__.py").write_text("from .timeline import Timeline\n")
    shutil.copy2(flux_kernels.__file__, tmp_path)
    run = command(tmp_path)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.startswith(f"flux: `import flux` finds {package / '__init__.py'}, which is not part of")
    assert run.stderr.count("\n") == 1 and "rename what is in the way" in run.stderr


def test_a_package_that_an_uninstallation_has_hollowed_out(tmp_path: Path) -> None:
    (tmp_path / "flux").mkdir()
    shutil.copy2(flux_kernels.__file__, tmp_path)
    run = command(tmp_path, "-S")
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
