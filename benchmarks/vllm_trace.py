"""The requests that vllm_throughput.py gives all engines, and how an engine serves them."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Medians and spreads of log-normal lengths, as chats have them: most are short, a few very long.
PROMPT, ANSWER = (256, 1.0), (64, 0.8)
SEED = 0


@dataclass(frozen=True)
class Request:
    """How many tokens it has and asks for, and when it arrives, in units of the mean time between two."""

    prompt: int
    answer: int
    arrives: float


@dataclass(frozen=True)
class Served:
    """Seconds from a request's arrival to its first token and to its last, and how many tokens it got."""

    first_s: float
    last_s: float
    tokens: int


def requests(count: int, longest: int) -> list[Request]:
    """The first of an endless list that is always the same, with lengths of at most `longest` tokens.

    A prompt has at most three quarters of them.

    Example::

        requests(2000, 2048)[0]
    """
    draw = random.Random(SEED)

    def length(median: int, spread: float, most: int) -> int:
        return max(1, min(most, round(median * math.exp(spread * _normal(draw)))))

    found, arrives = [], 0.0
    for _ in range(count):
        prompt = length(*PROMPT, 3 * longest // 4)
        answer = length(*ANSWER, longest - prompt)
        found.append(Request(prompt, answer, arrives))
        arrives -= math.log(1.0 - draw.random())
    return found


def _normal(draw: random.Random) -> float:
    """Of random() alone, whose numbers no version of Python changes (Box and Muller)."""
    radius = math.sqrt(-2.0 * math.log(1.0 - draw.random()))
    return radius * math.cos(2.0 * math.pi * draw.random())


def serve(engine: Any, wanted: Sequence[Request], per_s: float, vocabulary: int) -> list[Served]:
    """Gives requests to a vLLM engine when they arrive, whether it has answered earlier ones or not.

    A request that arrives during a step waits for its end. That counts as the request's time.

    Args:
        engine: vllm.v1.engine.llm_engine.LLMEngine, or what has its methods.
        per_s: how many arrive in a second, on average; 0: all at once.
        vocabulary: prompts are random tokens of it.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    draw = random.Random(SEED)
    # Without the ends of the vocabulary, which may be special.
    prompts = [[draw.randrange(3, vocabulary - 12) for _ in range(each.prompt)] for each in wanted]
    arrivals = [each.arrives / per_s if per_s else 0.0 for each in wanted]
    first: dict[int, float] = {}
    served: dict[int, Served] = {}
    given, start = 0, time.perf_counter()
    while len(served) < len(wanted):
        now = time.perf_counter() - start
        while given < len(wanted) and arrivals[given] <= now:
            answer = wanted[given].answer
            sampling = SamplingParams(
                max_tokens=answer,
                min_tokens=answer,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(given), {"prompt_token_ids": prompts[given]}, sampling)
            given += 1
        if len(served) == given:
            time.sleep(max(0.0, arrivals[given] - now))
            continue
        for output in engine.step():
            at = int(output.request_id)
            passed = time.perf_counter() - start - arrivals[at]
            if output.outputs[0].token_ids:
                first.setdefault(at, passed)
            if output.finished:
                served[at] = Served(first[at], passed, wanted[at].answer)
    return [served[at] for at in range(len(wanted))]


def summary(wanted: Sequence[Request], per_s: float, served: Sequence[Served]) -> dict[str, Any]:
    """Of a trace: how long it took, tokens of answers per second, and medians and 99th percentiles in seconds
    of the time to the first token, and of the time for each further one.
    """
    arrivals = [each.arrives / per_s if per_s else 0.0 for each in wanted]
    seconds = max(at + each.last_s for at, each in zip(arrivals, served, strict=True))
    further = [(each.last_s - each.first_s) / (each.tokens - 1) for each in served if each.tokens > 1]
    return {
        "seconds": seconds,
        "tokens_per_s": sum(each.tokens for each in served) / seconds,
        "first_s": _quantiles([each.first_s for each in served]),
        "further_s": _quantiles(further),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p99": ordered[math.ceil(0.99 * len(ordered)) - 1]}
