"""What flux logs."""

from __future__ import annotations

import logging

import pytest

from flux._log import say_once


def test_a_message_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flux"):
        for _ in range(2):
            say_once("a message of this test")
            say_once("another", logging.INFO)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "a message of this test"),
        ("INFO", "another"),
    ]
