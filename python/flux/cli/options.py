"""Common parts of all commands: parsing and refusing options, and output under torchrun.

A refusal is one line on standard error and exit status 2, before any process is started.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperGroup

from flux._files import is_stream
from flux.bench.report import make_console
from flux.testing import SpawnError

# typer from 0.20 on vendors click, so take the class from typer instead of importing click.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]
_MOST_SECONDS = 1e6


def torchrun() -> tuple[int, int] | None:
    """(rank, world size) of a process that torchrun started, else None.

    Raises ValueError if RANK or WORLD_SIZE is no number.
    """
    texts = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    if None in texts:
        return None
    try:
        rank, world = (int(text or "") for text in texts)
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        expected = "RANK and WORLD_SIZE expected as torchrun sets them"
        raise ValueError(f"{expected}, got RANK={texts[0]!r} and WORLD_SIZE={texts[1]!r}")
    return rank, world


def speaks() -> bool:
    """Whether this process prints: under torchrun only rank 0 does."""
    try:
        place = torchrun()
    except ValueError:
        return True
    return place is None or place[0] == 0


def only_rank_0() -> None:
    """Exits on all ranks of torchrun except rank 0, for commands that run in one process."""
    with refusing():
        place = torchrun()
    if place is not None and place[0]:
        raise typer.Exit(0)


def say_error(message: object) -> None:
    """An error as one line on standard error."""
    if speaks():
        text = " ".join(str(message).split())
        make_console(stderr=True).print(Text.assemble(("error", "bold red"), f" {text}"), soft_wrap=True)


def refuse(message: object) -> NoReturn:
    say_error(message)
    raise typer.Exit(2)


@contextmanager
def refusing() -> Iterator[None]:
    """Converts ValueErrors and RuntimeErrors of option checks into a refusal."""
    try:
        yield
    except (typer.Exit, typer.Abort):  # which are RuntimeErrors
        raise
    except (ValueError, RuntimeError) as error:
        refuse(error)


@contextmanager
def _one_line_errors(command: Callable[[], str | None]) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        # `flux` without a command prints its help.
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        option = getattr(error, "param", None)
        if option is not None and isinstance(error, typer.BadParameter):
            text = f"{option.opts[0] if option.opts[0].startswith('-') else option.name} {error.message}"
        else:
            text = error.format_message().rstrip(".")
            text = text[:1].lower() + text[1:]
        refuse(f"{command() or 'flux'}: {text}")
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader has closed the pipe, as with `| head`
            raise
        say_error(f"{command() or 'flux'}: {error}")
        raise typer.Exit(1) from None


class Commands(TyperGroup):
    """The group of all commands. Prints errors of options as one line, without usage and box."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _one_line_errors(lambda: None):
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _one_line_errors(lambda: ctx.invoked_subcommand):
            return super().invoke(ctx)


def timed_out(error: Exception) -> bool:
    """Whether processes were stopped at their time limit, and none of them had failed before."""
    return isinstance(error, SpawnError) and all(
        failure.exit_code is None and not failure.traceback for failure in error.failures
    )


def whole(least: int = 1, most: int | None = None) -> Callable[[Any], int]:
    limits = f"from {least} to {most}" if most is not None else f"of {least} or more"

    def number(text: Any) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise typer.BadParameter(f"expected a whole number {limits}, got {text!r}")
        return value

    return number


def real(least: float, most: float = _MOST_SECONDS) -> Callable[[Any], float]:
    def number(text: Any) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise typer.BadParameter(f"expected a number from {least:g} to {most:.0f}, got {text!r}")
        return value

    return number


def counted(text: str, *names: str, least: int = 1, most: int | None = None) -> Any:
    return typer.Option(*names, parser=whole(least, most), metavar="N", help=text)


def named(text: str, *names: str, metavar: str = "NAME") -> Any:
    return typer.Option(*names, metavar=metavar, help=text)


def flag(text: str, *names: str) -> Any:
    return typer.Option(*names, metavar="", help=text)


def file(text: str, *names: str) -> Any:
    return typer.Option(*names, metavar="FILE", help=text)


Models = Annotated[list[str] | None, named("Only this model; may be repeated.")]
Rows = Annotated[list[int] | None, counted("Rows of x (tokens); may be repeated.", "--m")]
Burst = Annotated[int | None, counted("Calls in a burst.")]
Rounds = Annotated[int | None, counted("Bursts of each candidate.")]
OnCpu = Annotated[bool, flag("Use the CPU path even if there are GPUs.", "--cpu")]


def check_target(name: str, path: Path | None) -> None:
    """Makes the folder of a file that is written after the run, and tries whether files can be made there.

    Args:
        name: command and option, for the message.

    Raises:
        ValueError: the file cannot be written.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if is_stream(path):
            return
        folder = path.resolve().parent
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
        folder.mkdir(parents=True, exist_ok=True)
        # With the name of the file, which may be too long.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.name}."):
            pass
    except OSError as error:
        what = f"expected a file that can be written, got {str(path)!r}"
        raise ValueError(f"{name} {what}: {error.strerror}") from error
