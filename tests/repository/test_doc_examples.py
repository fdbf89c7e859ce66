"""The examples of README.md, docs/*.md and of all public docstrings run: scripts as they are printed, other
blocks on four CPU ranks, with smaller sizes and with the names that their page takes for granted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_models import make_config, make_model, prepare, stock_spec
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import flux
from flux.testing import spawn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from names import example, public  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The page that docstrings are shown on, which says what their examples take for granted.
REFERENCE = "docs/api"
RANKS = 4
ROWS = 8

# What marks a block that is not run here, and why.
NOT_HERE = {
    "torch.cuda.graph(": "captures a CUDA graph",
    "init_process_group": "a script for torchrun, which has a test of its own",
}
# What marks a script, which runs by itself.
SCRIPT = 'if __name__ == "__main__":'
# What blocks need beside torch.
PACKAGES = {"integrations.megatron": "megatron", "transformers": "transformers"}
# What one rank can run for all, as it takes long to import and communicates nothing.
ALONE = "flux_transformers"
# For CPUs with little time. Sizes stay multiples of four.
SMALLER = {
    '"cuda"': '"cpu"',
    "4096": "64",
    "14336": "96",
    "8192": "64",
    "7168": "64",
    "1024": "64",
    "512": "32",
    "num_experts=128": "num_experts=8",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Name and text of each block of Python."""
    text, found = page.read_text(), []
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        line = text.count("\n", 0, match.start()) + 2
        found.append((f"{page.relative_to(ROOT)}:{line}", match.group(1)))
    return found


def script(mark: str) -> str:
    """The block of the README that a mark is in."""
    return next(text for _, text in blocks(ROOT / "README.md") if mark in text)


BLOCKS = {name: text for page in PAGES for name, text in blocks(page)}
BLOCKS |= {f"{REFERENCE}:{name}": example(node) for name, (_, node) in public().items()}
SCRIPTS = {name: text for name, text in BLOCKS.items() if SCRIPT in text}
LEFT_OUT = (SCRIPT, *NOT_HERE)
RUN = {name: text for name, text in BLOCKS.items() if not any(mark in text for mark in LEFT_OUT)}


def common(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    return {
        "torch": torch,
        "flux": flux,
        "mesh": mesh,
        "group": dist.group.WORLD,
        "x": torch.ones(ROWS, 64),
        "weight": torch.ones(16, 64),
    }


def quickstart(rank: int) -> dict[str, Any]:
    return {**common(rank), **decoding()}


def decoding() -> dict[str, Any]:
    return {
        "attention": torch.ones(3, 16),
        "o_weight": torch.ones(64, 16),
        "residual": torch.ones(3, 64),
        "norm": nn.RMSNorm(64),
        "next_norm": nn.RMSNorm(64),
        "mlp_up": nn.Linear(64, 16),
        "down_weight": torch.ones(64, 16),
    }


@functools.cache  # Megatron makes its groups once
def megatron(rank: int) -> dict[str, Any]:
    if importlib.util.find_spec("megatron") is None:
        return {}
    prepare(RANKS)
    config = make_config(tensor_model_parallel_size=RANKS)

    def gpt(config: Any, spec: Any, vocab_size: int, sequence_length: int) -> Any:
        return make_model(config, spec)

    # A script of Megatron-LM's repository, which no package contains.
    scripts = ModuleType("gpt_builders")
    scripts.__dict__["gpt_builder"] = gpt
    sys.modules["gpt_builders"] = scripts
    return {
        **common(rank),
        "GPTModel": gpt,
        "config": config,
        "recipe": SimpleNamespace(model=SimpleNamespace()),  # of Megatron-Bridge
        "get_gpt_layer_local_spec": lambda: stock_spec(config),
        "vocab_size": 64,
        "sequence_length": 16,
    }


def ag_gemm(rank: int) -> dict[str, Any]:
    weights = {f"{name}_weight": torch.ones(8, 64) for name in ("q", "k", "v", "gate", "up")}
    return {**common(rank), **weights, "gate_bias": torch.ones(8)}


def gemm_rs(rank: int) -> dict[str, Any]:
    return {**common(rank), "m": ROWS, "n": 16, "k": 64}


def layers(rank: int) -> dict[str, Any]:
    model = nn.Sequential(flux.layers.RMSNorm(64), flux.layers.ParallelMLP(64, 96))
    loss = model(torch.ones(ROWS, 64)).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(ROWS, 64, dtype=torch.bfloat16)
    return {**common(rank), "model": model, "loss": loss, "optimizer": optimizer, "x": x}


def moe(rank: int) -> dict[str, Any]:
    return {**common(rank), "x": torch.ones(ROWS, 64).bfloat16(), "router_logits": torch.ones(ROWS, 8)}


def pytorch(rank: int) -> dict[str, Any]:
    block = nn.Module()
    block.up, block.down = nn.Linear(64, 96), nn.Linear(96, 64)
    return {
        **common(rank),
        "block": block,
        "model": block,
        "parallelize_module": parallelize_module,
        "Shard": Shard,
    }


def reference(rank: int) -> dict[str, Any]:
    return {"torch": torch, "dist": dist, "flux": flux, "rank": rank, "p": RANKS, **megatron(rank)}


NAMES: dict[str, Callable[[int], dict[str, Any]]] = {
    "README.md": common,
    "docs/quickstart.md": quickstart,
    REFERENCE: reference,
    "docs/ag_gemm.md": ag_gemm,
    "docs/fp8.md": reference,
    "docs/gemm_ar.md": lambda rank: {**common(rank), **decoding()},
    "docs/gemm_rs.md": gemm_rs,
    "docs/layers.md": layers,
    "docs/megatron.md": megatron,
    "docs/moe.md": moe,
    "docs/pytorch.md": pytorch,
}


def lacks(text: str) -> str | None:
    """The package that a block needs and this machine has not."""
    needed = [package for mark, package in PACKAGES.items() if mark in text]
    return next((package for package in needed if importlib.util.find_spec(package) is None), None)


def smaller(text: str) -> str:
    for size, small in SMALLER.items():
        text = text.replace(size, small)
    return text


def run_page(rank: int, page: str) -> dict[str, str]:
    """What went wrong in each block of a page; a block may use what those before it have defined."""
    answers, names = {}, NAMES[page](rank)
    for name, text in RUN.items():
        if name.rpartition(":")[0] != page or lacks(text) is not None:
            continue
        answers[name] = ""
        if ALONE in text and rank > 0:
            continue
        # One docstring does not continue another.
        known = {**names} if page == REFERENCE else names
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(smaller(text), name, "exec"), known)
        except Exception:
            answers[name] = traceback.format_exc()
    return answers


def run_pages(rank: int, world_size: int) -> dict[str, str]:
    answers: dict[str, str] = {}
    for page in NAMES:
        answers |= run_page(rank, page)
    return answers


@pytest.fixture(scope="module")
def answers() -> list[dict[str, str]]:
    return spawn(run_pages, RANKS, backend="gloo", timeout_s=240)


@pytest.mark.parametrize("name", RUN)
def test_example(name: str, answers: list[dict[str, str]]) -> None:
    missing = lacks(RUN[name])
    if missing is not None:
        pytest.skip(f"needs {missing}, which is not installed")
    assert [answer[name] for answer in answers] == [""] * RANKS


def torchs_norm(rank: int, world_size: int) -> list[str]:
    """gemm_ar with the eps of a torch.nn.RMSNorm, None, on sums so small that eps decides."""
    wrong = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        norm = nn.RMSNorm(16, dtype=dtype)
        x = torch.full((3, 4), 2.0**-9, dtype=dtype)
        weight = torch.arange(64, dtype=dtype).view(16, 4) / 64
        with torch.no_grad():
            h, total = flux.gemm_ar(x, weight, norm_weight=norm.weight, eps=norm.eps)
            if not torch.allclose(h, norm(total), rtol=2 * torch.finfo(dtype).eps, atol=0):
                wrong.append(f"{dtype}: {(h / norm(total)).tolist()}")
    return wrong


def test_the_decoding_example_has_torchs_eps() -> None:
    assert nn.RMSNorm(16).eps is None
    assert spawn(torchs_norm, 2, backend="gloo") == [[]] * 2


def test_what_is_not_run() -> None:
    """Each mark is that of one block: an example that gets one by mistake would be silently left out."""
    for mark in NOT_HERE:
        assert sum(mark in text for name, text in BLOCKS.items() if name not in SCRIPTS) == 1, mark
    assert len(RUN) == len(BLOCKS) - len(NOT_HERE) - len(SCRIPTS)
    for size in SMALLER:
        assert any(size in text for text in RUN.values()), f"{size} is in no example any more"


def run_script(*arguments: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT / "python")
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, check=True, timeout=240, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout


def test_scripts(tmp_path: Path) -> None:
    """Those that start their own ranks, all in one process: it imports torch once."""
    files = []
    for i, (name, text) in enumerate(SCRIPTS.items()):
        if "init_process_group" not in text:
            files.append(tmp_path / f"script_{i}.py")
            files[-1].write_text(f"# {name}\n{text}")
    assert len(files) >= 3
    run_all = "import runpy, sys\nfor file in sys.argv[1:]: runpy.run_path(file, run_name='__main__')"
    run_script("-c", run_all, *map(str, files))


def test_the_quick_start_under_torchrun(tmp_path: Path) -> None:
    (text,) = (text for text in SCRIPTS.values() if "init_process_group" in text)
    file = tmp_path / "mlp.py"
    file.write_text(smaller(text))
    run_script("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file))


def test_the_torchrun_example(tmp_path: Path) -> None:
    """What the README begins with."""
    file = tmp_path / "rs.py"
    file.write_text(script("init_process_group"))
    # Each rank to a file of its own: in one, their lines would mix.
    to_files = ("--redirects", "1", "--log-dir", str(tmp_path / "logs"))
    run_script("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *to_files, str(file))
    printed = {log.parent.name: log.read_text() for log in tmp_path.glob("logs/**/stdout.log")}
    assert printed.keys() == {"0", "1", "2", "3"}
    for rank, lines in printed.items():
        assert f"rank {rank}: [256, 1024], 4096\n" in lines


def explained(rank: int, p: int) -> str:
    flux.gemm_rs(torch.ones(p, 4), torch.ones(4, 4))  # the ranks ask each other how they are connected
    return str(flux.explain("gemm_rs", 1024, 1024, 1024, torch.float32))


def test_what_explain_prints() -> None:
    """The quick start shows it as it is."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (shown,) = re.findall(r"```\n(gemm_rs: x .*?)```", page, re.DOTALL)
    assert spawn(explained, RANKS) == [shown.rstrip()] * RANKS
