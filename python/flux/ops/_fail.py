"""The form of every message about an argument that does not fit."""

from __future__ import annotations

from typing import NoReturn


def fail(op: str, argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")
