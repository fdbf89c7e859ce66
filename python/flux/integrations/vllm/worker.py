"""What flux adds to vLLM's workers: a line in the log when the model is ready, vLLM's deadline, and a look
for timeouts after every step. When the model is ready, torch also stops asking vLLM's class for weights.

A kernel that times out fills its result with NaN and leaves a record. The group's next call raises it; but a
step that is a CUDA graph replays calls without making any.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.v1.worker.worker_base import WorkerWrapperBase

from flux.integrations.vllm.op import pass_by
from flux.integrations.vllm.report import report, tell
from flux.ops import workspaces


@functools.cache
def install() -> None:
    """Adds to the workers of this process; once."""
    # As long as vLLM itself waits for a step: a rank that was only stopped for a while may go on.
    os.environ.setdefault("FLUX_TIMEOUT_S", str(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS))
    _follow("compile_or_warm_up_model", _ready)
    _follow("execute_model", _check_if_done)
    _follow("sample_tokens", _check)


def _follow(name: str, then: Callable[[Any, Any], None]) -> None:
    """Calls `then` with the worker and its result after each of its calls of a method."""
    # The wrapper forwards what it does not define itself.
    own = getattr(WorkerWrapperBase, name, None)

    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        forward = getattr(wrapper.worker, name) if own is None else functools.partial(own, wrapper)
        result = forward(*args, **kwargs)
        then(wrapper.worker, result)
        return result

    setattr(WorkerWrapperBase, name, call if own is None else functools.wraps(own)(call))


def _ready(worker: Any, result: Any) -> None:
    with contextlib.suppress(ImportError, AttributeError):
        pass_by(importlib.import_module("vllm.model_executor.parameter").BasevLLMParameter)
    if worker.rank == 0:
        tell(report.line())


def _check_if_done(worker: Any, result: Any) -> None:
    if result is not None:  # else the step goes on in sample_tokens; one look is enough, of some 6 us
        _check(worker, result)


def _check(worker: Any, result: Any) -> None:
    """Raises what went wrong in this step."""
    get_output = getattr(result, "get_output", None)
    if get_output is None:
        workspaces.check_all()
        return

    def checked() -> Any:  # vLLM waits for this step later
        # Else it would refer to itself, and keep its memory and its event until a garbage collection.
        del result.get_output
        output = get_output()
        workspaces.check_all()
        return output

    result.get_output = checked
