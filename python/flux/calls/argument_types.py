"""Checks the types of users' arguments against the operators' schemas, and of modules' by hand. A wrong type
is a TypeError, a wrong value a ValueError. Sizes and dtypes are checked later (checks.py).
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from flux.calls.checks import FLOATING, fail
from flux.calls.schemas import PUBLIC_NAMES

_unpack_dual: Any = forward_ad.unpack_dual  # not typed
WRITTEN = ("out", "main_grad")  # arguments that calls write to


def wrong_type(op: str, argument: str, expected: str, got: object) -> NoReturn:
    value = f" {got!r}" if isinstance(got, (bool, int, float, str)) else ""
    raise TypeError(f"{op}: {argument}: expected {expected}, got {type(got).__name__}{value}")


def tensor(op: str, argument: str, value: object) -> None:
    """Checks that an argument is a tensor that operators can read in place."""
    if not isinstance(value, torch.Tensor):
        wrong_type(op, argument, "a tensor", value)
    if torch.compiler.is_compiling():
        return
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and hasattr(value, "to_local"):
        wrong_type(op, argument, "this rank's part, such as a DTensor's to_local()", value)
    if value.is_nested:
        fail(op, argument, "a dense tensor", "a nested one")
    if value.layout != torch.strided:
        fail(op, argument, "a dense tensor", f"layout {value.layout}")
    if value.is_quantized or value.is_complex():
        fail(op, argument, "a tensor of real numbers, not quantised", f"dtype {value.dtype}")
    if value.device.type not in ("cpu", "cuda", "meta"):
        fail(op, argument, "a tensor on the CPU or a CUDA device", f"device {value.device}")
    if value.is_neg() and argument.partition("[")[0] in WRITTEN:
        fail(op, argument, "a tensor to write to", "a view that negates its elements")
    if forward_ad._current_level >= 0 and _unpack_dual(value).tangent is not None:
        raise NotImplementedError(
            f"{op}: {argument}: expected a tensor without a tangent, got a dual tensor: flux has no "
            "derivatives in forward mode; torch.autograd.grad works"
        )


def optional_tensor(op: str, argument: str, value: object) -> None:
    if value is not None and not isinstance(value, torch.Tensor):
        wrong_type(op, argument, "a tensor or None", value)
    if value is not None:
        tensor(op, argument, value)


def entry(name: str, entries: Sequence[object], i: int) -> str:
    """The name in messages of entry `i` of a list, of which public functions take a single one without it."""
    return f"{name}[{i}]" if len(entries) > 1 else name


def tensors(op: str, argument: str, value: Sequence[object]) -> None:
    """Checks each entry of a list; None is allowed for a bias."""
    for i, each in enumerate(value):
        if each is not None or argument != "bias":
            tensor(op, entry(argument, value, i), each)


def sequence(op: str, argument: str, value: object, check: Callable[[str, str, object], None]) -> None:
    """Checks a list or tuple, and each entry by `check`."""
    if not isinstance(value, (list, tuple)):
        wrong_type(op, argument, "a list", value)
    for i, entry in enumerate(value):
        check(op, f"{argument}[{i}]", entry)


def _of(expected: str, *types: Any) -> Callable[[str, str, object], None]:
    """A check of an argument's type, for which True is no number. expected: in messages."""

    def check(op: str, argument: str, value: object) -> None:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wrong_type(op, argument, expected, value)

    return check


flag = _of("True or False", bool)
string = _of("a string", str)
number = _of("a number", numbers.Real, torch.SymFloat)
dtype = _of("a torch.dtype", torch.dtype)
_whole = _of("an integer", numbers.Integral, torch.SymInt)
_flag_or_word = _of("True, False or 'auto'", bool, str)


def flag_or_auto(op: str, argument: str, value: object) -> None:
    _flag_or_word(op, argument, value)
    if isinstance(value, str) and value != "auto":
        fail(op, argument, "True, False or 'auto'", repr(value))


def integer(op: str, argument: str, value: object) -> None:
    _whole(op, argument, value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        fail(op, argument, "an integer of 64 bits", value)


def optional_function(op: str, argument: str, value: object) -> None:
    if value is not None and not callable(value):
        wrong_type(op, argument, "a function or None", value)


def size(op: str, argument: str, value: Any, least: int = 0) -> int:
    """The value as an int, if it is an integer of at least `least`."""
    integer(op, argument, value)
    if value < least:
        fail(op, argument, f"an integer of at least {least}", value)
    return int(value)


def floating_dtype(op: str, argument: str, value: object) -> None:
    """Checks a dtype that parameters may have. None stands for torch's default."""
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        wrong_type(op, argument, "a torch.dtype or None", value)
    if value not in FLOATING:
        fail(op, argument, "bfloat16, float16, float32 or float64", value)


def device(op: str, argument: str, value: Any) -> None:
    """Checks a device, its name or its index. None stands for torch's default."""
    if value is None or isinstance(value, torch.device):
        return
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        wrong_type(op, argument, "a torch.device, its name or None", value)
    try:
        torch.device(value)
    except (RuntimeError, ValueError):
        fail(op, argument, "a torch.device, its name or None", repr(value))


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
    "reserve": {"max_m": "int", "max_n": "int", "max_k": "int", "dtype": "dtype"},
    "quantize": {"dtype": "dtype"},
    "explain": dict.fromkeys(("m", "n", "k"), "int")
    | dict.fromkeys(("transpose_weight", "norm"), "bool")
    | {"dtype": "dtype", "scales": "Optional[str]", "accumulate": "str"},
}
# Schemas have dtypes as integers.
_ALL = {"out_dtype": "Optional[dtype]"}
_CHECKS: dict[str, Callable[[str, str, Any], object]] = {
    "Tensor": tensor,
    "List[Tensor]": tensors,
    "List[Optional[Tensor]]": tensors,
    "bool": flag,
    "int": integer,
    "float": number,
    "str": string,
    "dtype": dtype,
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
            name = PUBLIC_NAMES.get(argument.name, argument.name)
            found.setdefault(name, f"Optional[{kind}]" if variant else kind)
    return found | _ALL | _EXTRA.get(op, {})


def check(op: str, **arguments: object) -> None:
    """Checks the arguments of a public function, before they are used."""
    if torch.compiler.is_compiling():  # the compiler's guards and the fakes check instead
        return
    # torch.library cannot register what torch.func.grad and jvp need.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None and interpreter.key() in (_TRANSFORMS.Grad, _TRANSFORMS.Jvp):
        raise NotImplementedError(
            f"{op}: inside torch.func.grad, vjp, jvp and what is made of them no operator of flux can run; "
            "torch.autograd.grad and torch.vmap work"
        )
    known = kinds(op)
    for name, value in arguments.items():
        kind = known[name]
        if kind.startswith("Optional["):
            if value is None:
                continue
            kind = kind[len("Optional[") : -1]
        _CHECKS[kind](op, name, value)
