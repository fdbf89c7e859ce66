"""Adapters for frameworks. Each imports its framework only when it is used, or imported itself."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flux.integrations import async_tp, dtensor, megatron, sglang, transformers, vllm
else:
    # Hidden from type checkers, which would otherwise accept every name.
    def __getattr__(name: str) -> object:
        if name in __all__:
            return import_module(f"flux.integrations.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = ["async_tp", "dtensor", "megatron", "sglang", "transformers", "vllm"]
