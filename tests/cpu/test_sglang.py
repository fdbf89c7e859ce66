"""The plugin for SGLang: exact sums and products of two ranks, and what the log says.

With SGLang installed, its own plugin loader, hooks and sequence-parallel layers run; what needs a GPU there
is a stand-in. Without it, stand-ins have the signatures of SGLang 0.5.23, and call the operators as it does.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
SGLANG = importlib.util.find_spec("sglang")
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


def column_parallel_g_matmul(linear: Any, rows: torch.Tensor, bias: None) -> torch.Tensor:
    """SGLang's layer before attention and MLP: this rank's padded rows -> all rows."""
    _, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(
        rows.contiguous(), [linear.weight.t()], gather_dim=0, group_name=dist.group.WORLD.group_name
    )
    return out[:TOKENS]


def row_parallel_gbar_matmul(linear: Any, x: torch.Tensor, bias: None) -> torch.Tensor:
    """SGLang's layer behind them: all rows -> this rank's padded rows."""
    x = torch.nn.functional.pad(x, (0, 0, 0, -TOKENS % linear.tp_group.world_size))
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x, linear.weight.t(), "sum", scatter_dim=0, group_name=dist.group.WORLD.group_name
    )


class UnquantizedLinearMethod:
    """SGLang's, which its layers ask for."""


def stand_in(enabled: bool) -> dict[str, types.ModuleType]:
    """Modules of SGLang: all that is used of it, or the parts that need a GPU."""
    parts: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.layers": {},
        LAYERNORM_SP: {
            "initialize_layernorm_sp": lambda *, model_config: None,
            "layernorm_sp_enabled": lambda: enabled,
            "column_parallel_g_matmul": column_parallel_g_matmul,
            "row_parallel_gbar_matmul": row_parallel_gbar_matmul,
        },
    }
    HookRegistry.hooks = []
    if SGLANG is not None:
        flags = types.SimpleNamespace(sp=types.SimpleNamespace(enabled=None))
        rank, p = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        group = types.SimpleNamespace(world_size=p, rank_in_group=rank, device_group=dist.group.WORLD)
        parallel = types.SimpleNamespace(enable_layernorm_sp=enabled, tp_group=group)
        parts = {
            "sglang": {},
            "sglang.srt.runtime_context": {
                "get_flags": lambda: flags,
                "get_forward": lambda: None,
                "get_parallel": lambda: parallel,
            },
            "sglang.srt.utils": {},
            "sglang.srt.utils.common": {"ceil_align": lambda n, to: n + -n % to},
            "sglang.srt.layers.quantization": {},
            "sglang.srt.layers.quantization.unquant": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
        }
    modules = {}
    for name, contents in parts.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = list(SGLANG.submodule_search_locations or ()) if SGLANG and name == "sglang" else []
        vars(module).update(contents)
        modules[name] = module
    return modules


@contextmanager
def sglang(enabled: bool, has_layernorm_sp: bool = True) -> Iterator[None]:
    """SGLang, imported anew, and with --enable-layernorm-sp or without."""
    modules: dict[str, Any] = stand_in(enabled)
    if not has_layernorm_sp:
        modules[LAYERNORM_SP] = None
    with mock.patch.dict(sys.modules, modules):
        yield
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]


def entry_point() -> importlib.metadata.EntryPoint:
    group = "sglang.srt.plugins"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][group].items()
    return importlib.metadata.EntryPoint(name, value, group)


def load_plugins() -> None:
    """As SGLang does it in each of its processes."""
    if SGLANG is None:
        entry_point().load()()
        HookRegistry.apply_hooks()
        return
    plugins = importlib.import_module("sglang.srt.plugins")
    with mock.patch.object(plugins, "entry_points", lambda group: [entry_point()]):
        plugins.load_plugins()


def begin_model() -> Any:
    """SGLang's module of sequence-parallel layers, when a process has its model's configuration."""
    sequence = importlib.import_module(LAYERNORM_SP)
    config = types.SimpleNamespace(hf_config=types.SimpleNamespace(architectures=["Qwen3ForCausalLM"]))
    sequence.initialize_layernorm_sp(model_config=config)
    return sequence


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
    g = torch.Generator().manual_seed(1)
    x, up, down = (
        torch.randint(-2, 3, shape, generator=g).bfloat16()
        for shape in ((TOKENS, HIDDEN), (world_size * WIDE, HIDDEN), (HIDDEN, world_size * WIDE))
    )
    padded = torch.nn.functional.pad(x, (0, 0, 0, -TOKENS % world_size))
    column, row = (
        types.SimpleNamespace(
            weight=weight,
            bias=None,
            quant_method=UnquantizedLinearMethod(),
            tp_group=types.SimpleNamespace(world_size=world_size),
        )
        for weight in (up.chunk(world_size)[rank], down.chunk(world_size, dim=1)[rank].contiguous())
    )
    with (
        sglang(True),
        mock.patch.object(flux, "ag_gemm", wraps=flux.ag_gemm) as gathers,
        mock.patch.object(flux, "gemm_rs", wraps=flux.gemm_rs) as scatters,
    ):
        load_plugins()
        sequence = begin_model()
        if SGLANG is not None:
            sequence.set_sp_num_tokens(TOKENS)
        wide = sequence.column_parallel_g_matmul(column, padded.chunk(world_size)[rank], None)
        total = sequence.row_parallel_gbar_matmul(row, wide.clamp(0, 1), None)
        assert gathers.call_count == scatters.call_count == 1
    expected = (padded @ up.t()).clamp(0, 1)
    assert torch.equal(wide, x @ column.weight.t())
    assert torch.equal(total, (expected @ down.t()).chunk(world_size)[rank])
    return said.messages


def test_prefill() -> None:
    line = "flux: SGLang: prefill is sequence parallel; its bias-free 16-bit linear layers run on flux"
    for messages in spawn(prefill, 2, backend="gloo", timeout_s=60):
        assert messages == [line]


@pytest.mark.parametrize("has_it", [True, False])
def test_not_used_is_told(has_it: bool, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr("flux._log._said", set())
    with sglang(False, has_it), caplog.at_level(logging.INFO, "flux"):
        load_plugins()
        if has_it:
            begin_model()
    (message,) = (record.message for record in caplog.records if record.name == "flux")
    assert message.startswith("flux: SGLang: not used, because")
    assert ("--enable-layernorm-sp" in message) == has_it


def test_without_sglang() -> None:
    with mock.patch.dict(sys.modules, {"sglang": None}), pytest.raises(ImportError):
        entry_point().load()()
    assert not async_tp._installed
