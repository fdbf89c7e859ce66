"""The installed wheel in an environment of its own (tools/try_wheel.py), without compiler or source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

import flux
import flux_kernels
from flux import _native

WHEEL = os.environ.get("TRIED_WHEEL")
pytestmark = pytest.mark.skipif(WHEEL is None, reason="runs in an environment of its own: make try-wheel")
COMMAND = Path(sys.executable).parent / "flux"


def flux_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(COMMAND), *arguments], cwd=folder, capture_output=True, text=True)


def test_it_is_the_installed_package() -> None:
    environment = Path(sys.prefix)
    assert Path(flux.__file__).is_relative_to(environment)
    assert metadata.version("flux-kernels") in (flux.__version__, f"{flux.__version__}+cpu")
    assert shutil.which("nvcc") is None
    assert flux_kernels.shadowed() is None and flux_kernels.other_project() is None


def test_its_platform_is_named_and_its_size_is_known() -> None:
    assert WHEEL is not None
    wheel = Path(WHEEL)
    assert "-manylinux_2_" in wheel.name
    assert wheel.stat().st_size < 20e6, "pip downloads it for every user"
    names = zipfile.ZipFile(wheel).namelist()
    assert "flux/py.typed" in names and "flux/bench/suites/default.toml" in names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "csrc/"))]


def test_it_does_not_know_the_folders_of_the_machine_that_built_it() -> None:
    assert WHEEL is not None
    with zipfile.ZipFile(WHEEL) as wheel:
        for name in wheel.namelist():
            if name.endswith(".so"):
                text = wheel.read(name)
                assert b"/csrc/" not in text.replace(b"torch/csrc/", b""), name
                assert b"site-packages" not in text, name


def test_kernels_say_in_one_line_why_they_are_not_loaded() -> None:
    why = _native.why_not()
    if torch.version.cuda is None:
        assert why is not None and "\n" not in why
        told = ("has no CUDA", "was built with FLUX_CUDA=off")
        assert [text for text in told if text in why]


def test_commands_run_from_any_folder(tmp_path: Path) -> None:
    for arguments, expected in (
        (("--version",), f"flux {flux.__version__}"),
        (("doctor",), "flux-kernels"),
        (("verify", "--cpu", "--world", "2"), "exact"),
        (("bench", "gemm_rs", "--cpu", "--world", "2", "--m", "64", "--n", "64", "--k", "64"), "gemm_rs"),
    ):
        run = flux_command(*arguments, folder=tmp_path)
        assert run.returncode == 0, f"{arguments}: {run.stdout}{run.stderr}"
        assert expected in run.stdout, f"{arguments}: {run.stdout}{run.stderr}"
    assert list(tmp_path.iterdir()) == [], "commands leave nothing behind"
