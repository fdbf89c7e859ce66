"""What a killed program leaves behind: processes, found by a variable of their environment, and files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

_VARIABLE = "PROGRAM_UNDER_TEST"
# Of state(): the last is of a process that ended, and that nobody has waited for.
STOPPED, ENDED = ("T",), ("", "Z")
# In the background of a shell SIGINT is ignored, and would stay so.
_WITH_INTERRUPTS = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def start(arguments: list[str], folder: Path, **env: str) -> subprocess.Popen[str]:
    """Starts Python with these arguments, in a process group of its own.

    Its temporary files go to folder/tmp, its output to folder/out and folder/err.
    """
    (folder / "tmp").mkdir()
    (folder / "begun").touch()
    marked_env = {**os.environ, **env, "TMPDIR": str(folder / "tmp"), _VARIABLE: str(folder)}
    # torch makes its cache's folder when it is imported, and means to leave it.
    marked_env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-c", _WITH_INTERRUPTS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            env=marked_env,
            start_new_session=True,
        )


def processes(folder: Path) -> dict[int, str]:
    """Process id and command of what is alive of the program that was started with this folder."""
    mark = f"{_VARIABLE}={folder}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended since, or is not ours to look at
            continue
    return found


def children(pid: int) -> list[int]:
    """Its processes, whichever of its threads started them."""
    everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [child for child in everyone if _stat(child)[1:2] == [str(pid)]]


def state(pid: int) -> str:
    """One letter, as ps shows it: T is stopped. Empty if there is no such process."""
    return "".join(_stat(pid)[:1])


def _stat(pid: int) -> list[str]:
    """Its state, its parent and so on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def files(folder: Path, pids: Iterable[int]) -> list[str]:
    """Its temporary files, and what carries one of its process ids in /tmp and /dev/shm and is not older."""
    # Names of other programs may be random and hexadecimal: digits in them are no process id.
    number = re.compile(r"(?<![0-9a-f])(?:" + "|".join(map(str, pids)) + r")(?![0-9a-f])")
    begin = (folder / "begun").stat().st_mtime_ns
    public = [
        path for place in ("/tmp", "/dev/shm") for path in Path(place).iterdir() if number.search(path.name)
    ]
    named = [path for path in public if path.lstat().st_mtime_ns >= begin]
    return [str(path) for path in [*(folder / "tmp").iterdir(), *named]]


def await_end(folder: Path, seconds: float, spared: Collection[int] = ()) -> dict[int, str]:
    """What of the program is left after that many seconds, or as soon as it is nothing. It is killed."""
    deadline = time.monotonic() + seconds
    while (left := without(processes(folder), spared)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in processes(folder):
        os.kill(pid, signal.SIGKILL)
    return left


def without(found: dict[int, str], spared: Collection[int]) -> dict[int, str]:
    return {pid: command for pid, command in found.items() if pid not in spared}


def await_files(folder: Path, names: Iterable[str], program: subprocess.Popen[str], seconds: float) -> None:
    """Waits until the program has made these files."""
    wanted = [folder / name for name in names]
    begin = time.monotonic()
    while not all(path.exists() for path in wanted):
        assert program.poll() is None, (folder / "err").read_text()
        assert time.monotonic() - begin < seconds, f"no {[p.name for p in wanted if not p.exists()]}"
        time.sleep(0.02)


def become(states: Collection[str], *pids: int) -> bool:
    """Whether all of them are in one of these states soon: signals take a while."""
    end = time.monotonic() + 20
    while any(state(pid) not in states for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
