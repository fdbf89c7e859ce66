"""Where there is a GPU for them, the kernels must be there."""

from __future__ import annotations

import pytest
import torch

from flux import _native


def test_kernels_are_built_where_they_can_run() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    if torch.cuda.get_device_capability(0) != (9, 0):
        pytest.skip("this GPU is not one the kernels are for (compute capability 9.0)")
    assert _native.available(), _native.why_not()
