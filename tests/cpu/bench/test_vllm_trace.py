"""The fixed requests of benchmarks/vllm_throughput.py (vllm_trace.py). Needs no vLLM."""

from __future__ import annotations

import hashlib
from typing import Any

from bench_scripts import script

trace = script("vllm_trace")


def test_requests_are_always_the_same(trace: Any) -> None:
    wanted = trace.requests(2000, 2048)
    lengths = str([(each.prompt, each.answer) for each in wanted]).encode()
    assert hashlib.sha256(lengths).hexdigest()[:16] == "4e9253bebc5b665e"
    assert trace.requests(20, 2048) == wanted[:20]
