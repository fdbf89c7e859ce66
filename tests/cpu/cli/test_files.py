"""Files that anybody may have written: how flux replaces them, and what it does with malformed ones."""

from __future__ import annotations

import copy
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_bench_record import make_record
from typer.testing import CliRunner

from flux import _env, _files
from flux.bench import record
from flux.bench.tune import traced
from flux.cli import app
from flux.comm import topology
from flux.comm.topology import Links
from flux.integrations.vllm import thresholds
from flux.measured import files
from flux.measured.machine import Machine
from flux.measured.times import Fact

ROOT = Path(__file__).resolve().parents[3]

# --- Replacing


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_planted_link_and_a_users_part_are_left_alone(tmp_path: Path) -> None:
    victim, file, part = tmp_path / "victim", tmp_path / "x.json", tmp_path / "x.json.part"
    victim.write_text("precious")
    part.symlink_to(victim)
    _files.write_json({"a": 1}, file)
    assert victim.read_text() == "precious" and part.is_symlink() and json.loads(file.read_text()) == {"a": 1}
    part.unlink()
    part.write_text("the user's")
    _files.replace(file, "new")
    assert part.read_text() == "the user's" and file.read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "x.json", "x.json.part"}


def test_modes_and_links_of_targets_are_kept(tmp_path: Path, umask: None) -> None:
    file, link = tmp_path / "deep" / "x.json", tmp_path / "link.json"
    _files.write(file, "first")
    assert mode(file) == 0o644, "as any new file"
    link.symlink_to(file)
    for bits in (0o600, 0o640, 0o666):
        file.chmod(bits)
        _files.write(link, f"{bits}")
        assert link.is_symlink() and file.read_text() == f"{bits}" and mode(file) == bits
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to(tmp_path / "later.json")
    _files.replace(dangling, "made")
    assert dangling.is_symlink() and (tmp_path / "later.json").read_text() == "made"


def test_what_is_written_is_never_open_to_more_than_the_target(
    tmp_path: Path, umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "x", []
    file.write_text("old")
    file.chmod(0o600)
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (seen.append(os.fstat(number).st_mode), sync(number)))
    _files.replace(file, "new")
    assert [stat.S_IMODE(each) for each in seen] == [0o600], "synchronised once, before it has the name"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupt(number: int) -> None:
        raise error

    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(error):
        _files.replace(tmp_path / "x", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]


# --- Reading

HOST = {"device": "cpu", "kind": {"arch": "cpu", "sms": 4, "sm_mhz": 2.5, "memory_gb_per_s": 9.5}}
_TIME = {"role": "serial", "median_ms": 0.5, "samples_ms": [0.5]}
VALID: dict[str, Any] = {
    "tuning": json.loads(
        files.to_json(
            Machine("sm_90", 132, 1980.0, 4916.7, 478.1),
            [Fact("gemm_ar", 2, 2, 8, 16, 24, {"kernel": 1.5, "parts": 2.5}, 0.5, "a", True, ("parts",))],
        )
    ),
    "result": json.loads(json.dumps(record.to_json(make_record()))),
    "vllm": {
        "machine": HOST,
        "rows": [
            {"op": "gemm_ar", "tp": 2, "dtype": "bfloat16", "local": [8, 16, 24], "times": {"flux": _TIME}}
        ],
    },
    "links": {"schema": "flux links 1", "links": vars(Links())},
    "shapes": {"op": "gemm_ar", "m": 8, "n": 16, "k": 24, "world_size": 2},
}
del VALID["result"]["rows"][1:], VALID["result"]["rows"][0]["derived"]
READERS: dict[str, Callable[[Path], object]] = {
    "tuning": files.read,
    "result": record.read,
    "vllm": thresholds.measured_in,
    "links": lambda path: topology._read.__wrapped__(str(path)),
    "shapes": lambda path: traced(path, 2),
}
# Texts that no reader takes. No "file" of them is a valid document.
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "cut off": b'{"schema": 1, "rows": [',
    "no JSON": b"schema = 1",
    "two documents": b"{} {}",
    "no UTF-8": b'{"a": "\xff"}',
    **{text: text.encode() for text in ("null", "3", '"schema"', "[]", "{}")},
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": [-Infinity]}',
    "overflow": b'{"a": 1e999}',
    "repeated key": b'{"a": 1, "a": 2}',
    "key repeated but for what is not shown": b'{"a\\u0000": 1, "a\\u0001": 2}',
    "many digits": b'{"a": ' + b"1" * 5000 + b"}",
    "deep": b'{"a":' + b"[" * 80 + b"]" * 80 + b"}",
    "very deep": b"[" * 200_000,
    "large": b" " * (_files.MOST_BYTES + 1),
}
# What may stand for a value of each type: never one of the same type that is as good.
WRONG: dict[type, list[Any]] = {
    int: [None, "8", 8.5, True, [], {}, -1, 2**60, float("nan"), 10**30],
    float: [None, "8", True, [], {}, -1.0, float("nan"), float("inf"), 1e300, 10**400],
    str: [None, 3, True, ["a"], {"a": 1}],
    bool: [None, 1, "true", [], {}],
    list: [None, 3, "a", {}],
    dict: [None, 3, "a", []],
}
# Without these the document is one, or they are free.
FREE = re.compile(
    r"derived|what|suite|settings\.(rounds|tp)|machine\.(gpu|gpu_count|cuda|nccl|torch|cpu)|median_ms|min_ms|max_ms"
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def changed(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    document = copy.deepcopy(document)
    *way, last = at
    inner = document
    for key in way:
        inner = inner[key]
    inner[last] = value
    return document


def refusal(kind: str, path: Path) -> str:
    """The error of a reader: one, and only a ValueError, that names the file."""
    with pytest.raises(ValueError, match="expected") as caught:
        READERS[kind](path)
    assert type(caught.value) is ValueError
    line = str(caught.value)
    assert str(path) in line and re.search(", got |, but ", line) and len(line) < 600, line
    assert "\n" not in line and line.isprintable(), line
    return line


@pytest.mark.parametrize("kind", READERS)
def test_valid_files_are_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps(VALID[kind]))
    READERS[kind](tmp_path / "file")


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", READERS)
def test_no_reader_takes_these_texts(kind: str, name: str, tmp_path: Path) -> None:
    if (kind, name) in (("shapes", "empty"), ("shapes", "large")):
        pytest.skip("no shape was recorded")
    (tmp_path / "file").write_bytes(TEXTS[name])
    refusal(kind, tmp_path / "file")


@pytest.mark.parametrize("kind", READERS)
def test_every_value_has_a_type_and_a_range(kind: str, tmp_path: Path) -> None:
    """Each value in turn is replaced by such as do not fit; the error names its place."""
    path, tried = tmp_path / "file", 0
    for at in list(places(VALID[kind]))[1:]:
        name = ".".join(map(str, at))
        if "samples_ms" in at if kind == "vllm" else FREE.search(name):
            continue
        value: Any = VALID[kind]
        for key in at:
            value = value[key]
        for wrong in WRONG[type(value)]:
            # Facts that may be unknown, and what is as good.
            unknown = wrong is None and at[-1] in (*Machine.__dataclass_fields__, "plan", "time_us")
            if unknown or (wrong in ([], {}) and isinstance(wrong, type(value))):
                continue
            path.write_text(json.dumps(changed(VALID[kind], at, wrong)))
            line = refusal(kind, path)
            named = [key for key in at if isinstance(key, str)][-1]
            assert named in line, f"{at} = {wrong}: {line}"
            tried += 1
    assert tried > 15


@pytest.mark.parametrize(
    ("kind", "at", "value", "words"),
    [
        ("tuning", ("schema",), 2, "schema: expected 1, got 2"),
        ("tuning", ("machine", "name"), "H200", "machine: expected no field but arch, sms, sm_mhz"),
        ("tuning", ("rows", 0, "us"), {}, "rows[0].us: expected a number of entries from 1 to inf, got 0"),
        ("tuning", ("rows", 0, "us"), {"magic": 1.0}, "rows[0].us: expected 'kernel' or 'composed'"),
        ("tuning", ("rows", 0, "note"), 1, "rows[0]: expected no field but op, ranks"),
        ("tuning", ("rows",), 2 * VALID["tuning"]["rows"], "rows[1]: expected another problem"),
        ("result", ("rows", 0, "times", "flux", "samples_ms"), [], "rows[0].times.flux.samples_ms: expected"),
        ("result", ("rows", 0, "local"), [1, 2], "rows[0].local: expected a list of 3, got [1, 2]"),
        ("vllm", ("rows", 0, "dtype"), "nn", "rows[0].dtype: expected 'bfloat16' or"),
        ("links", ("links", "x"), 1, "expected no field but nic_gb_per_s"),
        ("shapes", ("world_size",), 0, "line 1: world_size: expected a number from 1"),
    ],
)
def test_the_place_what_was_expected_and_what_is_there(
    kind: str, at: tuple[Any, ...], value: Any, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text(json.dumps(changed(VALID[kind], at, value)))
    assert words in refusal(kind, tmp_path / "file")


@pytest.mark.parametrize("kind", READERS)
def test_every_field_is_needed_that_decides(kind: str, tmp_path: Path) -> None:
    top = {"tuning": {"what"}, "result": {"skipped", "complete"}}.get(kind, set())
    for key in VALID[kind].keys() - top:
        (tmp_path / "file").write_text(json.dumps({k: v for k, v in VALID[kind].items() if k != key}))
        assert f"{key}'" in refusal(kind, tmp_path / "file")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for reader in READERS.values():
        for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
            with pytest.raises(ValueError, match=f"{path}: {why}"):
                reader(path)


# --- Printing

# A title, a colour, a link of the terminal, a line over another one, a change of direction, half a character;
# markup of rich, of HTML and of TeX.
HOSTILE = (
    "\x1b]0;x\x07\x1b[31m\x9b2J\r\b\u202e\ud800\u2028 "
    "[link=file:///x]a[/link] [/nope] [red] :smile: <b>&\"' $\\frac$"
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029\ud800-\udfff]")
RESULTS = ROOT / "benchmarks" / "results"


def hostile(value: Any, texts: str) -> Any:
    if isinstance(value, dict):
        return {key: hostile(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, texts) for item in value]
    return texts if isinstance(value, str) else value


def hostile_files() -> Iterator[Any]:
    finding = {"section": "a", "name": "b", "value": "c", "state": "bad", "advice": "d"}
    outcome = {"op": "a", "case": "b", "where": "c", "state": "wrong", "detail": "d", "seconds": 1.0}
    documents: dict[str, Any] = {
        "doctor": {"date": "a", "findings": [finding]},
        "verify": {"date": "a", "commit": "b", "outcomes": [outcome]},
        "result": VALID["result"],
        "losses": {"stock": [1.0, 2.0], HOSTILE: [1.0, 2.5]},
    }
    for name, pattern in (
        ("throughput", "2026-11-22-vllm-tp2*.json"),
        ("training", "*-megatron_model-*.json"),
        ("tuning data", "tuning/*few-rows-variants*.json"),
    ):
        documents[name] = json.loads(next(iter(sorted(RESULTS.glob(pattern)))).read_text())
    for name, document in documents.items():
        # Texts by which the file is told, or which have few values, stay.
        keep = {"state": "", "role": "", "dtype": "", "device": "", "op": "", "pattern": ""}
        texts = hostile(document, HOSTILE)
        for at in places(document):
            if at and at[-1] in keep and name not in ("tuning data", "training", "throughput"):
                inner, old = texts, document
                for key in at[:-1]:
                    inner, old = inner[key], old[key]
                inner[at[-1]] = old[at[-1]] + (HOSTILE if at[-1] in ("op", "pattern") else "")
        yield pytest.param(texts, id=name)
        # Numbers that leave nothing to divide by.
        zero = json.loads(json.dumps(document), parse_float=lambda _: 0.0, parse_int=lambda _: 0)
        zero |= {"schema": 1} if "schema" in zero else {}
        yield pytest.param(zero, id=f"{name}, zeros")


@pytest.mark.parametrize("document", list(hostile_files()))
def test_hostile_files_move_no_cursor_and_raise_nothing(document: Any, tmp_path: Path) -> None:
    file, picture = tmp_path / "f.json", tmp_path / "f.png"
    file.write_text(json.dumps(document))
    is_result = "suite" in document and "rows" in document
    for more in ([], ["--plot", str(picture)])[: 2 if is_result else 1]:
        done = CliRunner().invoke(app, ["bench", "--show", str(file), *more])
        assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
        assert done.exit_code == 0 or (done.exit_code == 2 and len(done.stderr.splitlines()) == 1), (
            done.output
        )
        assert not CONTROL.search(done.output), CONTROL.search(done.output)
        if done.exit_code == 0 and not is_result and "[link=" in file.read_text():
            assert "[link=file:///x]a[/link]" in done.output.replace("\n", ""), "text, and no link"


def test_a_hostile_suite(tmp_path: Path) -> None:
    file = tmp_path / "suite.toml"
    for text in (
        '[suite]\nname = "\\u001b[31m"\ndtype = "\\u009b2J"\nm = [1]\n[[model]]\nname = "\\u001bx"\n',
        "a = " + "[" * 5000,
        "[suite]\nm = [nan]",
    ):
        file.write_text(text)
        done = CliRunner().invoke(app, ["bench", "--cpu", "--suite", str(file)])
        assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1, done.output
        assert str(file) in done.stderr and not CONTROL.search(done.output)


# --- The page


# What opens files, and its words on the page.
OPENS = {
    "_files.py": "One reader",
    "bench/plot.py": "`--plot`",
    "bench/suites/__init__.py": "`flux bench --suite`",
    "cli/options.py": "a name that nobody can guess",  # tries whether a target can be written
    "cli/verify_cases.py": "`flux-verify-…`",
    "cli/verify_log.py": "`flux-verify-…`",
    "comm/shm.py": "`/dev/shm/flux-<pid>",
    "integrations/async_tp.py": "flux's own sources",
    "integrations/vllm/thresholds.py": "`FLUX_VLLM_TUNING`",  # to tell whether two are the same
    "machine.py": "`/proc/cpuinfo`",
    "plan/choose.py": "`FLUX_RECORD_SHAPES`",
    "bench/tune.py": "`flux tune --trace`",
}
OPENING = re.compile(
    r"(?<![\w.])open\(|\bpath\.open\(|\.(?:read|write)_(?:text|bytes)\(|\bos\.open\(|\bsavefig\(|"
    r"TemporaryDirectory\(|mkdtemp\(|NamedTemporaryFile\(|get_hash_for_files\("
)


def test_the_security_page_names_every_variable_and_file() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert set(re.findall(r"`(FLUX_[A-Z0-9_]+)`", page)) == {variable.name for variable in _env.VARIABLES}
    package = ROOT / "python" / "flux"
    opening = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(OPENING.search(line) for line in path.read_text().splitlines() if "def open(" not in line)
    }
    assert opening == OPENS.keys()
    assert all(words in page for words in OPENS.values())
