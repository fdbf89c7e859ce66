"""The timing protocol, against a clock that the test turns."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from flux.bench import timing
from flux.bench.cases import OPS, peers
from flux.bench.cases.common import Context, rotating
from flux.bench.cases.operands import random_operands
from flux.bench.suites import Problem
from flux.bench.timing import GpuTimer, drawn
from flux.integrations import async_tp
from flux.testing import spawn

CYCLES_PER_MS = 1_000_000.0


class FakeGpu:
    """A GPU with one stream: work is queued with its length, and runs while the host's clock stands still.

    host, gpu: times in ms; gpu is when everything queued so far will be done. A host that finds the queue
    full waits for room.
    """

    queue_length = 1000

    def __init__(self) -> None:
        self.host = 0.0
        self.gpu = 0.0
        self.log: list[str] = []
        self._queue: deque[float] = deque()  # when each will be done

    def enqueue(self, name: str, gpu_ms: float, host_ms: float) -> None:
        self.log.append(name)
        if len(self._queue) == self.queue_length:
            self.host = max(self.host, self._queue.popleft())
        self.gpu = max(self.gpu, self.host) + gpu_ms
        self._queue.append(self.gpu)
        self.host += host_ms

    def sleep(self, cycles: int) -> None:
        self.enqueue("delay", cycles / CYCLES_PER_MS, 0.0)

    def synchronize(self, *args: object) -> None:
        self.host = max(self.host, self.gpu)

    def event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.at = 0.0

    def record(self) -> None:
        # Where the stream is idle, the event happens as soon as the host says so.
        self.at = max(self._gpu.gpu, self._gpu.host)
        self._gpu.log.append("event")

    def query(self) -> bool:
        return self.at <= self._gpu.host

    def synchronize(self) -> None:
        self._gpu.host = max(self._gpu.host, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(timing, "_cuda", SimpleNamespace(_sleep=fake.sleep, Event=fake.event))
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: fake.host / 1e3)
    return fake


def make_timer(gpu: FakeGpu) -> GpuTimer:
    timer = GpuTimer(None, torch.device("cpu"))
    gpu.log.clear()
    return timer


def test_a_burst_excludes_host_time(gpu: FakeGpu) -> None:
    """The host needs ten times as long as the GPU, and the sample still says what the GPU needed."""
    timer = make_timer(gpu)
    slow_host = {"a": lambda: gpu.enqueue("a", gpu_ms=0.05, host_ms=0.5)}
    assert timer.interleaved(slow_host, 20, 3)["a"] == pytest.approx([0.05] * 3)
    assert timer.host_bound == []


def test_candidates_take_turns_behind_a_delay(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is drawn anew in each round: nobody always comes after the same."""
    timer = make_timer(gpu)
    calls = {name: lambda name=name: gpu.enqueue(name, 0.1, 0.01) for name in "abc"}
    monkeypatch.setattr(timer, "_enqueue_once", lambda call: 0.01)
    samples = timer.interleaved(calls, 2, 4)
    bursts = [
        ["delay", "event", name, name, "event"] for number in range(4) for name in drawn([*"abc"], number)
    ]
    orders = {tuple(drawn([*"abc"], number)) for number in range(30)}
    assert len(orders) == 6 and drawn([*"abc"], 3) == drawn([*"abc"], 3)
    assert gpu.log == [step for burst in bursts for step in burst]
    assert samples["a"] == pytest.approx([0.1] * 4)


def test_all_candidates_rest_as_long(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the one whose host is slowest needs, within a limit: a GPU that has rested is faster."""
    timer, delays = make_timer(gpu), []
    monkeypatch.setattr(gpu, "sleep", None)
    monkeypatch.setattr(timer, "_delay", lambda ms: (delays.append(ms), gpu.enqueue("delay", ms, 0.0)))
    quick = lambda: gpu.enqueue("quick", 0.1, 0.01)  # noqa: E731
    for host_ms, rest in ((0.5, 10.3), (4.0, 50.3)):
        slow = partial(gpu.enqueue, "slow", 0.1, host_ms)
        guesses = iter((0.01, host_ms))
        monkeypatch.setattr(timer, "_enqueue_once", lambda call, guesses=guesses: next(guesses))
        delays.clear()
        timer.interleaved({"quick": quick, "slow": slow}, 20, 2)
        longest = 20 * host_ms + 0.3
        order = [name for number in (0, 1) for name in drawn(["quick", "slow"], number)]
        # The first two only try whether a burst fits the queue.
        expected = [rest, longest, *(rest if name == "quick" else longest for name in order)]
        assert delays == pytest.approx(expected)


def test_calls_of_a_slow_host_come_in_shorter_bursts(gpu: FakeGpu) -> None:
    """For 20 of them no delay would be long enough."""
    timer = make_timer(gpu)
    calls = {
        "model": lambda: gpu.enqueue("model", 5.0, 60.0),
        "quick": lambda: gpu.enqueue("quick", 5.0, 0.01),
    }
    samples = timer.interleaved(calls, 20, 3)
    assert samples == {name: pytest.approx([5.0] * 3) for name in calls} and timer.host_bound == []
    tried, rounds = 20 + 10, 3
    # Who takes the host long is also looked at on an idle GPU: it may only be waiting.
    guesses = {"model": 6, "quick": 3}
    for name in calls:
        assert gpu.log.count(name) == guesses[name] + tried + 10 * rounds


def test_calls_of_many_launches_come_in_bursts_that_fit_the_queue(gpu: FakeGpu) -> None:
    """However long the delay, a host that has filled the queue would wait until the burst has begun."""
    timer = make_timer(gpu)

    def model() -> None:
        for _ in range(gpu.queue_length // 4):
            gpu.enqueue("launch", 0.01, 0.02)

    samples = timer.interleaved({"model": model, "quick": lambda: gpu.enqueue("quick", 5.0, 0.01)}, 20, 3)
    milliseconds = {"model": 0.01 * (gpu.queue_length // 4), "quick": 5.0}
    assert samples == {name: pytest.approx([ms] * 3) for name, ms in milliseconds.items()}
    assert timer.host_bound == []
    first_guess, tried, rounds = 3, 20 + 10 + 5 + 2, 3
    assert gpu.log.count("quick") == first_guess + tried + 2 * rounds


def test_late_samples_are_repeated_with_a_longer_delay(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first guess that is far too short costs rounds, but no wrong sample is kept."""
    timer = make_timer(gpu)
    monkeypatch.setattr(timer, "_enqueue_once", lambda call: 0.05)
    samples = timer.interleaved({"a": lambda: gpu.enqueue("a", 0.1, 0.3)}, 20, 4)
    assert samples["a"] == pytest.approx([0.1] * 4)
    assert timer._enqueue_ms["a"] > 0.2
    assert gpu.log.count("delay") > 4


def test_a_candidate_that_never_stays_ahead_still_has_samples(gpu: FakeGpu) -> None:
    """Something that blocks the host, like a synchronisation inside the call, cannot be hidden by a delay."""
    timer = make_timer(gpu)

    def blocks() -> None:
        gpu.enqueue("a", 0.1, 0.0)
        gpu.synchronize()

    samples = timer.interleaved({"a": blocks}, 20, 2)["a"]
    assert timer.host_bound == ["a"]
    assert len(samples) == 5 and all(s == pytest.approx(0.1) for s in samples)


def test_a_candidate_that_waits_for_the_gpu_does_not_make_the_others_rest(gpu: FakeGpu) -> None:
    timer = make_timer(gpu)
    begun = gpu.host

    def waits() -> None:
        gpu.synchronize()
        gpu.enqueue("waits", 0.1, 0.2)

    samples = timer.interleaved({"waits": waits, "quick": lambda: gpu.enqueue("quick", 0.1, 0.01)}, 20, 7)
    assert timer.host_bound == ["waits"]
    assert samples["quick"] == pytest.approx([0.1] * 7)
    # 17 bursts of 20 calls; 3.2 s when all rested as long as the one that waits seemed to need.
    assert gpu.host - begun < 250


def test_host_cost_is_not_gpu_time(gpu: FakeGpu) -> None:
    timer = make_timer(gpu)
    assert timer.host_us(lambda: gpu.enqueue("a", gpu_ms=5.0, host_ms=0.012)) == pytest.approx(12.0)


def test_data_is_random_normal() -> None:
    context = Context(1, 4, 4, torch.device("cpu"), torch.bfloat16, None)
    given = random_operands(Problem("gemm", "a", "local", 256, 128, 512), context)
    x, (weight,) = given.x, given.weights
    for tensor, rows in ((x, 256), (weight, 128)):
        assert tensor.shape == (rows, 512) and tensor.dtype == torch.bfloat16
        assert abs(float(tensor.float().std()) - 0.1) < 0.01
        assert len(tensor.unique()) > 1000


def test_weights_rotate() -> None:
    seen: list[float] = []
    call = rotating([torch.tensor(float(i)) for i in range(3)], lambda w: seen.append(float(w)))
    for _ in range(6):
        call()
    assert sorted(seen[:3]) == [0.0, 1.0, 2.0] and seen[:3] == seen[3:]


# What the benchmark prepares on GPUs, on CPU processes that pretend to be some: all candidates, and that each
# can be called. torch's fused operators are flux's (flux.integrations.async_tp), graphs replay nothing.

# By operator and scales: the candidates beside flux and flux in parts.
WANTED = {
    ("gemm", ""): {"cuBLAS"},
    ("gemm_rs", ""): {"cuBLAS", "NCCL", "cuBLAS+NCCL", "flux.gemm", "async-TP", "flux, int8"},
    ("ag_gemm", ""): {"cuBLAS", "NCCL", "NCCL+cuBLAS", "flux.gemm", "flux.all_gather", "async-TP"},
    ("gemm_ar", ""): {"cuBLAS", "flux.gemm", "NCCL", "flux.all_reduce"}
    | {f"cuBLAS+{name}" for name in ("NCCL", "one-shot", "two-shot")},
    ("gemm_ar_norm", ""): {"cuBLAS", "flux.gemm_ar+norm"}
    | {f"cuBLAS+{name}" for name in ("NCCL", "one-shot", "two-shot")},
    ("all_reduce", ""): {"NCCL", "one-shot", "two-shot"},
    ("gemm_rs", "row"): {"flux, bf16", "flux, fast", "flux, int8", "NCCL", "async-TP"}
    | {part for name in ("flux.gemm", "_scaled_mm") for part in (name, f"{name}+NCCL")},
    ("ag_gemm", "row"): {"flux, bf16", "flux, fast", "NCCL", "async-TP"}
    | {part for name in ("flux.gemm", "_scaled_mm") for part in (name, f"NCCL+{name}")},
    ("gemm_ar", "block"): {"flux, bf16", "NCCL", "flux.gemm"}
    | {f"flux.gemm+{name}" for name in ("NCCL", "one-shot", "two-shot")},
}


def pretended() -> ExitStack:
    """A GPU with a small L2, whose stream and memory are the CPU's."""
    async_tp.install()
    properties = SimpleNamespace(L2_cache_size=100_000, multi_processor_count=132)
    sums = SimpleNamespace(
        one_shot_all_reduce_out=lambda x, op, group, out: out.copy_(x),
        two_shot_all_reduce_=lambda x, op, group: x,
    )
    stack = ExitStack()
    for target, name, stand_in in (
        (Context, "cuda", True),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None)),
        (torch.cuda, "graph", lambda graph, **_: nullcontext()),
        (_symmetric_memory, "enable_symm_mem_for_group", lambda name: None),
        (_symmetric_memory, "empty", lambda *shape, dtype, device: torch.empty(*shape, dtype=dtype)),
        (_symmetric_memory, "rendezvous", lambda *_: None),
        (peers, "_symm_mem", sums),
    ):
        stack.enter_context(mock.patch.object(target, name, stand_in))
    return stack


def prepared(rank: int, world_size: int) -> dict[tuple[str, str], tuple[set[str], list[str], list[str]]]:
    """Names, notes, and the candidates of whole operators whose results are not flux's."""
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.bfloat16, dist.group.WORLD)
    context, told = context.with_twins(("parts",)), {}
    with pretended():
        for op, scales in WANTED:
            pattern = "local" if op == "gemm" else op.removesuffix("_norm")
            problem = Problem(op, "custom", pattern, 64, 256, 512, scales=scales)
            lineup = OPS[op].case.prepare(problem, context)
            results: dict[str, Any] = {c.name: (c.eager or c.call)() for c in lineup.candidates}
            for each in lineup.candidates:
                each.call()
            want, wrong = results["flux"], []
            got = {"async-TP": results.get("async-TP"), "flux, parts": results.get("flux, parts")}
            for name, result in got.items():
                result = result[1][0] if isinstance(result, tuple) and name == "async-TP" else result
                if isinstance(result, torch.Tensor) and not torch.allclose(
                    result.float(), want.float(), rtol=0.05, atol=0.05
                ):
                    wrong.append(name)
            told[op, scales] = ({c.name for c in lineup.candidates}, lineup.notes, wrong)
    return told


def test_candidates_on_gpus() -> None:
    for told in spawn(prepared, 2, backend="gloo", timeout_s=200):
        for (op, scales), (names, notes, wrong) in told.items():
            assert names - {"flux", "flux, parts"} == WANTED[op, scales], (op, scales, notes)
            assert "flux" in names and ("flux, parts" in names) == (op not in ("gemm", "all_reduce"))
            assert wrong == [], (op, scales)
            # torch multiplies with block scales on GPUs only.
            usual = ("is not installed", "_scaled_mm with block scales")
            said = [note for note in notes if not any(words in note for words in usual)]
            assert said == [], (op, scales)
