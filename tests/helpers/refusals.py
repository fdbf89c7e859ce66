"""What calls say that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def said(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The message of the TypeError or ValueError that a call raises, or "no error"."""
    try:
        call(*arguments, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"
