"""The plugin for SGLang: exact sums and products of two ranks, and what the log says.

With SGLang installed, its own plugin loader, hooks and sequence-parallel layers run; what needs a GPU there
is a stand-in. Without it, stand-ins have the signatures of SGLang 0.5.23, and call the operators as it does.
"""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import pkgutil
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import stand_ins
import torch
import torch.distributed as dist
from cases import counted
from megatron_models import Told

import flux
from flux.integrations import async_tp
from flux.testing import spawn

ROOT = Path(__file__).parents[3]
LAYERNORM_SP = "sglang.srt.layers.layernorm_sp"
SGLANG = importlib.util.find_spec("sglang")
TOKENS, HIDDEN, WIDE = 5, 16, 24  # five tokens do not divide by two ranks


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    async_tp.uninstall()


class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    """SGLang's, for the kinds of hooks that flux registers."""

    hooks: list[tuple[str, Callable[..., Any], HookType]] = []

    @classmethod
    def register(
        cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER, *, source: Any = None
    ) -> None:
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook, hook_type in cls.hooks:
            place, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(place)
            original = getattr(owner, name)

            def after(*args: Any, original: Any = original, hook: Any = hook, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                return told if (told := hook(result, *args, **kwargs)) is not None else result

            def around(*args: Any, original: Any = original, hook: Any = hook, **kwargs: Any) -> Any:
                return hook(original, *args, **kwargs)

            setattr(owner, name, after if hook_type is HookType.AFTER else around)


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


def group_coordinator() -> type:
    """SGLang's class of a group: what is used of it, and which sums it made itself."""

    class GroupCoordinator:
        def __init__(self, device_group: Any) -> None:
            self.device_group, self.world_size = device_group, device_group.size()
            self.own: list[torch.Tensor] = []

        def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                self.own.append(input_)
                dist.all_reduce(input_, group=self.device_group)
            return input_

    return GroupCoordinator


def stand_in(enabled: bool) -> dict[str, types.ModuleType]:
    """Modules of SGLang: all that is used of it, or the parts that need a GPU."""
    parts: dict[str, dict[str, Any]] = {
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        LAYERNORM_SP: {
            "initialize_layernorm_sp": lambda *, model_config: None,
            "layernorm_sp_enabled": lambda: enabled,
            "column_parallel_g_matmul": column_parallel_g_matmul,
            "row_parallel_gbar_matmul": row_parallel_gbar_matmul,
        },
        "sglang.srt.distributed.parallel_state": {"GroupCoordinator": group_coordinator()},
    }
    HookRegistry.hooks = []
    if SGLANG is not None:
        flags = types.SimpleNamespace(sp=types.SimpleNamespace(enabled=None))
        rank, p = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        group = types.SimpleNamespace(world_size=p, rank_in_group=rank, device_group=dist.group.WORLD)
        parallel = types.SimpleNamespace(enable_layernorm_sp=enabled, tp_group=group)
        parts = {
            "sglang.srt.runtime_context": {
                "get_flags": lambda: flags,
                "get_forward": lambda: None,
                "get_parallel": lambda: parallel,
            },
            "sglang.srt.utils.common": {"ceil_align": lambda n, to: n + -n % to},
            "sglang.srt.distributed.parallel_state": parts["sglang.srt.distributed.parallel_state"],
            "sglang.srt.layers.quantization.unquant": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
        }
    modules = stand_ins.modules(parts)
    if SGLANG is not None:  # these packages are SGLang's
        del modules["sglang.srt"], modules["sglang.srt.layers"]
        modules["sglang"].__path__ = list(SGLANG.submodule_search_locations or ())
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


def all_reduces(rank: int, world_size: int, setting: str) -> list[str]:
    """SGLang's sums: on flux if asked for, and those alone that flux runs fused."""
    said = Told()
    logging.getLogger("flux").setLevel(logging.INFO)
    alone = dist.new_group([rank], use_local_synchronization=True)
    with (
        sglang(False),
        mock.patch.dict(os.environ, {"FLUX_SGLANG_ALL_REDUCE": setting}),
        mock.patch.object(flux, "all_reduce", wraps=flux.all_reduce) as sums,
    ):
        load_plugins()
        make = importlib.import_module("sglang.srt.distributed.parallel_state").GroupCoordinator
        group = make(dist.group.WORLD)
        x = (torch.arange(6 * 16).view(6, 16) % 7 - 3).bfloat16()
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(group.all_reduce(x.to(dtype) * (rank + 1)), x.to(dtype) * 3)
        assert sums.call_count == (2 if setting == "on" else 0) and len(group.own) == 2 - sums.call_count
        if setting == "on":
            for other in (x.float(), x.int(), x.t(), x[:0]):
                group.all_reduce(other.clone(memory_format=torch.preserve_format))
            compiled = torch.compile(group.all_reduce, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x), x), "the stand-in sums nothing then"
            single = make(alone)
            assert torch.equal(single.all_reduce(x.clone()), x)
            assert sums.call_count == 2 and len(group.own) == 4 and len(single.own) == 1
    return said.messages


@pytest.mark.parametrize("setting", ["on", "off"])
def test_all_reduces(setting: str) -> None:
    for messages in spawn(all_reduces, 2, setting, backend="gloo", timeout_s=60):
        told = [message for message in messages if "sums" in message]
        assert told == (
            [
                "flux: SGLang: sums of groups run on flux (FLUX_SGLANG_ALL_REDUCE)",
                "flux: SGLang: sums stay SGLang's: x is torch.float32",
                "flux: SGLang: sums stay SGLang's: x is torch.int32",
                "flux: SGLang: sums stay SGLang's: x is not contiguous, or empty",
                "flux: SGLang: sums stay SGLang's: the group has one rank",
            ]
            if setting == "on"
            else []
        )


def test_a_setting_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_SGLANG_ALL_REDUCE", "yes")
    with (
        sglang(False),
        pytest.raises(ValueError, match="FLUX_SGLANG_ALL_REDUCE='yes': must be one of off, on"),
    ):
        entry_point().load()()
    assert not async_tp._installed


@pytest.mark.skipif(SGLANG is None, reason="needs SGLang, which is not installed")
def test_sglang_has_what_the_hook_replaces() -> None:
    """Importing this module takes a GPU; its source tells."""
    (folder,) = SGLANG.submodule_search_locations  # type: ignore[union-attr]
    tree = ast.parse((Path(folder) / "srt" / "distributed" / "parallel_state.py").read_text())
    (group,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "GroupCoordinator")
    (method,) = (n for n in group.body if isinstance(n, ast.FunctionDef) and n.name == "all_reduce")
    assert [argument.arg for argument in method.args.args] == ["self", "input_"]
    text = ast.unparse(group)
    assert "self.device_group" in text and "self.world_size" in text


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


def prefill(rank: int, world_size: int) -> list[str]:
    """A column- and a row-parallel layer, as they run between sequence-parallel norms."""
    said = Told()
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
    with sglang(True), counted("ag_gemm", "gemm_rs") as (gathers, scatters):
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
