"""Schemas of all torch operators of flux. Public ones are functional or mutate `out`; `_`-operators are the
kernels themselves, implemented for CUDA in `_C.so`.

Plain ``Library.impl`` and not ``custom_op``, whose dispatch costs more than a whole call may.
"""

from __future__ import annotations

from typing import Any

import torch

_torch_library: Any = torch.library  # not typed
library: Any = _torch_library.Library("flux", "FRAGMENT")

_X = "Tensor x, Tensor weight, Tensor? bias"
_TAGS = (torch.Tag.pt2_compliant_tag,)

library.define(f"gemm({_X}, bool transpose_weight) -> Tensor", tags=_TAGS)
library.define(f"gemm_out({_X}, bool transpose_weight, Tensor(a!) out) -> ()", tags=_TAGS)
library.define(f"gemm_rs({_X}, bool transpose_weight, str group_name) -> Tensor", tags=_TAGS)
library.define(f"gemm_rs_out({_X}, bool transpose_weight, str group_name, Tensor(a!) out) -> ()", tags=_TAGS)

# config < 0: the cost model chooses; num_sms 0: all of the device.
library.define(f"_gemm({_X}, Tensor(a!) out, bool transpose_weight, int config, int num_sms) -> ()")
library.define(
    f"_gemm_rs({_X}, Tensor(a!) out, bool transpose_weight, int symm_buffer, int config, int num_sms) -> ()"
)
# Loads every kernel.
library.define("_prepare() -> ()")

_PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


def may_skip_dispatch(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a call on CUDA tensors may go straight to the implementation, which saves 5 us of host time.

    Not while torch traces or compiles, under a dispatch mode, or with tensor subclasses: those must see the
    operator.
    """
    return (
        not torch.compiler.is_compiling()
        and x.is_cuda
        and type(x) in _PLAIN_TENSORS
        and type(weight) in _PLAIN_TENSORS
        and torch._C._len_torch_dispatch_stack() == 0
    )
