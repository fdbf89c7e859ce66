"""Files of measurements: those that flux ships, and the user's (FLUX_TUNING)."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flux import _env
from flux._log import say_once
from flux.tuning.facts import NO_FACTS, WAYS, Fact, Tuning
from flux.tuning.machine import Machine, of_device

SCHEMA = 1
SHIPPED = Path(__file__).with_name("shipped")


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
    return {
        "digest": tuning.digest,
        "source": tuning.source,
        "problem": tuning.problem,
        "shipped": shipped,
    }


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
    for path in sorted(SHIPPED.glob("*.json")):
        machine, facts = read(path)
        if here.arch != "cpu" and machine.difference(here) is None:
            return Tuning(facts, path.stem)
    return NO_FACTS


def read(path: Path) -> tuple[Machine, tuple[Fact, ...]]:
    """The machine and the facts of a file.

    Raises:
        ValueError: the file is not there, or is no tuning file of this schema.
    """
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, not {SCHEMA}")
        facts = tuple(_fact(row, data["sources"]) for row in data["rows"])
        return Machine(**data["machine"]), facts
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is no tuning file of flux: {type(error).__name__}: {error}") from None


def _fact(row: dict[str, Any], sources: list[str]) -> Fact:
    us = {str(way): float(time) for way, time in row["us"].items()}
    if not us or not us.keys() <= set(WAYS) or min(us.values()) <= 0:
        raise ValueError(f"expected positive times of {', '.join(WAYS)}, got {row['us']}")
    given = {**row, "us": us, "source": sources[row["source"]], "summed": tuple(row.get("summed", ()))}
    fact = Fact(**given)
    if not isinstance(fact.op, str) or any(not isinstance(size, int) for size in fact.problem[1:]):
        raise ValueError(f"expected an operator and sizes, got {fact.problem}")
    return fact


def to_json(machine: Machine, facts: list[Fact], **about: Any) -> str:
    """The text of a file, a line for each fact.

    Args:
        about: what else the file tells: versions, dates, the command.
    """
    sources = list(dict.fromkeys(fact.source for fact in facts))
    rows = []
    for fact in facts:
        row = {key: value for key, value in asdict(fact).items() if value or key in ("n", "k", "noise")}
        rows.append(json.dumps({**row, "source": sources.index(fact.source)}))
    head = {"schema": SCHEMA, **about, "machine": asdict(machine), "sources": sources}
    lines = ",\n    ".join(rows)
    text = json.dumps(head, indent=2)[:-2]
    return f'{text},\n  "rows": [\n    {lines}\n  ]\n}}\n' if rows else f'{text},\n  "rows": []\n}}\n'
