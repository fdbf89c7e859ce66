"""The plugin for SGLang, with a stand-in that has the signatures of SGLang 0.5.23 and calls torch's operators
as it does: exact sums and products of two ranks, and what the log says.
"""

from __future__ import annotations

import enum
import importlib
import logging
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flux
from flux.integrations import async_tp
from flux.testing import spawn

ROOT = Path(__file__).parents[2]
LAYERNORM_SP = "sglang.srt.layers.layernorm_sp"
TOKENS, HIDDEN, WIDE = 5, 16, 24  # five tokens do not divide by two ranks


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    async_tp.uninstall()


class HookType(enum.Enum):
    AFTER = "after"
    REPLACE = "replace"


class HookRegistry:
    """SGLang's, for the kind of hook that flux registers."""

    hooks: list[tuple[str, Callable[..., Any]]] = []

    @classmethod
    def register(
        cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER, *, source: Any = None
    ) -> None:
        assert hook_type is HookType.AFTER
        cls.hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls.hooks:
            place, name = target.rsplit(".", 1)
            original = getattr(sys.modules[place], name)

            def hooked(*args: Any, original: Any = original, hook: Any = hook, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                return told if (told := hook(result, *args, **kwargs)) is not None else result

            setattr(sys.modules[place], name, hooked)


def stand_in(enabled: bool) -> dict[str, types.ModuleType]:
    """Modules of SGLang."""
    names = ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry")
    names += ("sglang.srt.layers", LAYERNORM_SP)
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
    registry, sequence = modules["sglang.srt.plugins.hook_registry"], modules[LAYERNORM_SP]
    registry.HookRegistry, registry.HookType = HookRegistry, HookType
    HookRegistry.hooks = []
    sequence.initialize_layernorm_sp = lambda *, model_config: None
    sequence.layernorm_sp_enabled = lambda: enabled
    return modules


def entry_point() -> Callable[[], None]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["sglang.srt.plugins"].values()
    module, name = value.split(":")
    register: Callable[[], None] = getattr(importlib.import_module(module), name)
    return register


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def prefill(rank: int, world_size: int) -> list[str]:
    """A column- and a row-parallel layer, as they run between sequence-parallel norms."""
    said = Said()
    logging.getLogger("flux").addHandler(said)
    logging.getLogger("flux").setLevel(logging.INFO)
    group = dist.group.WORLD.group_name
    with mock.patch.dict(sys.modules, stand_in(True)):
        entry_point()()
        HookRegistry.apply_hooks()
        sys.modules[LAYERNORM_SP].initialize_layernorm_sp(model_config=None)
    g = torch.Generator().manual_seed(1)
    x, up, down = (
        torch.randint(-2, 3, shape, generator=g).bfloat16()
        for shape in ((TOKENS, HIDDEN), (world_size * WIDE, HIDDEN), (HIDDEN, world_size * WIDE))
    )
    padded = torch.nn.functional.pad(x, (0, 0, 0, -TOKENS % world_size))
    own_up, own_down = up.chunk(world_size)[rank], down.chunk(world_size, dim=1)[rank].contiguous()
    with (
        mock.patch.object(flux, "ag_gemm", wraps=flux.ag_gemm) as gathers,
        mock.patch.object(flux, "gemm_rs", wraps=flux.gemm_rs) as scatters,
    ):
        _, (wide,) = torch.ops.symm_mem.fused_all_gather_matmul(
            padded.chunk(world_size)[rank].contiguous(), [own_up.t()], gather_dim=0, group_name=group
        )
        relu = torch.nn.functional.pad(wide[:TOKENS].clamp(0, 1), (0, 0, 0, -TOKENS % world_size))
        total = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            relu, own_down.t(), "sum", scatter_dim=0, group_name=group
        )
        assert gathers.call_count == scatters.call_count == 1
    expected = (padded @ up.t()).clamp(0, 1)
    assert torch.equal(wide[:TOKENS], (x @ own_up.t()))
    assert torch.equal(total, (expected @ down.t()).chunk(world_size)[rank])
    return said.messages


def test_prefill() -> None:
    line = "flux: SGLang: prefill is sequence parallel; its bias-free 16-bit linear layers run on flux"
    for messages in spawn(prefill, 2, backend="gloo", timeout_s=60):
        assert messages == [line]


@pytest.mark.parametrize("has_it", [True, False])
def test_not_used_is_told(has_it: bool, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr("flux._log._said", set())
    modules = stand_in(False)
    if not has_it:
        del modules[LAYERNORM_SP]
    with mock.patch.dict(sys.modules, modules), caplog.at_level(logging.INFO, "flux"):
        entry_point()()
        assert len(HookRegistry.hooks) == has_it
        HookRegistry.apply_hooks()
        if has_it:
            sys.modules[LAYERNORM_SP].initialize_layernorm_sp(model_config=None)
    (message,) = caplog.messages
    assert message.startswith("flux: SGLang: not used, because")
    assert ("--enable-layernorm-sp" in message) == has_it


def test_without_sglang() -> None:
    with mock.patch.dict(sys.modules, {"sglang": None}), pytest.raises(ImportError):
        entry_point()()
    assert not async_tp._installed
