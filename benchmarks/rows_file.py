"""The file of a benchmark on one GPU: what it is about, the machine, and a row for each case."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import flux


def write(out: Path, what: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the file anew: after each row, so that what was measured outlives a run that is cut off."""
    gpu = torch.cuda.get_device_name()
    facts = {"what": what, "flux": flux.__version__, "gpu": gpu, "torch": torch.__version__}
    out.write_text(json.dumps(facts | {"rows": list(rows)}, indent=1) + "\n")
