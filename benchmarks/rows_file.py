"""Arguments of a benchmark on one GPU, and its file: what it is about, the machine, a row for each case."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import flux


def make_parser(description: str) -> argparse.ArgumentParser:
    """Of the arguments of such a benchmark: the file, and which shapes it times."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--only", default="", metavar="REGEX", help="shapes to time")
    return parser


def write(out: Path, what: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the file anew: after each row, so that what was measured outlives a run that is cut off."""
    gpu = torch.cuda.get_device_name()
    facts = {"what": what, "flux": flux.__version__, "gpu": gpu, "torch": torch.__version__}
    out.write_text(json.dumps(facts | {"rows": list(rows)}, indent=1) + "\n")
