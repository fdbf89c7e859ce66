"""Shared-memory segments are private to the user, checked before they are mapped, and never left behind."""

from __future__ import annotations

import json
import mmap
import os
import re
import resource
import signal
import stat
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flux
from flux.comm import shm
from flux.errors import CommTimeoutError
from flux.testing import spawn

NBYTES = 3 * mmap.PAGESIZE
PEER = "flux-1-" + 40 * "a"
OWN = f"flux-{os.getpid()}-"


class WithPeer:
    """Rendezvous of rank 0 of two with a peer that the test plays: what the peer says each time."""

    def __init__(self, *told: dict[str, Any]) -> None:
        self._told = iter(told)
        self.facts: list[dict[str, Any]] = []

    def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        self.facts.append(json.loads(json.dumps(facts)))
        return [self.facts[-1], next(self._told)]


def good_peer(name: Any = PEER) -> WithPeer:
    return WithPeer({"name": name, "error": "", "full": False}, {"error": ""})


def meet(rendezvous: Any, nbytes: int = NBYTES) -> shm.SharedMemory:
    return shm.SharedMemory(nbytes, 0, rendezvous, "gemm_rs")


def make_segment(folder: Path, nbytes: int = NBYTES, mode: int = 0o600) -> Path:
    path = folder / PEER
    path.write_bytes(bytes(nbytes))
    path.chmod(mode)
    return path


def held(folder: Path) -> tuple[int, int, list[str]]:
    """Descriptors of this process, its mappings of segments, and the names of its segments."""
    mappings = Path("/proc/self/maps").read_text().count(f"{folder}/flux-")
    names = [path.name for path in folder.iterdir() if path.name.startswith(OWN)]
    return len(os.listdir("/proc/self/fd")), mappings, names


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(shm, "_DIRECTORY", tmp_path)
    return tmp_path


def test_both_ranks_see_the_same_bytes_and_no_name_is_left(folder: Path) -> None:
    with make_segment(folder).open("r+b") as file:
        theirs = mmap.mmap(file.fileno(), NBYTES)
    memory = meet(good_peer())
    assert [view.numel() for view in memory.views] == [NBYTES, NBYTES]
    assert memory.peers == [view.data_ptr() for view in memory.views] and memory.nbytes == NBYTES
    memory.views[1][5] = 77
    assert theirs[5] == 77
    assert int(memory.views[0].sum()) == 0
    assert list(folder.iterdir()) == []


def test_a_segment_is_private_and_its_name_cannot_be_guessed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[os.stat_result] = []

    class Watched(WithPeer):
        def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
            if not self.facts:
                seen.extend(path.stat() for path in folder.glob(OWN + "*"))
            return super().exchange(op, facts)

    opened: list[int] = []
    open_file = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, mode: opened.append(flags) or open_file(path, flags, mode)
    )
    names = set()
    before = os.umask(0)
    try:
        for _ in range(8):
            make_segment(folder)
            rendezvous = Watched({"name": PEER, "error": ""}, {"error": ""})
            meet(rendezvous)
            names.add(rendezvous.facts[0]["name"])
    finally:
        os.umask(before)
    assert len(names) == 8 and all(re.fullmatch(OWN + "[0-9a-f]{40}", name) for name in names)
    assert len(seen) == 8
    for found in seen:
        assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_size == NBYTES
        assert 512 * found.st_blocks >= NBYTES, "room that is not taken yet may be gone later"
    assert all(flags & os.O_NOFOLLOW and flags & os.O_CLOEXEC for flags in opened)
    assert sum(bool(flags & os.O_CREAT and flags & os.O_EXCL) for flags in opened) == 8


def symlinked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


BAD_SEGMENTS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: path.chmod(0o640), "access of others: expected none, got 0o40"),
    (lambda path: path.chmod(0o602), "access of others: expected none, got 0o2"),
    (lambda path: os.link(path, path.with_name("second")), "links: expected 1, got 2"),
    (lambda path: os.truncate(path, NBYTES - 1), f"bytes: expected {NBYTES}, got {NBYTES - 1}"),
    (lambda path: os.truncate(path, NBYTES + 1), f"bytes: expected {NBYTES}, got {NBYTES + 1}"),
    (lambda path: os.truncate(path, 0), f"bytes: expected {NBYTES}, got 0"),
    (symlinked, "symbolic link"),
    (as_folder, "Is a directory"),
    (as_pipe, "type: expected regular file, got file of type p"),
]


@pytest.mark.parametrize(("spoil", "expected"), BAD_SEGMENTS, ids=[expected for _, expected in BAD_SEGMENTS])
def test_what_is_no_private_segment_is_refused(
    folder: Path, spoil: Callable[[Path], Any], expected: str
) -> None:
    spoil(make_segment(folder))
    before = held(folder)
    rendezvous = good_peer()
    with pytest.raises(shm.NoSharedMemory) as caught:
        meet(rendezvous)
    message = str(caught.value)
    assert message.startswith("flux.gemm_rs: no shared memory: rank 0: segment of rank 1: ")
    assert expected in message and "\n" not in message
    assert rendezvous.facts[1]["error"] in message, "the other ranks are told"
    assert held(folder) == before, "although the exception lives"


def test_a_peer_that_has_given_up_meanwhile_did_not_come(folder: Path) -> None:
    """Its segment is gone, as this rank was stopped for longer than peers wait: ranks no longer agree."""
    rendezvous = good_peer()
    with pytest.raises(CommTimeoutError) as caught:
        meet(rendezvous)
    assert (caught.value.op, caught.value.rank, caught.value.peer) == ("gemm_rs", 0, 1)
    assert "removed its segment before rank 0 had opened it" in str(caught.value)
    assert rendezvous.facts[1]["gone"] == 1, "those who are still there are told"


def test_all_ranks_fail_alike_where_one_finds_a_segment_gone(folder: Path) -> None:
    make_segment(folder)
    rendezvous = WithPeer({"name": PEER, "error": "", "full": False}, {"error": "", "gone": 0})
    with pytest.raises(CommTimeoutError) as caught:
        meet(rendezvous)
    assert caught.value.peer == 0


def test_a_segment_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_segment(folder)
    user = os.geteuid()
    if user == 0:
        os.chown(path, 1, -1)
        expected = "owner: expected uid 0, got uid 1"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        expected = f"owner: expected uid {user + 1}, got uid {user}"
    with pytest.raises(shm.NoSharedMemory, match=expected):
        meet(good_peer())


@pytest.mark.parametrize(
    "name",
    ["../" + PEER, "/etc/passwd", PEER + "/..", PEER + "\n", "flux-1-../../etc/passwd", "", PEER[:-1], ".", 7]
    + [None, [PEER], {"name": PEER}, PEER.upper(), "flux-\u0661-" + 40 * "a", PEER + "\0"],
)
def test_a_peer_cannot_make_this_process_open_something_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    touched: list[str] = []
    for function in ("open", "unlink"):
        real = getattr(os, function)
        monkeypatch.setattr(
            os, function, lambda path, *a, real=real: touched.append(str(path)) or real(path, *a)
        )
    with pytest.raises(shm.NoSharedMemory, match="rank 1: expected a segment's name, got") as caught:
        meet(good_peer(name))
    assert "rank 0" not in str(caught.value)
    assert touched and all(path.startswith(f"{folder}/{OWN}") for path in touched)
    assert list(folder.iterdir()) == []


def test_the_own_name_is_removed_whatever_the_store_says(folder: Path) -> None:
    class Liar(WithPeer):
        def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"name": "x", "error": ""}, super().exchange(op, facts)[1]]

    with pytest.raises(shm.NoSharedMemory, match="rank 0: expected a segment's name, got 'x'"):
        meet(Liar({"name": PEER, "error": ""}))
    assert list(folder.iterdir()) == []


def test_facts_of_another_kind_are_an_error(folder: Path) -> None:
    make_segment(folder)
    with pytest.raises(shm.NoSharedMemory, match="rank 1: expected an error message, got \\['x'\\]"):
        meet(WithPeer({"name": PEER, "error": ["x"]}, {"error": ""}))
    make_segment(folder)
    with pytest.raises(shm.NoSharedMemory, match="rank 1: expected an error message, got None"):
        meet(WithPeer({"name": PEER, "error": ""}, {}))
    assert list(folder.iterdir()) == []


# ---- what is left behind -----------------------------------------------------------------------------------


def interrupted_at(number: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises at the n-th bytecode that runs in shm.py."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != shm.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == number:
                raise KeyboardInterrupt
        return trace

    return trace


def test_an_interrupt_anywhere_leaves_nothing_behind(folder: Path) -> None:
    # In a thread of its own: what is raised between bytecodes stays as the context of later exceptions.
    with ThreadPoolExecutor(1) as alone:
        alone.submit(walk, folder).result()


def walk(folder: Path) -> None:
    before = held(folder)
    debugger = sys.gettrace()
    number = 0
    while True:
        number += 1
        make_segment(folder)
        memory = None
        sys.settrace(interrupted_at(number))
        try:
            memory = meet(good_peer())
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(debugger)
        if memory is not None:
            break
        assert held(folder) == before, f"at bytecode {number}"
    assert number > 300, "the whole constructor was walked"
    del memory
    assert held(folder) == before


def killed_while_it_has_a_name(rank: int, world_size: int, folder: str) -> None:
    class Killed:
        def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
            os.kill(os.getpid(), signal.SIGKILL)
            return []

    shm._DIRECTORY = Path(folder)
    meet(Killed())


def age(path: Path, seconds: float = 3600.0) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def test_the_segment_of_a_killed_process_is_removed_when_it_is_old(folder: Path) -> None:
    spawn(killed_while_it_has_a_name, 1, str(folder), backend="gloo", may_die={0})
    (left,) = folder.iterdir()
    shm._remove_stale()
    assert left.exists(), "its process may have been about to lock it"
    age(left)
    make_segment(folder)
    meet(good_peer())
    assert list(folder.iterdir()) == []


def test_what_is_in_use_or_not_ours_is_kept(folder: Path) -> None:
    def name(digit: str) -> Path:
        return folder / ("flux-1-" + 40 * digit)

    in_use = shm._create(name("0").name, NBYTES)
    name("1").symlink_to(folder / "elsewhere")
    name("2").mkdir()
    os.mkfifo(name("3"))
    (folder / "flux-1-abc").touch()  # not a segment's name
    (folder / "other").touch()
    if os.geteuid() == 0:
        name("4").touch()
        os.chown(name("4"), 1, -1)
    names = {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        age(path)
    shm._remove_stale()
    assert {path.name for path in folder.iterdir()} == names
    del in_use  # and with it the lock
    shm._remove_stale()
    assert {path.name for path in folder.iterdir()} == names - {name("0").name}


def test_a_segment_that_was_swept_before_it_was_locked_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = shm.fcntl.flock

    def swept(file: Any, how: int) -> None:
        for path in folder.glob(OWN + "*"):
            path.unlink()
        flock(file, how)

    monkeypatch.setattr(shm.fcntl, "flock", swept)
    with pytest.raises(shm.NoSharedMemory, match="removed before it could be locked"):
        meet(WithPeer({"name": PEER, "error": ""}))


# ---- all ranks ---------------------------------------------------------------------------------------------


class OfStore:
    """Rendezvous through the store of the test's ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._rank, self._world_size, self._count = rank, world_size, 0

    def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        self._count += 1
        self._store.set(f"{self._count}/{self._rank}", json.dumps(facts))
        return [json.loads(self._store.get(f"{self._count}/{rank}")) for rank in range(self._world_size)]


def share(rank: int, rendezvous: Any, nbytes: int) -> str:
    try:
        memory = shm.SharedMemory(nbytes, rank, rendezvous, "ag_gemm")
    except shm.NoSharedMemory as error:
        return str(error)
    memory.views[(rank + 1) % 3][rank] = rank + 1
    rendezvous.exchange("ag_gemm", {})
    assert int(memory.views[rank].sum()) == (rank + 2) % 3 + 1
    return "fine"


def with_little_room(rank: int, world_size: int, limit: int) -> list[str]:
    rendezvous = OfStore(rank, world_size)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    said = [share(rank, rendezvous, nbytes) for nbytes in (limit, 2 * limit, 1 << 62, 1 << 70, limit)]
    maps = Path("/proc/self/maps").read_text()
    return [*said, str(maps.count("/dev/shm/flux-")), str(list(Path("/dev/shm").glob(OWN + "*")))]


def test_too_little_room_on_one_rank_is_one_line_on_all_and_less_can_be_had_afterwards() -> None:
    limit = 1 << 20
    results = spawn(with_little_room, 3, limit, backend="gloo")
    for first, second, huge, too_huge, last, mappings, names in results:
        assert (first, last, mappings, names) == ("fine", "fine", "0", "[]")
        assert re.fullmatch(
            rf"flux.ag_gemm: no shared memory: rank 1: {2 * limit} bytes in /dev/shm, \d+ free: "
            rf".*File too large.*The 3 ranks of the group need {6 * limit} bytes there: .*--shm-size\), or "
            r"let torch carry the calls \(FLUX_FUSED=off\)",
            second,
        )
        assert huge.count(f"{1 << 62} bytes in /dev/shm, ") == 3
        assert too_huge.count(f"{1 << 70} bytes in /dev/shm, ") == 3
    assert len(set(map(tuple, results))) <= 3


def without_room(rank: int, world_size: int, how: str) -> list[str]:
    if rank == 1 and how == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (mmap.PAGESIZE, mmap.PAGESIZE))
    elif rank == 1:
        shm.os.access = lambda *_: False  # type: ignore[attr-defined]
    said = []
    x, weight = torch.ones(world_size, 4), torch.ones(3, 4)
    for fused in ("auto", "auto", "off"):
        os.environ["FLUX_FUSED"] = fused
        try:
            said.append(str(flux.gemm_rs(x, weight).tolist()))
        except shm.NoSharedMemory as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_no_room_and_no_access_are_alike(how: str) -> None:
    results = spawn(without_room, 2, how, backend="gloo")
    assert results[0] == results[1]
    first, second, off = results[0]
    # Other processes use the same file system meanwhile.
    first, second = (re.sub(r"\d+ free", "some free", told) for told in (first, second))
    assert first == second and first.startswith("flux.gemm_rs: no shared memory: rank 1: "), first
    assert ("is not there or not writable. Mount" in first) == (how == "read-only")
    assert first.endswith("(containers: --shm-size), or let torch carry the calls (FLUX_FUSED=off)")
    assert off == "[[8.0, 8.0, 8.0]]", "the group remains usable"
