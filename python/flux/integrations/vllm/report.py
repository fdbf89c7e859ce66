"""What flux does in a model of vLLM, and why not more: gathered while the model is built and compiled, and
told in one line. Needs nothing of vLLM.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import flux
from flux import _env, _log

# vLLM configures the logger "vllm": this one has its handlers, format and level.
log = logging.getLogger("vllm.flux")
# As a number of tokens from which on something is done.
NEVER = 2**62


def tell(message: str, level: int = logging.INFO) -> None:
    """Logs a message, once in this process."""
    _log.say_once(f"flux {flux.__version__}: {message}", level, log)


def setting(name: str) -> Any:
    """The value of an environment variable, or its default if it is set to something that means nothing."""
    try:
        return _env.get(name)
    except ValueError as error:
        tell(f"{error}; the default is used", logging.WARNING)
        return _env.default(name)


@dataclass
class Report:
    """What is known of the model that this process runs.

    Attributes:
        served: how many layers of a kind flux serves, from how many tokens on, and why from there.
        refused: how many layers of a kind stay vLLM's, by kind and reason.
        ranges: for a range of token counts of the compiled model, what its graphs do.
        sequence: whether the compiled model is sequence parallel; empty if this was not looked at.
    """

    served: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    ranges: dict[tuple[int, int], str] = field(default_factory=dict)
    sequence: str = ""

    def line(self) -> str:
        """The line for vLLM's log."""
        refused = "; ".join(f"{_layers(n, kind)}: {why}" for (kind, why), n in self.refused.items())
        found = +self.served  # layers that were served before their weights were loaded count no more
        if not found and not any("flux" in what for what in self.ranges.values()):
            return f"not used. {refused or 'The model has no layers that flux knows'}"
        served = (
            f"{_layers(n, kind)} {where_from(tokens)} ({why})" for (kind, tokens, why), n in found.items()
        )
        told = ["; ".join(served) or "no layers, but sums with norm"]
        ranges = "; ".join(
            f"{start} to {end} tokens: {what}" for (start, end), what in sorted(self.ranges.items())
        )
        told += [self.sequence] if found and self.sequence else []
        told += [f"Compiled for {ranges}"] if ranges else []
        told += [f"vLLM's own: {refused}"] if refused else []
        return ". ".join(told)


report = Report()


def where_from(tokens: int) -> str:
    """In which batches a layer is flux's."""
    if tokens == NEVER:
        return "where the model is sequence parallel"
    return f"from {tokens} token{'s' if tokens > 1 else ''} on"


def _layers(count: int, kind: str) -> str:
    return f"{count} {kind} layer{'s' if count > 1 else ''}"
