"""What ranks read from the group's store is JSON of bounded size, and nothing in flux unpickles."""

from __future__ import annotations

import ast
import functools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flux
from flux.comm import group as group_module
from flux.comm import rendezvous
from flux.comm.cpu import CpuWorkspace
from flux.testing import spawn

PACKAGE = Path(flux.__file__).parent
LIMIT = 1 << 16


class Bomb:
    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


MALFORMED = [
    b"",
    b"\xff\xfe",
    b"[1, 2]",
    b"3",
    b"null",
    b'{"a": 1',
    b"[" * 50_000,
    b'{"a": ' + b"[" * 50_000,
    b'{"a": ' + b"1" * 10_000 + b"}",
    b'{"a": "' + b"x" * LIMIT + b'"}',
    pickle.dumps(Bomb()),
]


@pytest.mark.parametrize("value", MALFORMED, ids=[repr(value[:12]) for value in MALFORMED])
def test_what_is_no_json_object_of_bounded_size_is_refused(value: bytes) -> None:
    with pytest.raises(RuntimeError) as caught:
        rendezvous._parse("gemm_rs", 3, value)
    message = str(caught.value)
    assert message.startswith(
        "flux.gemm_rs: rendezvous: expected the facts of rank 3, a JSON object of at most"
    )
    assert f"got {len(value)} bytes" in message and len(message) < 400


def test_facts_up_to_the_limit_arrive() -> None:
    facts = {"why_not": "x" * (LIMIT - 24), "n": 1}
    text = json.dumps(facts).encode()
    assert len(text) <= LIMIT and rendezvous._parse("gemm_rs", 0, text) == facts


def call_with_a_stranger_in_the_store(rank: int, world_size: int) -> str:
    """Whatever key rank 1 writes in a rendezvous, rank 0 finds something else there."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        get_store = group_module._c10d._get_process_group_store

        class Spoilt:
            def __init__(self, inner: Any) -> None:
                self._inner = inner

            def set(self, key: str, value: str) -> None:
                self._inner.set(key, pickle.dumps(Bomb()) if value.startswith("{") else value)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

        group_module._c10d._get_process_group_store = lambda group: Spoilt(get_store(group))
    try:
        flux.gemm_rs(torch.ones(world_size, 4), torch.ones(3, 4))
        return "no error"
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        store.set(f"done/{rank}", "")
        store.wait([f"done/{r}" for r in range(world_size)])


def test_a_stranger_in_the_store_is_an_error_on_all_ranks() -> None:
    for told in spawn(call_with_a_stranger_in_the_store, 2, backend="gloo"):
        assert told.startswith("RuntimeError: flux.gemm_rs: rendezvous: expected the facts of rank 1"), told


class WithPeer:
    """Rendezvous of rank 0 of two: rank 1 says the same but for one fact."""

    def __init__(self, *path: str, value: Any) -> None:
        self._path, self._value = path, value

    def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        theirs = json.loads(json.dumps(facts))
        within = theirs
        for name in self._path[:-1]:
            within = within[name]
        within[self._path[-1]] = self._value
        return [facts, theirs]


def met(peer: WithPeer) -> list[dict[str, Any]]:
    return CpuWorkspace.meet(object(), torch.device("cpu"), "gemm_rs", peer)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [7, 7.5, "x", True, [1], {"a": 1}, None], ids=str)
def test_facts_of_other_types_are_refused_and_name_the_rank(value: Any) -> None:
    told = met(WithPeer("more", value=0))[0]
    paths = [(name,) for name in told if name not in ("build", "wrong")]  # these have messages of their own
    paths += [(outer, inner) for outer in ("links", "tuning") for inner in told[outer]]
    tried = 0
    for path in paths:
        own: Any = functools.reduce(lambda within, name: within[name], path, told)
        reason = own is None or isinstance(own, str)
        if type(value) is type(own) or (reason and (value is None or isinstance(value, str))):
            continue
        with pytest.raises(
            RuntimeError, match=f"^flux.gemm_rs: rendezvous: rank 1: {': '.join(path)}: expected"
        ):
            met(WithPeer(*path, value=value))
        tried += 1
    assert tried > 5


# Each runs code that its input chooses. torch's object collectives unpickle too: only commands use them, and
# there the user has started all ranks (docs/security.md).
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN = {"eval", "exec", "torch.load", "yaml.load", "os.system", "os.popen", "numpy.load", "np.load"}
COLLECTIVES = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
# What a caller and the ranks that it has started tell each other, over pipes that nobody else has.
PIPES = {"testing/rank_process.py", "testing/spawn.py"}
COMMANDS = {"bench/runner.py", "cli/verify_cases.py"}


def dangers(path: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module and node.module.split(".")[0] in UNPICKLES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN:
                found.append(name)
            if name.split(".")[-1] in COLLECTIVES and path not in COMMANDS:
                found.append(name)
            found += ["shell=True" for keyword in node.keywords if keyword.arg == "shell"]
    return [f"{path}: {name}" for name in found if not (path in PIPES and name == "pickle")]


def test_nothing_in_flux_runs_what_others_wrote() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 50 and set(sources) > COMMANDS
    assert [danger for path, source in sources.items() for danger in dangers(path, source)] == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from marshal import loads", "torch.load('x')", "eval('1')"]
    + ["dist.all_gather_object(a, b)", "subprocess.run('ls', shell=True)"],
)
def test_what_would_run_it_is_found(source: str) -> None:
    assert len(dangers("comm/group.py", source)) == 1
