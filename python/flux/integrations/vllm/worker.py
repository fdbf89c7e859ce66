"""What flux adds to vLLM's workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.worker.worker_base import WorkerWrapperBase

from flux.integrations.vllm import layer
from flux.integrations.vllm.report import report, tell

_installed: list[str] = []


def install() -> None:
    """Lets rank 0 tell what flux does when its model is ready; once."""
    if not _installed:
        _follow("compile_or_warm_up_model", _tell_report)


def _follow(name: str, then: Callable[[Any], None]) -> None:
    """Calls `then` with the worker after each of its calls of a method."""
    # The wrapper forwards what it does not define itself.
    own = getattr(WorkerWrapperBase, name, None)

    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        forward = getattr(wrapper.worker, name) if own is None else functools.partial(own, wrapper)
        result = forward(*args, **kwargs)
        then(wrapper.worker)
        return result

    setattr(WorkerWrapperBase, name, call)
    _installed.append(name)


def _tell_report(worker: Any) -> None:
    if worker.rank == 0:
        tell(report.line(layer.settings.min_tokens))
