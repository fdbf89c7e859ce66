"""A -k or -m that is no expression is refused in one line, before workers of pytest-xdist start."""

from __future__ import annotations

import pytest

import conftest


@pytest.mark.parametrize(("option", "wrong"), [("keyword", "4 ranks"), ("markexpr", "gpu or")])
def test_a_wrong_selection_is_refused(
    option: str, wrong: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytestconfig.option, option, wrong)
    with pytest.raises(pytest.UsageError, match=f"Wrong expression passed to '-[km]': {wrong}"):
        conftest.pytest_configure(pytestconfig)
