"""What flux must show on a machine with GPUs, step by step, in as many runs as it takes.

    benchmarks/measure.sh OUT [PART...] [--minutes N] [--merge OTHER...]

Exact results come first, then the clock, the most worthwhile operators before the others. Each step is
bounded, so that a kernel that spins does not take the others' time. A run goes on where the one before it
stopped: copy OUT to the next machine. Steps that were never tried come first, then those that failed, took
too long or were broken off.

    OUT/commit                       the only commit of which OUT holds results
    OUT/steps/MACHINE/STEP/ATTEMPT/  log, result.json, and end.json if the step came to an end
    OUT/results/                     rows of all steps, in files of flux bench, named as in benchmarks/results
    OUT/report-MACHINE.md            what is missing, and why; host costs of what is there

MACHINE is the number of GPUs and their name, such as 4xH200: other machines have steps of their own.
FLUX_COMMIT names the commit where there is no git. Exit status: 0 if nothing that was asked for is missing, 1
if something is, 2 if OUT has results of another commit, or the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from campaign_steps import PARTS, RESULT, Step, steps

ROOT = Path(__file__).parent.parent
_TIMED_OUT = (124, 137)  # of timeout(1): after SIGTERM, after SIGKILL


class Refused(Exception):
    """OUT and this run do not belong together."""


@dataclass(frozen=True)
class Attempt:
    """A folder with what one run of a step has left."""

    folder: Path

    @property
    def end(self) -> dict[str, Any] | None:
        """How it ended; None if it was broken off."""
        file = self.folder / "end.json"
        return json.loads(file.read_text()) if file.exists() else None

    @property
    def result(self) -> dict[str, Any] | None:
        """What flux bench wrote, finished or not."""
        file = self.folder / "result.json"
        data = json.loads(file.read_text()) if file.exists() else None
        return data if data and "rows" in data else None

    def why_missing(self, step: Step) -> str:
        """Empty if it has shown what the step is to show."""
        end, result = self.end, self.result
        rows = f", {len(result['rows'])} rows are there" if result else ""
        if end is None:
            return f"broken off{rows}"
        if end["status"] in _TIMED_OUT:
            return f"stopped after {end['seconds']:.0f} s{rows}"
        if end["status"]:
            return f"status {end['status']}{rows}: {end['last']}"
        if step.says not in end["last"]:
            return f"nothing was shown: {end['last']}"
        return ""


@dataclass
class Campaign:
    """The steps of one commit on one kind of machine, and the folder of their results.

    gpus: the numbers by which CUDA knows them.
    deadline: on the monotonic clock. No step begins that could outlast it.
    """

    out: Path
    commit: str
    machine: str
    gpus: list[str]
    python: str
    deadline: float
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    stopping: threading.Event = field(default_factory=threading.Event)

    def attempts(self, step: Step) -> list[Attempt]:
        folder = self.out / "steps" / self.machine / step.name
        return (
            [Attempt(folder / name) for name in sorted(os.listdir(folder), key=int)]
            if folder.exists()
            else []
        )

    def why_missing(self, step: Step) -> str:
        """Empty if an attempt has succeeded, else what the last one lacks."""
        reasons = [attempt.why_missing(step) for attempt in self.attempts(step)]
        return "" if "" in reasons else reasons[-1] if reasons else "not begun"

    def pending(self, wanted: Iterable[Step]) -> list[Step]:
        """In the order in which they are to run: by attempts, then by worth."""
        missing = [step for step in wanted if self.why_missing(step)]
        return sorted(missing, key=lambda step: len(self.attempts(step)))

    def run(self, wanted: Sequence[Step]) -> None:
        pending = self.pending(wanted)
        while pending and not self.stopping.is_set():
            step = pending.pop(0)
            if not step.beside:
                self.attempt(step, self.gpus[: step.gpus] if step.gpus else self.gpus)
            else:
                side = [step, *takewhile(lambda other: other.beside, pending)]
                pending = pending[len(side) - 1 :]
                self.side_by_side(side)
            self.report(wanted)

    def side_by_side(self, wanted: Sequence[Step]) -> None:
        """Steps of one GPU each, as many at a time as there are GPUs."""
        free: queue.SimpleQueue[str] = queue.SimpleQueue()
        for gpu in self.gpus:
            free.put(gpu)

        def one(step: Step) -> None:
            gpu = free.get()
            try:
                self.attempt(step, [gpu])
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(len(self.gpus)) as pool:
            for done in [pool.submit(one, step) for step in wanted]:
                done.result()

    def attempt(self, step: Step, gpus: Sequence[str]) -> None:
        if self.stopping.is_set():
            return
        if time.monotonic() + step.seconds > self.deadline:
            print(f"{step.name}: left for another run, it may take {step.seconds} s", flush=True)
            return
        folder = self.out / "steps" / self.machine / step.name / str(len(self.attempts(step)) + 1)
        folder.mkdir(parents=True)
        result = str(folder / "result.json")
        command = [self.python, *(result if part == RESULT else part for part in step.command)]
        environment = os.environ | {"FLUX_COMMIT": self.commit, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        start = time.monotonic()
        with (folder / "log").open("wb") as log:
            # timeout(1) makes a process group of its own, and holds also if this process is killed.
            limited = ["timeout", "-k", "5", str(step.seconds), *command]
            process = subprocess.Popen(
                limited,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
            self.running.add(process)
            status = process.wait()
            self.running.discard(process)
        if self.stopping.is_set():
            return
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        end = {
            "command": step.command,
            "status": status if status >= 0 else 128 - status,
            "seconds": round(time.monotonic() - start, 1),
            "last": lines[-1][:200] if lines else "",
        }
        write(folder / "end.json", json.dumps(end, indent=1))
        missing = Attempt(folder).why_missing(step)
        print(f"{step.name}: {missing or 'done'}; {end['seconds']:.0f} s; {end['last'][:120]}", flush=True)

    def stop(self) -> None:
        """Ends what runs. Those attempts count as broken off."""
        self.stopping.set()
        for process in list(self.running):
            os.killpg(process.pid, signal.SIGKILL)

    def report(self, wanted: Sequence[Step]) -> list[str]:
        """Writes the results, and the report on all steps; returns what is missing of those wanted."""
        results = self.results()
        for name, data in results.items():
            write(self.out / "results" / name, json.dumps(data, indent=1))
        every = steps(len(self.gpus))
        reasons = {step: self.why_missing(step) for step in every}
        missing = {step: f"| {step.name} | {step.part} | {why} |" for step, why in reasons.items() if why}
        costs: dict[str, list[float]] = {}
        for row in (row for data in results.values() for row in data["rows"]):
            if (cost := row["host_us"].get("flux")) is not None:
                costs.setdefault(row["op"], []).append(cost)
        hosts = [f"| {op} | {median(of):.1f} | {max(of):.1f} |" for op, of in costs.items()]
        text = f"# {self.commit} on {self.machine}\n\n"
        text += f"{len(every) - len(missing)} of {len(every)} steps are done.\n"
        tables = {"missing | part | why": [*missing.values()], "host µs of flux | median | most": hosts}
        for head, lines in tables.items():
            if lines:
                text += "\n".join([f"\n| {head} |", "|---|---|---|", *lines, ""])
        write(self.out / f"report-{self.machine}.md", text)
        return [missing[step] for step in wanted if step in missing]

    def results(self) -> dict[str, dict[str, Any]]:
        """Files by name. Rows of other settings, or other versions of anything, have files of their own."""
        found: dict[str, list[dict[str, Any]]] = {}
        for step in steps(len(self.gpus)):
            if not step.result:
                continue
            whole = f"{step.result}-tp{len(self.gpus)}-"
            whole += re.sub(r"^\d+", str(step.gpus), self.machine) if step.gpus else self.machine
            for record in self.rows_of(step):
                files = found.setdefault(whole, [])
                same = [file for file in files if _facts(file) == _facts(record)]
                if same:
                    same[0]["rows"] += record["rows"]
                    same[0]["skipped"] += [
                        line for line in record["skipped"] if line not in same[0]["skipped"]
                    ]
                    same[0]["complete"] = same[0]["complete"] and record["complete"]
                else:
                    files.append(record)
        return {
            f"{file['date'][:10]}-{name}-{file['commit']}{f'-{number}' if number > 1 else ''}.json": file
            for name, files in found.items()
            for number, file in enumerate(files, 1)
        }

    def rows_of(self, step: Step) -> list[dict[str, Any]]:
        """The finished result of a step, or the rows of all its attempts, of each row the last."""
        records = [record for attempt in self.attempts(step) if (record := attempt.result)]
        for record in records:
            if record["commit"] != self.commit:
                raise Refused(f"{step.name} has rows of commit {record['commit']}, not {self.commit}")
        finished = [record for record in records if record["complete"]]
        if finished:
            return finished[-1:]
        seen: set[str] = set()
        for record in reversed(records):
            record["rows"] = [row for row in record["rows"] if _key(row) not in seen]
            seen |= {_key(row) for row in record["rows"]}
        return [record for record in records if record["rows"]]


def _facts(record: dict[str, Any]) -> str:
    """All that rows of one file have in common. Clocks and temperatures differ from run to run."""
    machine = {key: value for key, value in record["machine"].items() if key != "gpus_idle"}
    return json.dumps([record["version"], record["suite"], record["settings"], machine], sort_keys=True)


def _key(row: dict[str, Any]) -> str:
    names = ("op", "model", "variant", "m", "n", "k", "tp", "dtype", "scales")
    return " ".join(str(row.get(name)) for name in names)


def write(path: Path, text: str) -> None:
    """Replaces a file at once, so that a killed run leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def commit_of_tree() -> str:
    """FLUX_COMMIT, or what git says. No name tells a tree with changes from another one."""
    told = os.environ.get("FLUX_COMMIT", "")
    if not told:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--tags"]
        told = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not told:
        raise Refused("the commit is not known: set FLUX_COMMIT")
    if told.endswith("-dirty"):
        raise Refused(f"{told} has changes that are not committed")
    return told


def same_commit(out: Path, commit: str) -> None:
    """Marks a folder as the commit's; Refused if it is another's."""
    file = out / "commit"
    if file.exists() and file.read_text().strip() != commit:
        raise Refused(f"{out} has results of commit {file.read_text().strip()}, this is {commit}")
    write(file, commit + "\n")


def merge(out: Path, other: Path) -> None:
    """Adds the attempts of another folder, as if they had been made before those to come."""
    if not (other / "commit").exists():
        raise Refused(f"{other} is no folder of a campaign")
    same_commit(out, (other / "commit").read_text().strip())
    for attempt in sorted(other.glob("steps/*/*/*"), key=lambda folder: int(folder.name)):
        into = out / attempt.parent.relative_to(other)
        into.mkdir(parents=True, exist_ok=True)
        shutil.copytree(attempt, into / str(len(os.listdir(into)) + 1))


def find_gpus() -> tuple[str, list[str]]:
    """The kind of machine, such as 4xH200, and its GPUs."""
    told = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    names = re.findall(r"^GPU \d+: (?:NVIDIA )?(\S+)", told, re.M)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(len(names))] if visible is None else visible.split(",")
    if not names or not all(gpus):
        raise Refused("nvidia-smi lists no GPU")
    return f"{len(gpus)}x{names[0]}", gpus


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="measure.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no step that may last longer"
    )
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="add what other folders have")
    parser.add_argument("--list", action="store_true", help="write and print what is missing, run nothing")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the steps")
    given = parser.parse_intermixed_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return given


def main() -> int:
    given = arguments()
    out = given.out.resolve()
    deadline = time.monotonic() + 60 * given.minutes
    try:
        machine, gpus = find_gpus()
        campaign = Campaign(out, commit_of_tree(), machine, gpus, given.python, deadline)
        same_commit(out, campaign.commit)
        for other in given.merge:
            merge(out, other)
        wanted = [step for step in steps(len(gpus)) if not given.parts or step.part in given.parts]

        def stop(number: int, frame: object) -> None:
            campaign.stop()
            raise SystemExit(128 + number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        campaign.report(wanted)
        if not given.list:
            campaign.run(wanted)
        missing = campaign.report(wanted)
    except (Refused, FileNotFoundError) as error:
        print(f"measure.sh: {error}", file=sys.stderr)
        return 2
    print("\n".join(["Missing:", *missing] if missing else ["Nothing is missing."]))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
