"""The command line: ``flux`` or ``python -m flux``."""

from __future__ import annotations

import typer

from flux.cli import bench, doctor, verify

app = typer.Typer(
    name="flux",
    help="Fused communication and computation kernels for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench.command)
app.command("verify")(verify.command)
app.command("doctor")(doctor.command)


def main() -> None:
    """Entry point of the console script."""
    app()
