"""Loads the two native libraries, and knows why one of them is absent.

``_core`` (pybind11: plans and shared-memory atomics, no torch, no CUDA) is part of every build; ``_C.so``
(the CUDA kernels, torch's stable ABI) only of builds with CUDA. Without ``_C.so`` flux works on CPU tensors,
and runs CUDA tensors unfused through torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

try:
    import flux._core as core
except ImportError as _error:
    raise ImportError(
        f"flux._core, the native library that every build of flux contains, cannot be loaded: {_error}. "
        "Install a wheel of flux-kernels for this Python, or `pip install .` in its source tree."
    ) from _error

__all__ = ["available", "core", "library_path", "why_not"]

_torch_ops: Any = torch.ops  # parts of it are not typed

library_path = Path(__file__).parent / "_C.so"


def _load() -> str | None:
    if not library_path.exists():
        note = core.WHY_NO_KERNELS or "it was not built"
        return f"{library_path} is absent: {note}. FLUX_CUDA=on builds it, or says what is missing"
    if misfit := _misfit(torch.__version__, torch.version.cuda):
        return f"{library_path} is not loaded: {misfit}"
    try:
        _torch_ops.load_library(str(library_path))
    except (OSError, RuntimeError) as error:
        return f"{library_path} cannot be loaded: {error}"
    return None


def _misfit(torch_version: str, torch_cuda: str | None) -> str | None:
    """Why the kernels cannot work with this torch, or None. Loading them anyway would fail with the name of a
    missing symbol, or at the first launch.
    """
    if tuple(int(part) for part in torch_version.split(".")[:2]) < (2, 10):
        return f"the kernels need torch 2.10 or later, and this is torch {torch_version}"
    built = core.CUDA_VERSION
    if torch_cuda is None:
        return f"the kernels need a torch with CUDA {built}, and torch {torch_version} has no CUDA"
    if torch_cuda.split(".")[0] != built.split(".")[0]:
        return f"the kernels need a torch with CUDA {built.split('.')[0]}, and this one has CUDA {torch_cuda}"
    return None


_why_not: str | None = _load()


def available() -> bool:
    """Whether the CUDA kernels are loaded; ``flux.explain`` says whether a call can use them."""
    return _why_not is None


def why_not() -> str | None:
    """Why the CUDA kernels are not loaded, or None if they are."""
    return _why_not
