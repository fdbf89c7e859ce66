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
# biases: empty, or one for each weight. Results: one for each weight, then the gathered x if it is asked for.
_XS = "Tensor x, Tensor[] weights, Tensor?[] biases, bool transpose_weight"
_TAGS = (torch.Tag.pt2_compliant_tag,)

library.define(f"gemm({_X}, bool transpose_weight) -> Tensor", tags=_TAGS)
library.define(f"gemm_out({_X}, bool transpose_weight, Tensor(a!) out) -> ()", tags=_TAGS)
library.define(f"gemm_rs({_X}, bool transpose_weight, str group_name) -> Tensor", tags=_TAGS)
library.define(f"gemm_rs_out({_X}, bool transpose_weight, str group_name, Tensor(a!) out) -> ()", tags=_TAGS)

library.define(f"ag_gemm({_XS}, bool return_gathered, str group_name) -> Tensor[]", tags=_TAGS)
library.define(
    f"ag_gemm_out({_XS}, bool return_gathered, str group_name, Tensor(a!)[] outs) -> ()", tags=_TAGS
)
library.define("all_gather(Tensor x, str group_name) -> Tensor", tags=_TAGS)
library.define("all_gather_out(Tensor x, str group_name, Tensor(a!) out) -> ()", tags=_TAGS)

# config < 0: the cost model chooses; num_sms 0: all of the device.
library.define(f"_gemm({_X}, Tensor(a!) out, bool transpose_weight, int config, int num_sms) -> ()")
library.define(
    f"_gemm_rs({_X}, Tensor(a!) out, bool transpose_weight, int symm_buffer, int config, int num_sms) -> ()"
)
# Gathering kernels: copy_epoch 0: the SMs of the launch send x, and the device counts the calls. Else copy
# engines do, signalling every chunk_rows rows, and the host has counted. reuse: one more weight for the rows
# that the launch before has gathered, which _collect writes to a tensor of the user.
library.define(
    f"_ag_gemm({_X}, Tensor(a!) out, bool transpose_weight, int symm_buffer, int config, int num_sms, "
    "int copy_epoch, int chunk_rows, bool reuse) -> ()"
)
library.define("_all_gather(Tensor x, Tensor(a!) out, int symm_buffer, int copy_epoch, int chunk_rows) -> ()")
library.define("_collect(Tensor x, Tensor(a!) gathered, int symm_buffer, int copy_epoch) -> ()")
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
