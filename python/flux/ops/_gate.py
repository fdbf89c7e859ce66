"""Checks the types of users' arguments against the operators' schemas.

Sizes and dtypes are checked later, in _check.py, whose checks implementations and fakes share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flux.ops import _arguments

_QUANTISED = {
    "quant": "Optional[str]",
    "quant_scale": "Optional[Tensor]",
    "ue8m0": "bool",
    "return_norm": "bool",
}
# Arguments of public functions that are not in a schema, or have another type there.
_EXTRA = {
    "moe.route": {"max_tokens": "Optional[int]", "max_node_tokens": "Optional[int]"},
    "gemm_rs": {"wire": "Optional[str]"},
    "gemm_ar": {"eps": "Optional[float]", **_QUANTISED},
    "all_reduce": {"eps": "Optional[float]", **_QUANTISED},
    "reserve": {"max_m": "int", "max_n": "int", "max_k": "int", "dtype": "dtype", "slots": "int"},
    "quantize": {"dtype": "dtype"},
    "explain": {
        "m": "int",
        "n": "int",
        "k": "int",
        "dtype": "dtype",
        "transpose_weight": "bool",
        "scales": "Optional[str]",
        "accumulate": "str",
    },
}
# Schemas have dtypes as integers.
_ALL = {"out_dtype": "Optional[dtype]"}
_CHECKS: dict[str, Callable[[str, str, Any], object]] = {
    "Tensor": _arguments.tensor,
    "bool": _arguments.flag,
    "int": _arguments.integer,
    "float": _arguments.number,
    "str": _arguments.string,
    "dtype": _arguments.dtype,
}
_TRANSFORMS = torch._C._functorch.TransformType


@functools.cache
def kinds(op: str) -> dict[str, str]:
    """The type of each argument of a public function, in the notation of schemas."""
    found: dict[str, str] = {}
    for variant in ("", "_out", "_norm"):
        packet: Any = getattr(torch.ops.flux, op.replace(".", "_") + variant, None)
        for argument in () if packet is None else packet.default._schema.arguments:
            kind = str(argument.type)
            # Arguments that only a variant has are optional.
            found.setdefault(argument.name, f"Optional[{kind}]" if variant else kind)
    return found | _ALL | _EXTRA.get(op, {})


def check(op: str, **arguments: object) -> None:
    """Checks the arguments of a public function, before they are used.

    Raises:
        TypeError, ValueError: names the operator, the argument, the expected and the given value.
        NotImplementedError: inside a transformation that no operator can run in.
    """
    if torch.compiler.is_compiling():  # the compiler's guards and the fakes check instead
        return
    _refuse_transforms(op)
    known = kinds(op)
    for name, value in arguments.items():
        kind = known[name]
        if kind.startswith("Optional["):
            if value is None:
                continue
            kind = kind[len("Optional[") : -1]
        _CHECKS[kind](op, name, value)


def check_lists(op: str, many: bool, lists: Mapping[str, Sequence[Any]]) -> dict[str, torch.Tensor]:
    """Checks lists of tensors, or (not `many`) the only entry of each list, which may be None for a bias.

    Returns:
        the tensors, by their names in messages.
    """
    found = {
        f"{name}[{i}]" if many else name: entry
        for name, entries in lists.items()
        for i, entry in enumerate(entries)
        if not (name == "bias" and entry is None)
    }
    for name, value in found.items():
        _arguments.tensor(op, name, value)
    return found


def _refuse_transforms(op: str) -> None:
    # torch.library cannot register what torch.func.grad and jvp need.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None and interpreter.key() in (_TRANSFORMS.Grad, _TRANSFORMS.Jvp):
        raise NotImplementedError(
            f"{op}: inside torch.func.grad, vjp, jvp and what is made of them no operator of flux can run; "
            "torch.autograd.grad and torch.vmap work"
        )
