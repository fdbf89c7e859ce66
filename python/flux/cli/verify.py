"""``flux verify``: are the results of every op exact on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flux import machine
from flux._files import parse, write_json
from flux.bench.report import make_console
from flux.cli import options, verify_cases
from flux.cli.options import counted, file, real
from flux.cli.verify_log import Outcome
from flux.comm.workspace import MAX_WORLD_SIZE

_STYLE = {"exact": "green", "wrong": "bold red", "timed out": "bold red", "skipped": "yellow"}


def plan_runs(world: int | None, cpu: bool, timeout_s: float, nodes: int = 1) -> Iterator[Iterator[Outcome]]:
    """Real ranks as far as there are GPUs, emulated ones on the first; without a GPU the CPU path. With
    several nodes: only those.
    """
    gpus = 0 if cpu or not torch.cuda.is_available() else torch.cuda.device_count()
    if nodes > 1:
        size = world or (gpus - gpus % nodes if gpus else 2 * nodes)
        yield verify_cases.ranks(size, "cuda" if gpus else "cpu", timeout_s, nodes)
        return
    if not gpus:
        yield verify_cases.gemm(torch.device("cpu"))
        for size in [world] if world else [2, 4]:
            yield verify_cases.ranks(size, "cpu", timeout_s)
        return
    device = torch.device("cuda", 0)
    yield verify_cases.gemm(device)
    for size in [world] if world else [2, 4, 8]:
        if size > 1:
            yield verify_cases.emulated(size, device)
    real_sizes = [world] if world else sorted({2, gpus})
    for size in real_sizes:
        if 2 <= size <= gpus:
            yield verify_cases.ranks(size, "cuda", timeout_s)


def failed(outcomes: list[Outcome]) -> bool:
    return any(o.state in ("wrong", "timed out") for o in outcomes)


def report(outcomes: list[Outcome], console: Console) -> None:
    table = Table(header_style="bold")
    for column in ("op", "ranks", "case", "result"):
        table.add_column(column, overflow="fold")
    table.add_column("s", justify="right", no_wrap=True)
    previous = None
    for o in outcomes:
        if previous not in (None, (o.op, o.where)):
            table.add_section()
        previous = (o.op, o.where)
        result = Text.assemble((o.state, _STYLE[o.state]), f" {o.detail}" if o.detail else "")
        table.add_row(*map(Text, (o.op, o.where, o.case)), result, f"{o.seconds:.2f}")
    console.print(table)
    count = Counter(o.state for o in outcomes)
    states = [state for state in _STYLE if state != "timed out" or count[state]]
    text = ", ".join(f"{count[state]} {state}" for state in states)
    console.print(text, style="bold red" if failed(outcomes) else "green", highlight=False)


class _File(TypedDict):
    commit: str
    date: str
    outcomes: list[Outcome]


def show(data: dict[str, Any], console: Console) -> None:
    told: _File = parse(_File, data)
    console.print(Text(f"flux verify · {told['commit']} · {told['date']}", style="dim"))
    report(told["outcomes"], console)


def command(
    world: Annotated[int | None, counted("Only this number of ranks.", most=MAX_WORLD_SIZE)] = None,
    json_file: Annotated[Path | None, file("Also write the outcomes to this file.", "--json")] = None,
    cpu: options.OnCpu = False,
    timeout: Annotated[
        float, typer.Option(parser=real(1.0), metavar="SECONDS", help="For one number of ranks.")
    ] = 300.0,
    nodes: Annotated[
        int | None, counted("Only ranks on so many nodes, emulated on this machine.", most=MAX_WORLD_SIZE)
    ] = None,
) -> None:
    """Compare every op with exact results: integers in which each rank's part is marked, nothing rounds.

    Exit status 1 if any result differs, or does not come in time. Under torchrun rank 0 runs it
    alone, in processes of its own.
    """
    options.only_rank_0()
    with options.refusing():
        options.check_target("verify: --json", json_file)
        if world is not None and nodes is not None and world % nodes:
            raise ValueError(f"verify: --world expected a multiple of --nodes {nodes}, got {world}")
        gpus = 0 if cpu or not torch.cuda.is_available() else torch.cuda.device_count()
        if nodes is not None and gpus and (world or nodes) > gpus:
            raise ValueError(
                f"verify: --nodes expected at most {gpus}, the GPUs of this machine, got {nodes}"
            )
    machine.disable_multicast()
    outcomes: list[Outcome] = []
    for run in plan_runs(world, cpu, timeout, nodes or 1):
        outcomes += run
    bad = failed(outcomes)
    if json_file is not None:
        write_json(
            {
                "schema": 1,
                "date": machine.now(),
                "commit": machine.commit(),
                "machine": machine.describe("cuda" if torch.cuda.is_available() and not cpu else "cpu"),
                "ok": not bad,
                "outcomes": [asdict(o) for o in outcomes],
            },
            json_file,
        )
    report(outcomes, make_console())
    raise typer.Exit(1 if bad else 0)
