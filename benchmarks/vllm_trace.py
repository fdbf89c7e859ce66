"""The requests that vllm_throughput.py gives all engines."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

# Medians and spreads of log-normal lengths, as chats have them: most are short, a few very long.
PROMPT, ANSWER = (256, 1.0), (64, 0.8)
SEED = 0


@dataclass(frozen=True)
class Request:
    """How many tokens it has and asks for, and when it arrives, in units of the mean time between two."""

    prompt: int
    answer: int
    arrives: float


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
