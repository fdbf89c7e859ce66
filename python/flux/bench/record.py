"""The JSON result file: written row by row, read back by ``--show`` and by ``--plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

import torch

import flux
from flux import machine
from flux._files import Count, Positive, Within, is_stream, parse, read_json, write_json
from flux.bench.model import LINK_GB_PER_S, Derived, Row, Timing, derive
from flux.peers import versions

_Schema = Literal[1]
(SCHEMA,) = get_args(_Schema)


class _Settings(TypedDict, total=False):
    """Those that tables and pictures depend on."""

    world: Count
    link_gb_per_s: Positive


class _Machine(TypedDict, total=False):
    peers: dict[str, Any]


@dataclass
class Record:
    """One run of ``flux bench``.

    settings: iters, rounds, world, tp, link_gb_per_s and whatever else decided what was measured.
    complete: False in a file whose run was cut off; its rows are good.
    """

    version: str
    commit: str
    date: str
    suite: str
    device: str
    machine: Annotated[dict[str, Any], _Machine]
    settings: Annotated[dict[str, Any], _Settings]
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def link_gb_per_s(self) -> float:
        return float(self.settings.get("link_gb_per_s", LINK_GB_PER_S))

    @property
    def with_floor(self) -> bool:
        """A floor is a statement about GPU links: there is none on CPUs."""
        return self.device == "cuda"

    def derived(self, row: Row) -> Derived:
        return derive(row, self.link_gb_per_s, with_floor=self.with_floor)

    def ranks(self, row: Row) -> str:
        """How many ranks a row ran on, as titles say it."""
        if self.device == "cpu":
            return f"{self.settings.get('world', row.tp)} processes"
        # For mixtures of experts, the variant names the parallelism.
        return f"{row.tp} ranks" if row.op.startswith("moe") else f"TP {row.tp}"

    def ops(self) -> list[str]:
        return list(dict.fromkeys(row.op for row in self.rows))


def row_to_json(row: Row, record: Record) -> dict[str, Any]:
    data = asdict(row)
    data["local"] = list(row.local)
    data["times"] = {
        name: {
            "role": t.role,
            "median_ms": round(t.median, 6),
            "min_ms": round(t.min, 6),
            "max_ms": round(t.max, 6),
            "samples_ms": [round(s, 6) for s in t.samples],
        }
        for name, t in row.times.items()
    }
    # Only for readers of the file: --show computes the derived columns again from the samples.
    data["derived"] = asdict(record.derived(row))
    return data


class _Times(TypedDict):
    role: str
    samples_ms: Annotated[list[Positive], Within(1)]


class _Row(TypedDict, total=False):
    """Fields that are not those of Row."""

    times: dict[str, _Times]


class _File(TypedDict):
    schema: _Schema
    rows: list[_Row]


def _row_from_json(data: _Row, where: str, place: str) -> Row:
    # Of files from before: times under conditions that are not measured any more.
    left = ("derived", "conditions", "sustained_ms", "after_ms")
    fields: dict[str, Any] = {key: value for key, value in data.items() if key not in left}
    times = {name: Timing(t["role"], tuple(t["samples_ms"])) for name, t in data.get("times", {}).items()}
    row: Row = parse(Row, {**fields, "times": times}, where, place)
    return row


def to_json(record: Record) -> dict[str, Any]:
    data = {key: value for key, value in vars(record).items() if key != "rows"}
    return {"schema": SCHEMA, **data, "rows": [row_to_json(row, record) for row in record.rows]}


def from_json(data: Any, where: str = "") -> Record:
    """A result of bench, from its JSON.

    Args:
        where: the file.

    Raises:
        ValueError: it is something else.
    """
    file: _File = parse(_File, data, where)
    rows = [_row_from_json(row, where, f"rows[{i}]") for i, row in enumerate(file["rows"])]
    fields = {key: value for key, value in data.items() if key != "schema"}
    record: Record = parse(Record, {**fields, "rows": rows}, where)
    return record


def write(record: Record, path: str | Path) -> None:
    """Writes a result, finished or not. A pipe gets the finished one only."""
    if record.complete or not is_stream(Path(path)):
        write_json(to_json(record), path)


def read(path: str | Path) -> Record:
    """A result of bench. Raises ValueError if the file is something else."""
    what = "result of bench"
    return from_json(read_json(path, what=what), f"{what} {path}")


def head(suite: str, device: str) -> dict[str, Any]:
    about = {"version": flux.__version__, "commit": machine.commit(), "date": machine.now(), "suite": suite}
    return {**about, "machine": machine.describe(device)}


def take_clocks(result: dict[str, Any], key: str) -> list[str]:
    """Keeps in a result what nvidia-smi says of all GPUs under load. Returns what is wrong with them."""
    gpus = machine.smi_under_load([torch.device("cuda", i) for i in range(torch.cuda.device_count())])
    result["machine"][key] = gpus
    return machine.throttled(gpus)


def write_rows(path: str | Path, what: str, rows: Sequence[Mapping[str, Any]], **about: Any) -> None:
    """Writes raw measurements that are no rows of bench: a head of `what` and `about`, and the rows."""
    cuda = torch.cuda.is_available()
    head = {
        "schema": SCHEMA,
        "what": what,
        "commit": machine.commit(),
        "date": machine.now(),
        "gpu": f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}" if cuda else None,
        "packages": {"flux": flux.__version__, "torch": torch.__version__, **versions()},
        "about": about,
    }
    write_json({**head, "rows": list(rows)}, path)
