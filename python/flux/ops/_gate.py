"""One gate for what users pass: types, layouts and devices of arguments, by the schemas of the operators.

Sizes and dtypes are checked behind it, in _check.py, where implementations and fakes share the checks.
"""

from __future__ import annotations

import functools
import numbers
from typing import Any, NoReturn

import torch

from flux.ops import _check, _library

_DEVICES = ("cpu", "cuda", "meta")
_TRANSFORMS = torch._C._functorch.TransformType
_UNSUPPORTED_TRANSFORMS = (_TRANSFORMS.Grad, _TRANSFORMS.Jvp)
# Arguments of public functions that no schema has, or not so.
_EXTRA = {
    "moe.route": {"max_tokens": "Optional[int]"},
    "gemm_ar": {"eps": "Optional[float]"},
    "reserve": {"max_m": "int", "max_n": "int", "max_k": "int", "dtype": "dtype", "slots": "int"},
    "explain": {"m": "int", "n": "int", "k": "int", "dtype": "dtype", "transpose_weight": "bool"},
}


@functools.cache
def kinds(op: str) -> dict[str, str]:
    """The type of each argument of a public function, as schemas write it."""
    found: dict[str, str] = {}
    for variant in ("", "_out", "_norm"):
        packet: Any = getattr(torch.ops.flux, op.replace(".", "_") + variant, None)
        for argument in () if packet is None else packet.default._schema.arguments:
            kind = str(argument.type)
            # What only a variant has may be left away.
            found.setdefault(argument.name, f"Optional[{kind}]" if variant else kind)
    return found | _EXTRA.get(op, {})


def check(op: str, **arguments: object) -> None:
    """Checks the arguments of a public function, before anything else is done with them.

    Raises:
        TypeError, ValueError: naming the operator, the argument, what was expected and what came.
    """
    if torch.compiler.is_compiling():  # the compiler's own guards and the fakes see to it
        return
    _refuse_transforms(op)
    known = kinds(op)
    for name, value in arguments.items():
        _check_one(op, name, value, known[name])


def _refuse_transforms(op: str) -> None:
    # torch.library has no way to register what torch.func.grad and jvp need.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None and interpreter.key() in _UNSUPPORTED_TRANSFORMS:
        raise NotImplementedError(
            f"{op}: inside torch.func.grad, vjp, jvp and what is made of them no operator of flux can run; "
            "torch.autograd.grad and torch.vmap work"
        )


def _check_one(op: str, name: str, value: object, kind: str) -> None:
    if kind.startswith("Optional["):
        if value is not None:
            _check_one(op, name, value, kind[len("Optional[") : -1])
    elif kind.startswith("List["):
        if not isinstance(value, (list, tuple)):
            _wrong_type(op, name, "a list", value)
        for i, entry in enumerate(value):
            _check_one(op, f"{name}[{i}]", entry, kind[len("List[") : -1])
    elif kind == "Tensor":
        tensor(op, name, value)
    elif kind == "bool":
        if not isinstance(value, bool):
            _wrong_type(op, name, "True or False", value)
    elif kind == "int":
        if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
            _wrong_type(op, name, "an integer", value)
    elif kind == "float":
        if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat)):
            _wrong_type(op, name, "a number", value)
    elif kind == "dtype":
        if not isinstance(value, torch.dtype):
            _wrong_type(op, name, "a torch.dtype", value)
    elif not isinstance(value, str):
        _wrong_type(op, name, "a string", value)


def tensors(op: str, **arguments: object) -> None:
    """The same for arguments that are all tensors, by the names that messages shall give them."""
    if not torch.compiler.is_compiling():
        for name, value in arguments.items():
            tensor(op, name, value)


def tensor(op: str, name: str, value: object) -> None:
    """Checks that an argument is a tensor that operators can read where it lies."""
    if not isinstance(value, torch.Tensor):
        _wrong_type(op, name, "a torch.Tensor", value)
    if type(value) not in _library.PLAIN_TENSORS and hasattr(value, "to_local"):
        _wrong_type(op, name, "this rank's part, such as a DTensor's to_local()", value)
    if value.is_nested:
        _check.fail(op, name, "a dense tensor", "a nested one")
    if value.layout != torch.strided:
        _check.fail(op, name, "a dense tensor", f"layout {value.layout}")
    if value.is_quantized or value.is_complex():
        _check.fail(op, name, "a tensor of real numbers, not quantised", f"dtype {value.dtype}")
    if value.device.type not in _DEVICES:
        _check.fail(op, name, "a tensor on the CPU or a CUDA device", f"device {value.device}")


def _wrong_type(op: str, name: str, expected: str, value: object) -> NoReturn:
    got = type(value).__name__
    if isinstance(value, (str, int, float, type(None))):
        got = f"{got} {value!r}" if value is not None else "None"
    raise TypeError(f"{op}: {name}: expected {expected}, got {got}")
