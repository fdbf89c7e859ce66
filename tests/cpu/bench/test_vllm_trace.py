"""The fixed requests of benchmarks/vllm_throughput.py (vllm_trace.py). Needs no vLLM."""

from __future__ import annotations

import hashlib
import importlib
import statistics
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from flux.cli import throughput

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("vllm_trace")


def test_requests_are_always_the_same(trace: Any) -> None:
    wanted = trace.requests(2000, 2048)
    lengths = str([(each.prompt, each.answer) for each in wanted]).encode()
    assert hashlib.sha256(lengths).hexdigest()[:16] == "4e9253bebc5b665e"
    assert trace.requests(20, 2048) == wanted[:20]


def test_requests_are_of_many_lengths_and_fit(trace: Any) -> None:
    wanted = trace.requests(2000, 2048)
    assert all(1 <= each.prompt <= 1536 and each.answer >= 1 for each in wanted)
    assert max(each.prompt + each.answer for each in wanted) <= 2048
    assert 240 < statistics.median(each.prompt for each in wanted) < 272
    assert 60 < statistics.median(each.answer for each in wanted) < 68
    assert len({each.prompt for each in wanted}) > 500
    arrivals = [each.arrives for each in wanted]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    assert 0.9 < arrivals[-1] / len(arrivals) < 1.1


class Clock:
    """time, of which only a step of the engine and sleep take some."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Engine:
    """In each step, which takes a second, the oldest request gets a token."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.left: dict[str, int] = {}
        self.added: list[tuple[str, float, int]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert sampling.output_kind == "delta" and sampling.max_tokens == sampling.min_tokens
        self.added.append((name, self.clock.now, len(prompt["prompt_token_ids"])))
        self.left[name] = sampling.max_tokens

    def step(self) -> list[Any]:
        self.clock.now += 1
        name = next(iter(self.left))
        self.left[name] -= 1
        finished = not self.left[name]
        if finished:
            del self.left[name]
        tokens = types.SimpleNamespace(token_ids=[5])
        return [types.SimpleNamespace(request_id=name, outputs=[tokens], finished=finished)]


@pytest.fixture
def engine(trace: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    vllm: Any = types.ModuleType("vllm")
    vllm.SamplingParams = types.SimpleNamespace
    params: Any = types.ModuleType("vllm.sampling_params")
    params.RequestOutputKind = types.SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    clock = Clock()
    monkeypatch.setattr(trace, "time", clock)
    return Engine(clock)


def test_all_at_once(trace: Any, engine: Engine) -> None:
    wanted = [trace.Request(7, 2, 0.0), trace.Request(3, 3, 5.0)]
    served = trace.serve(engine, wanted, 0, 100)
    assert engine.added == [("0", 100.0, 7), ("1", 100.0, 3)]
    assert served == [trace.Served(1.0, 2.0, 2), trace.Served(3.0, 5.0, 3)]
    assert trace.summary(wanted, 0, served) == {
        "seconds": 5.0,
        "tokens_per_s": 1.0,
        "first_s": {"median": 2.0, "p99": 3.0},
        "further_s": {"median": 1.0, "p99": 1.0},
    }


def test_requests_that_arrive_wait_for_the_end_of_a_step(trace: Any, engine: Engine) -> None:
    wanted = [trace.Request(7, 2, 0.0), trace.Request(3, 1, 3.0), trace.Request(3, 1, 18.0)]
    served = trace.serve(engine, wanted, 2, 100)
    # The second comes 1.5 s after the first, amid its last step; the third when nothing is left to do.
    assert [at for _, at, _ in engine.added] == [100.0, 102.0, 109.0]
    assert served == [trace.Served(1.0, 2.0, 2), trace.Served(1.5, 1.5, 1), trace.Served(1.0, 1.0, 1)]
    assert trace.summary(wanted, 2, served)["seconds"] == 10.0


def test_the_times_of_a_trace_are_shown() -> None:
    def sample(seconds: float, first: float) -> dict[str, Any]:
        times = {"first_s": {"median": first, "p99": 3 * first}, "further_s": {"median": 0.01, "p99": 0.02}}
        return {"seconds": seconds, **times}

    shown = throughput._trace("20 per s", [sample(10, 0.1), sample(11, 0.3), sample(10.5, 0.2)])
    assert shown == (
        "trace 20 per s: first token 200.0 ms, in 1 % over 600.0 ms;"
        " each further one 10.0 ms, in 1 % over 20.0 ms; 3 samples 10.0 % apart"
    )
