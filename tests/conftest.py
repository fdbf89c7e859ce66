"""Which tests this machine can run: tests/cpu everywhere, tests/gpu on one GPU, tests/dist on as many as a
test asks for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401  (spawn then imports it once for all ranks of all tests)

from flux import _native

HERE = Path(__file__).parent
# Tests import helpers, and other rooms' tests, by name; so do ranks, which are started with this path.
sys.path += [
    str(HERE / "helpers"),
    str(HERE / "stress"),
    *sorted(str(room) for room in (HERE / "cpu").iterdir() if room.is_dir()),
]
pytest.register_assert_rewrite("ranks", "repeated")  # helpers whose assertions tell what they compared


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():  # the kernels are to run, also where other ways are faster
        os.environ.setdefault("FLUX_TUNING", "off")
    refuse_wrong_selections(config)
    config.addinivalue_line("markers", "gpu: needs one GPU that runs flux's kernels")
    config.addinivalue_line("markers", "dist: needs several GPUs that run flux's kernels")
    config.addinivalue_line("markers", "gpus(n): how many GPUs a test of tests/dist needs (default 2)")


def refuse_wrong_selections(config: pytest.Config) -> None:
    """Raises pytest's UsageError if -k or -m is no expression. Of pytest-xdist only workers would read it,
    whose usage errors end as internal errors.
    """
    config.pluginmanager.get_plugin("mark").pytest_collection_modifyitems([], config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Tests with ranks on GPUs need all SMs. More workers than two make ranks on CPUs time out."""
    return 0 if torch.cuda.is_available() else min(2, os.cpu_count() or 1)


def _missing(gpus: int) -> str | None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < gpus:
        return f"needs {gpus} GPU{'s' if gpus > 1 else ''}, this machine has {found}"
    capability = torch.cuda.get_device_capability(0)
    if capability != (9, 0):
        return f"needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    # On a machine with such a GPU, tests/gpu/test_gpu_build.py fails where this skips.
    return _native.why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if folder not in ("gpu", "dist"):
            continue
        item.add_marker(getattr(pytest.mark, folder))
        if item.get_closest_marker("gpus") is None and folder == "dist":
            item.add_marker(pytest.mark.gpus(2))
        wanted = item.get_closest_marker("gpus")
        reason = _missing(1 if wanted is None else int(wanted.args[0]))
        if reason is not None and item.path.name != "test_gpu_build.py":
            item.add_marker(pytest.mark.skip(reason=reason))
