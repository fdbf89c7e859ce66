"""The logger "flux", and messages that are logged once instead of at every call or layer."""

from __future__ import annotations

import logging

log = logging.getLogger("flux")

_said: set[str] = set()


def say_once(message: str, level: int = logging.WARNING, logger: logging.Logger = log) -> None:
    """Logs a message, unless this process has logged it before."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)
