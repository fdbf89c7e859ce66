"""Files of measurements: those that flux ships, and the user's (FLUX_TUNING)."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch

from flux import _env, _files
from flux._files import Size
from flux._log import say_once
from flux.measured.machine import Machine, of_device
from flux.measured.times import NO_FACTS, OLD_WAYS, Fact, Tuning

_Schema = Literal[1]
(SCHEMA,) = get_args(_Schema)
SHIPPED = Path(__file__).with_name("shipped")
# By how much another machine's ways must differ for a plan to follow them.
_BORROWED = 0.05


def local(device: torch.device) -> Tuning:
    """The facts for a device of this process. Files are read once in a process, so plans never change."""
    return _read_once(_env.get("FLUX_TUNING"), device)


def agreed(told: list[dict[str, Any]], mine: Tuning) -> tuple[Tuning, str | None]:
    """The facts for a group, from what all ranks told (`to_tell`), and what to raise on all of them, or None.

    Shipped facts that differ, as on GPUs of two kinds, are not used. Other differences are errors.
    """
    if failed := [f"rank {rank}: {fact['problem']}" for rank, fact in enumerate(told) if fact["problem"]]:
        return NO_FACTS, "; ".join(failed)
    if all(fact["digest"] == told[0]["digest"] for fact in told):
        return mine, None
    if all(fact["shipped"] for fact in told):
        say_once("ranks have GPUs of different kinds: plans use no measurements")
        return NO_FACTS, None
    files = ", ".join(f"rank {rank} {fact['source']} ({fact['digest']})" for rank, fact in enumerate(told))
    return NO_FACTS, f"FLUX_TUNING: expected the same measurements on all ranks of the group, got {files}"


def to_tell(tuning: Tuning) -> dict[str, Any]:
    """What a rank tells its peers, so that all decide alike."""
    shipped = _env.get("FLUX_TUNING") == "auto"
    return {"digest": tuning.digest, "source": tuning.source, "problem": tuning.problem, "shipped": shipped}


@functools.cache
def _read_once(setting: str, device: torch.device) -> Tuning:
    if setting == "off":
        return Tuning(source="FLUX_TUNING=off")
    here = of_device(device)
    shipped = _shipped(here)
    if setting == "auto":
        return shipped
    try:
        machine, facts = read(Path(setting))
    except ValueError as error:
        return Tuning(source=setting, problem=f"FLUX_TUNING: {error}")
    if difference := machine.difference(here):
        say_once(f"FLUX_TUNING={setting} was measured on another kind of machine ({difference}): not used")
        return Tuning(source=f"{setting}, of another machine ({difference})")
    # Times of two machines do not mix in an interpolation.
    own = {fact.weight for fact in facts}
    rest = tuple(fact for fact in shipped.facts if fact.weight not in own)
    return Tuning((*facts, *rest), setting)


def _shipped(here: Machine) -> Tuning:
    """The facts of this kind of machine. Operators that were not measured on it with so many ranks have those
    of a machine with other memory or clocks: what a way saves there it saves here, within _BORROWED.
    """
    own, others = NO_FACTS, list[Fact]()
    for path in sorted(SHIPPED.glob("*.json")) if here.arch != "cpu" else ():
        machine, facts = read(path)
        if machine.difference(here) is None:
            own = Tuning(facts, path.stem)
        elif replace(machine, sm_mhz=None, memory_gb_per_s=None).difference(here) is None:
            source = "{}, another machine"
            others = [replace(each, noise=_BORROWED, source=source.format(each.source)) for each in facts]
    measured = {(fact.op, fact.ranks) for fact in own.facts}
    borrowed = [fact for fact in others if (fact.op, fact.ranks) not in measured]
    return Tuning((*own.facts, *borrowed), own.source) if borrowed else own


def of_vllm() -> Iterator[tuple[Machine, dict[str, Any]]]:
    """By what vLLM's plugin decides (flux.integrations.vllm.thresholds): of each machine for which flux ships
    such measurements.
    """
    for path in sorted(SHIPPED.glob("*.json")):
        file: _File = _files.read_json(path, _File, "tuning file")
        if "vllm" in file:
            yield file["machine"], file["vllm"]


class _Row(TypedDict):
    """A fact, whose source is a number of the file's list."""

    source: Size


class _Vllm(TypedDict, total=False):
    vllm: dict[str, list[dict[str, Any]]]


class _File(_Vllm):
    """What a tuning file has at least."""

    schema: _Schema
    machine: Machine
    sources: list[str]
    rows: list[_Row]


def read(path: Path) -> tuple[Machine, tuple[Fact, ...]]:
    """The machine and the facts of a file.

    Raises:
        ValueError: the file is not there, or is no tuning file of this schema.
    """
    file: _File = _files.read_json(path, _File, "tuning file")
    sources, facts, first = file["sources"], [], dict[Any, int]()
    for i, row in enumerate(file["rows"]):
        where, place = f"tuning file {path}", f"rows[{i}]"
        if row["source"] >= len(sources):
            raise ValueError(f"{where}: {place}.source: expected one of {len(sources)}, got {row['source']}")
        told: dict[str, Any] = {**row, "source": sources[row["source"]]}
        if isinstance(told.get("us"), dict):
            told["us"] = {OLD_WAYS.get(way, way): us for way, us in told["us"].items()}
        fact: Fact = _files.parse(Fact, told, where, place)
        if (same := first.setdefault(fact.problem, i)) != i:
            raise ValueError(f"{where}: {place}: expected another problem, got that of rows[{same}]")
        facts.append(fact)
    return file["machine"], tuple(facts)


def to_json(
    machine: Machine, facts: list[Fact], vllm: dict[str, list[dict[str, Any]]] | None = None, **about: Any
) -> str:
    """The text of a file, a line for each fact.

    Args:
        vllm: as of `of_vllm`.
        about: what else the file tells: versions, dates, the command.
    """
    sources = list(dict.fromkeys(fact.source for fact in facts))
    rows = []
    for fact in facts:
        row = {key: value for key, value in asdict(fact).items() if value or key in ("n", "k", "noise")}
        rows.append({**row, "source": sources.index(fact.source)})
    head = {"schema": SCHEMA, **about, "machine": asdict(machine), "sources": sources}
    parts = [json.dumps(head, indent=2)[1:-2], f'\n  "rows": {_lines(rows, "  ")}']
    if vllm is not None:
        lists = (f'\n    "{name}": {_lines(entries, "    ")}' for name, entries in vllm.items())
        parts.append(f'\n  "vllm": {{{",".join(lists)}\n  }}')
    return f"{{{','.join(parts)}\n}}\n"


def _lines(rows: list[dict[str, Any]], indent: str) -> str:
    inside = ",".join(f"\n{indent}  {json.dumps(row)}" for row in rows)
    return f"[{inside}\n{indent}]" if rows else "[]"
