"""What `flux bench` asks before a run that is too much for CPUs."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from flux.bench.cases import e2e, moe
from flux.bench.cases.layer import LayerProblem
from flux.bench.runner import Settings
from flux.bench.suites import Problem
from flux.cli import app, estimate
from flux.cli import bench as bench_cli
from flux.cli.bench import choose
from flux.cli.estimate import Estimate

runner = CliRunner()
MUCH = Estimate(7200.0, 50 * 2**30, 20 * 2**30)
SIZES = ["--cpu", "--m", "64", "--n", "64", "--k", "64"]


def cpu(ops: list[str], **changes: object) -> Settings:
    options: dict[str, object] = dict.fromkeys(("suite", "n", "k", "dtype", "world", "tp"))
    return choose(ops, **{**options, "models": [], "m": [], "cpu": True, **changes})  # type: ignore[arg-type]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The runs that were started, on a machine for which every run is too much."""
    started: list[Settings] = []
    monkeypatch.setattr(bench_cli, "run", started.append)
    monkeypatch.setattr(bench_cli, "estimate", lambda settings: MUCH)
    return started


def test_without_a_terminal_it_refuses_and_says_how_to_go_on(ran: list[Settings]) -> None:
    result = runner.invoke(app, ["bench", "gemm_rs", *SIZES])
    assert result.exit_code == 2 and ran == []
    (line,) = result.stderr.splitlines()
    for word in ("2 hours", "50 GiB of memory (20 GiB are free)", "--timeout 3600 would stop it", "--yes"):
        assert word in line


def test_yes_announces_and_runs(ran: list[Settings]) -> None:
    result = runner.invoke(app, ["bench", "gemm_rs", "--yes", "--timeout", "9000", *SIZES])
    assert result.exit_code == 0 and len(ran) == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("On these CPUs this run takes about 2 hours and 50 GiB")
    assert "--timeout" not in line


@pytest.mark.parametrize(
    ("answer", "status", "runs"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0), ("", 1, 0)]
)
def test_on_a_terminal_it_asks(
    ran: list[Settings], monkeypatch: pytest.MonkeyPatch, answer: str, status: int, runs: int
) -> None:
    monkeypatch.setattr(bench_cli, "_somebody_to_ask", lambda: True)
    result = runner.invoke(app, ["bench", "gemm_rs", *SIZES], input=answer)
    assert (result.exit_code, len(ran)) == (status, runs)
    assert "Go on? [y/N]" in result.stderr


def test_the_default_run_never_asks(ran: list[Settings]) -> None:
    assert runner.invoke(app, ["bench", "--cpu", "--timeout", "100"]).exit_code == 0
    assert len(ran) == 1


def test_little_runs_start_at_once(ran: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cli, "estimate", lambda settings: Estimate(299.0, 9.0, 20.0))
    result = runner.invoke(app, ["bench", "gemm_rs", *SIZES])
    assert (result.exit_code, result.output, len(ran)) == (0, "", 1)


def test_a_torchrun_asks_once(ran: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 decides, and the others wait for it."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for rank, status, runs in (("1", 0, 1), ("0", 2, 1)):
        monkeypatch.setenv("RANK", rank)
        assert runner.invoke(app, ["bench", "gemm_rs", *SIZES]).exit_code == status
        assert len(ran) == runs


def test_much_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "flops_per_s", lambda dtype: 5e10)
    monkeypatch.setattr(estimate, "free_memory", lambda: 16.0 * 2**30)
    monkeypatch.setattr(estimate.os, "sched_getaffinity", lambda pid: {0, 1})
    small = estimate.estimate(cpu(["gemm_rs"], n=512, k=512, m=[512]))
    assert not small.is_much and small.seconds < 10
    assert not estimate.estimate(cpu([])).is_much
    # 2 M N K operations for each of 81 calls and 6 checks, on 2 cores: 27 * 3 + 6 times 11 s, without data.
    large = estimate.estimate(cpu(["gemm_rs"], n=8192, k=8192, m=[8192]))
    assert large.is_much and 87 * 2 * 8192**3 / 1e11 < large.seconds < 3 * 87 * 11
    assert estimate.estimate(cpu([], suite="default")).seconds > 36000
    # Weights of 256 experts.
    experts = estimate.estimate(cpu(["moe_layer0"], models=["deepseek-v3"], m=[64]))
    assert experts.memory > 4 * 256 * 4096 * 7168


def test_work_of_each_kind() -> None:
    """Weights, activations and operations of one of two ranks."""

    def work(problem: Problem) -> tuple[float, float, float]:
        return estimate.work(problem, 2, 2)[:3]

    dense = Problem("gemm_rs", "a", "gemm_rs", 8, 16, 32)
    assert work(dense) == (16 * 16, 8 * (16 + 16), 2 * 8 * 16 * 16)
    assert work(Problem("all_reduce", "a", "all_reduce", 8, 16, 32))[::2] == (0, 0)
    layer = moe.problem("moe_layer1", "tiny", 8)  # 8 experts of 128 x 256, 2 for each of 8 tokens
    assert work(layer)[::2] == (8 * 128 * 128, 2 * 16 * 128 * 128)
    spread = moe.problem("moe_layer1", "tiny", 8, ep_size=2)
    assert work(spread)[::2] == (4 * 128 * 256, 2 * 8 * 128 * 256)
    forward, training = (work(LayerProblem.of(op, "tiny", 64)) for op in ("layer_forward", "layer_training"))
    assert training[2] == 3 * forward[2] and training[0] == forward[0]


def test_weights_of_a_whole_model() -> None:
    (model, _) = e2e.rows(bench_cli.Request("e2e_prefill", False, 2, ("tiny", "tiny"), (32,), layers=3))
    assert isinstance(model, e2e.ModelProblem)
    # Queries and output, keys and values, three matrices of the MLP; embedding and head.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    assert e2e.weights(model) == 3 * layer + 2 * 256 * 128


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 seconds"), (119, "119 seconds"), (600, "10 minutes"), (7200, "2 hours"), (1e6, "12 days")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert estimate.duration(seconds) == text


def test_this_machine_is_measured() -> None:
    threads = torch.get_num_threads()
    assert 1e7 < estimate.flops_per_s(torch.float32) < 1e13
    assert torch.get_num_threads() == threads
    assert 2**20 < estimate.free_memory() < 2**50
