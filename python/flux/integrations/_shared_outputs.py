"""Layers of a module that read the same input: the outputs of all, computed when the first one is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

ForwardOfMany = Callable[[Sequence[nn.Linear], torch.Tensor], list[torch.Tensor]]


class SharedOutputs:
    """Outputs of layers that have been computed and not yet been returned, within one call of the module
    that contains the layers.
    """

    def __init__(self, layers: Sequence[nn.Linear], compute: ForwardOfMany) -> None:
        self._layers, self._compute = layers, compute
        self._inside = False
        self._outputs: dict[int, torch.Tensor] = {}
        # The tensors from which the outputs were computed.
        self._read: list[torch.Tensor] = []
        self._state: tuple[Any, ...] = ()

    def begin(self, module: nn.Module, inputs: object) -> None:
        """Hook at the start of a call of the module."""
        self._inside = True
        self._forget()

    def end(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """Hook at the end of a call of the module, also if it failed."""
        self._inside = False
        self._forget()

    def output(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """The output of layer `i` for x."""
        if not self._inside:
            # The weights may have changed unnoticed: FSDP2 writes them without autograd's version counters.
            return self._compute([self._layers[i]], x)[0]
        read, state = self._what_it_depends_on(x)
        same = len(read) == len(self._read) and all(a is b for a, b in zip(read, self._read, strict=True))
        if not same or state != self._state or i not in self._outputs:
            self._outputs = dict(enumerate(self._compute(self._layers, x)))
            self._read, self._state = read, state
        out = self._outputs.pop(i)
        if not self._outputs:
            self._forget()
        return out

    def _forget(self) -> None:
        self._outputs, self._read, self._state = {}, [], ()

    def _what_it_depends_on(self, x: torch.Tensor) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """The tensors on which outputs depend, their versions, and the gradient modes."""
        parameters = [p for layer in self._layers for p in (layer.weight, layer.bias) if p is not None]
        read = [x, *parameters]
        # The compiler traces functionalised tensors, which are never overwritten.
        if torch.compiler.is_compiling():
            return read, (torch.is_grad_enabled(),)
        versions = [
            (tensor.requires_grad, 0 if tensor.is_inference() else tensor._version) for tensor in read
        ]
        return read, (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *versions)
