"""Prints which layers run on flux in releases of Megatron-Core: the table of docs/megatron.md.

    .venv-megatron/bin/python tools/megatron_table.py .venv-megatron/releases/*

Each argument is a folder with one release, as `make megatron` makes them; without any, the release that is
installed. Models are built on two CPU processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from megatron_models import KINDS, make_config, make_model, prepare, stock_spec  # noqa: E402

from flux.testing import spawn  # noqa: E402

HEADER = f"| release | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}"
EMBEDDING = "embedding.word_embeddings"


def count(rank: int, world_size: int) -> tuple[str, list[str]]:
    """Megatron's version; for each kind of model how many layers convert_spec puts on flux, how many with
    convert_model, and how many there are, without the embedding.
    """
    prepare(2)
    from megatron.core import package_info

    from flux.integrations.megatron import convert_model, convert_spec, coverage

    cells = []
    for options in KINDS.values():
        config = make_config(**options, sequence_parallel=True)
        model = make_model(config, convert_spec(stock_spec(config)))
        by_spec = [name for name, reason in coverage(model).items() if reason is None]
        found = convert_model(model)
        assert found.pop(EMBEDDING) is not None
        by_both = [name for name, reason in found.items() if reason is None]
        cells.append(f"{len(by_spec)}, {len(by_both)} of {len(found)}")
    return package_info.__version__.split("+")[0], cells  # it appends a commit where it finds one


def row() -> str:
    """The row of the release that is installed."""
    (version, cells), other = spawn(count, 2, backend="gloo", timeout_s=240)
    assert (version, cells) == other
    return f"| {version} | {' | '.join(cells)} |"


def main(folders: list[str]) -> None:
    if not folders:
        print(row())
        return
    print(HEADER)
    for folder in folders:
        path = os.pathsep.join([str(Path(folder).resolve()), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-W", "ignore", __file__]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
