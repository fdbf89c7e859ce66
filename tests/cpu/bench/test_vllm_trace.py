"""The fixed requests of benchmarks/vllm_throughput.py (vllm_trace.py). Needs no vLLM."""

from __future__ import annotations

import hashlib
import statistics
from typing import Any

from bench_scripts import script

trace = script("vllm_trace")


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
