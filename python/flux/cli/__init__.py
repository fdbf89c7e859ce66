"""The command line: ``flux`` or ``python -m flux``."""

from __future__ import annotations

from typing import Annotated

import typer

import flux
from flux.bench.report import make_console
from flux.cli import bench, compare, doctor, history, tune, verify
from flux.cli.options import Commands

_INTERRUPTED = 130

app = typer.Typer(cls=Commands, name="flux", no_args_is_help=True, pretty_exceptions_enable=False)
app.command("bench")(bench.command)
app.command("compare")(compare.command)
app.command("history")(history.command)
app.command("tune")(tune.command)
app.command("verify")(verify.command)
app.command("doctor")(doctor.command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flux {flux.__version__}")
        raise typer.Exit()


@app.callback()
def without_command(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Fused communication and computation kernels for PyTorch."""


def main() -> None:
    """Entry point of the console script. Ctrl-C is one line, and exit status 130."""
    try:
        app()
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != _INTERRUPTED:  # which typer makes of a Ctrl-C
            raise
        console = make_console(stderr=True)
        console.show_cursor()  # a progress bar may have been killed
        console.print("interrupted", style="bold red")
        raise SystemExit(_INTERRUPTED) from None
