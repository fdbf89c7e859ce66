"""Loads the two native libraries and says why one of them is absent.

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
        "Install flux with `pip install .` from its source tree (needs a C++17 compiler)."
    ) from _error

__all__ = ["available", "core", "library_path", "why_not"]

_torch_ops: Any = torch.ops  # parts of it are not typed

library_path = Path(__file__).parent / "_C.so"


def _load() -> str | None:
    if not library_path.exists():
        note = core.WHY_NO_KERNELS or "it was not built"
        return f"{library_path} is absent: {note}. FLUX_CUDA=on builds it, or says what is missing"
    try:
        _torch_ops.load_library(str(library_path))
    except (OSError, RuntimeError) as error:
        return f"{library_path} cannot be loaded: {error}"
    return None


_why_not: str | None = _load()


def available() -> bool:
    """Whether the CUDA kernels are loaded; ``flux.explain`` says whether a call can use them."""
    return _why_not is None


def why_not() -> str | None:
    """Why the CUDA kernels are not loaded, or None if they are."""
    return _why_not
