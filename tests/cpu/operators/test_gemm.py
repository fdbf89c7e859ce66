"""flux.gemm by inductor, what flux.explain says of it, variables of the environment, and what is logged."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch

import flux
from flux import _env
from flux._log import say_once


def test_compile_with_inductor() -> None:
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++")):
        pytest.skip("inductor needs a C++ compiler, this machine has none")
    # Nothing but flux calls: inductor's own kernels would take 10 s to compile.
    compiled = torch.compile(lambda x, w: flux.gemm(flux.gemm(x, w), w), fullgraph=True)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    torch.testing.assert_close(compiled(x, weight), flux.gemm(flux.gemm(x, weight), weight))


def test_explain_says_why() -> None:
    plan = flux.explain("gemm", 128, 256, 512)
    if torch.cuda.is_available():
        pytest.skip("explains the plan of this machine's GPU instead")
    assert not plan.by_flux
    assert "torch.mm" in plan.reason
    assert "unfused" in str(plan)
    with pytest.raises(ValueError, match="explain: op: expected one of gemm, gemm_rs, .*, got 'conv'"):
        flux.explain("conv", 1, 1, 1)
    with pytest.raises(ValueError, match="explain: dtype: expected .* got torch.int8"):
        flux.explain("gemm", 1, 1, 1, torch.int8)
    with pytest.raises(ValueError, match="explain: k: expected a size, got -1"):
        flux.explain("gemm", 1, 1, -1)


def test_environment_table(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [variable.name for variable in _env.VARIABLES]
    assert len(set(names)) == len(names) and all(name.startswith("FLUX_") for name in names)
    for variable in _env.VARIABLES:
        variable.parse(variable.default)
        assert variable.name in _env.table()
    monkeypatch.setenv("FLUX_TIMEOUT_S", "2.5")
    assert _env.timeout_s() == 2.5
    monkeypatch.setenv("FLUX_TIMEOUT_S", "-1")
    with pytest.raises(ValueError, match="FLUX_TIMEOUT_S='-1': must be a positive number of seconds"):
        _env.timeout_s()


def test_a_message_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flux"):
        for _ in range(2):
            say_once("a message of this test")
            say_once("another", logging.INFO)
    told = [(record.levelname, record.message) for record in caplog.records]
    assert told == [("WARNING", "a message of this test"), ("INFO", "another")]
