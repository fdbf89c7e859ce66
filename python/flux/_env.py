"""Every environment variable that flux reads, in one table.

Run-time variables are read when they are needed, never at import, so a test or a launcher may still set them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variable:
    """One environment variable; `parse` turns its text into a value or raises ValueError."""

    name: str
    default: str
    meaning: str
    read: str  # "run" or "build"
    parse: Callable[[str], Any]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1e6:
        raise ValueError("must be a positive number of seconds")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be a positive number")
    return value


def _positive_or_auto(text: str) -> int | None:
    if text.strip().lower() == "auto":
        return None
    try:
        return _positive(text)
    except ValueError:
        raise ValueError("must be auto or a positive number") from None


def _positive_auto_or_off(text: str) -> int | None:
    if text.strip().lower() == "off":
        return 0
    try:
        return _positive_or_auto(text)
    except ValueError:
        raise ValueError("must be auto, off or a positive number") from None


def _existing_file(text: str) -> str:
    if text and not os.path.isfile(text):
        raise ValueError("must be a file")
    return text


def _file_to_append_to(text: str) -> str:
    if text and not os.access(os.path.dirname(text) or ".", os.W_OK):
        raise ValueError("must be a file in a folder that exists and is writable")
    return text


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value

    return parse


VARIABLES: tuple[Variable, ...] = (
    Variable("FLUX_TIMEOUT_S", "30", "Deadline of every wait for a peer, in seconds.", "run", _seconds),
    Variable(
        "FLUX_SYMM_BACKEND",
        "cuda",
        "Backend of torch that allocates symmetric GPU memory: cuda or nvshmem. Fixed for the process.",
        "run",
        _one_of("cuda", "nvshmem"),
    ),
    Variable(
        "FLUX_FUSED",
        "auto",
        "off: all collectives run unfused through torch, to find out whether a problem is flux's. Read when "
        "a group is first used.",
        "run",
        _one_of("auto", "off"),
    ),
    Variable(
        "FLUX_BATCH_INVARIANT",
        "off",
        "on: calls are batch invariant, except in flux.batch_invariant(False). Read at the first call.",
        "run",
        _one_of("on", "off"),
    ),
    Variable(
        "FLUX_TUNING",
        "auto",
        "Measurements by which plans choose: auto (those that flux ships for such GPUs), a file of flux "
        "tune, or off. Read once in a process; all ranks of a group must have the same.",
        "run",
        str,
    ),
    Variable(
        "FLUX_GROUPED_WGRAD",
        "kernel",
        "Gradients of experts' weights on GPUs: kernel (flux's, where it takes them), or torch (its grouped "
        "GEMM).",
        "run",
        _one_of("kernel", "torch"),
    ),
    Variable(
        "FLUX_NODE",
        "",
        "Name of the node that a rank is on: ranks with equal names share memory, others reach each other "
        "through the network. Default: the host. To rehearse several nodes on one machine.",
        "run",
        str,
    ),
    Variable(
        "FLUX_NODES",
        "auto",
        "How calls of groups with several nodes run: auto (by the model), two-level (where possible), or "
        "flat (through torch). The same on all ranks. Read when a group is first used.",
        "run",
        _one_of("auto", "two-level", "flat"),
    ),
    Variable(
        "FLUX_LINKS",
        "",
        "File of flux doctor --nodes with measured rates of the links between nodes, by which plans choose; "
        "the same on all ranks.",
        "run",
        _existing_file,
    ),
    Variable(
        "FLUX_RECORD_SHAPES",
        "",
        "File to which rank 0 of each group appends the problems that it plans, for flux tune --trace. Read "
        "when a group is first used.",
        "run",
        _file_to_append_to,
    ),
    Variable(
        "FLUX_DEBUG",
        "off",
        "compare: ranks compare the arguments of every call, and the contents of tensors that must be equal "
        "on all ranks; slow. Read when a group is first used; one rank's setting applies to all.",
        "run",
        _one_of("off", "compare"),
    ),
    Variable(
        "FLUX_VLLM",
        "auto",
        "vLLM plugin: auto, pass (compiled models only), layer (never hand a range back to vLLM's fusion "
        "passes), off.",
        "run",
        _one_of("auto", "pass", "layer", "off"),
    ),
    Variable(
        "FLUX_VLLM_MIN_TOKENS",
        "auto",
        "Smallest batch, in tokens, for which the vLLM plugin uses flux: auto (as measured), or a number.",
        "run",
        _positive_or_auto,
    ),
    Variable(
        "FLUX_VLLM_TUNING",
        "",
        "Result file of flux bench on this machine; the vLLM plugin decides by it from how many tokens on it "
        "uses flux.",
        "run",
        _existing_file,
    ),
    Variable(
        "FLUX_VLLM_SEQUENCE",
        "auto",
        "Smallest batch, in tokens, for which the vLLM plugin makes compiled models sequence parallel: auto "
        "(large sums), a number, or off.",
        "run",
        _positive_auto_or_off,
    ),
    Variable(
        "FLUX_VLLM_MOE",
        "auto",
        "Experts of MoE layers in vLLM: auto (those of prefill are flux's, in layers that it supports), off "
        "(all are vLLM's).",
        "run",
        _one_of("auto", "off"),
    ),
    Variable(
        "FLUX_SGLANG_ALL_REDUCE",
        "off",
        "Sums of SGLang's groups: off (SGLang runs them), on (flux runs those that its kernels take).",
        "run",
        _one_of("off", "on"),
    ),
    Variable(
        "FLUX_COMMIT",
        "unknown",
        "Commit to write into benchmark records when there is no git tree.",
        "run",
        str,
    ),
    Variable(
        "FLUX_CUDA",
        "auto",
        "Build CUDA kernels: auto (if nvcc is found, and a GPU is visible or FLUX_CUDA_ARCHS is set), on (or "
        "fail), off.",
        "build",
        _one_of("auto", "on", "off"),
    ),
    Variable(
        "FLUX_CUDA_ARCHS",
        "90a",
        "CUDA architectures to compile for; flux has kernels for 90a only.",
        "build",
        str,
    ),
    Variable(
        "FLUX_CUTLASS_DIR",
        "",
        "CUTLASS source tree to use instead of the nvidia-cutlass package.",
        "build",
        str,
    ),
    Variable(
        "FLUX_TORCH_DIR", "", "Folder of the torch package whose headers to compile against.", "build", str
    ),
    Variable(
        "FLUX_KERNELS", "", "Compiled kernels (_C.so) to package instead of compiling them.", "build", str
    ),
    Variable("FLUX_LOCAL_VERSION", "", "Local version label of the package, for example cpu.", "build", str),
    Variable("FLUX_BUILD_DIR", "", "Folder for object files, to keep them between builds.", "build", str),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str) -> Any:
    """The value of a variable of the table.

    Raises:
        ValueError: the variable is set to something its parser refuses.
    """
    variable = _BY_NAME[name]
    text = os.environ.get(name, variable.default)
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error} (default {variable.default!r})") from None


def check() -> None:
    """Raises ValueError if a variable that operators read is malformed."""
    for variable in VARIABLES:
        if variable.read == "run" and not variable.name.startswith(("FLUX_VLLM", "FLUX_SGLANG")):
            get(variable.name)


def default(name: str) -> Any:
    """The value of a variable that is not set."""
    variable = _BY_NAME[name]
    return variable.parse(variable.default)


def timeout_s() -> float:
    """Deadline of every wait for a peer, in seconds."""
    return float(get("FLUX_TIMEOUT_S"))


def table() -> str:
    """The variables as a Markdown table, for the documentation and ``flux doctor``."""
    rows = ["| variable | default | read at | meaning |", "|---|---|---|---|"]
    rows += [f"| `{v.name}` | `{v.default}` | {v.read} | {v.meaning} |" for v in VARIABLES]
    return "\n".join(rows)
