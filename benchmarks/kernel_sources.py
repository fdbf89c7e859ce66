"""Whether the kernel of a result file has changed since: its sources then, and in the working tree."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

# Where the device code of each operator begins, in csrc. What these files include counts too.
_MOE = ("moe/ag_scatter_gemm.cu", "moe/gemm_gather_rs.cu", "moe/routing.cu")
_GEMM_AR = ("gemm_ar/gemm_ar.cu", "gemm/gemm.cu")
SOURCES = {
    "gemm": ("gemm/gemm.cu",),
    "gemm_rs": ("gemm_rs/gemm_rs.cu",),
    "ag_gemm": ("ag_gemm/ag_gemm.cu",),
    "gemm_ar": _GEMM_AR,
    "gemm_ar_norm": _GEMM_AR,
    "all_reduce": ("gemm_ar/all_reduce.cuh",),
    "all_reduce_norm": ("gemm_ar/all_reduce.cuh",),
    "moe_route": ("moe/routing.cu",),
    "moe_layer0": ("moe/ag_scatter_gemm.cu",),
    "moe_layer1": ("moe/gemm_gather_rs.cu",),
    "moe_mlp": _MOE,
    "gemm_fp8": ("gemm/gemm.cu",),
    "gemm_rs_fp8": ("gemm_rs/gemm_rs.cu",),
    "ag_gemm_fp8": ("ag_gemm/ag_gemm.cu",),
    "gemm_ar_fp8": _GEMM_AR,
    "moe_layer0_fp8": ("moe/ag_scatter_gemm.cu",),
    "moe_layer1_fp8": ("moe/gemm_gather_rs.cu",),
    "quantize_fp8": ("gemm/quantize.cu",),
    "layer_forward": ("gemm_rs/gemm_rs.cu", "ag_gemm/ag_gemm.cu"),
    "layer_training": ("gemm_rs/gemm_rs.cu", "ag_gemm/ag_gemm.cu"),
    "megatron_model": ("gemm_rs/gemm_rs.cu", "ag_gemm/ag_gemm.cu"),
    "megatron_model_moe": ("gemm_rs/gemm_rs.cu", "ag_gemm/ag_gemm.cu", *_MOE),
    "losses": ("gemm_rs/gemm_rs.cu", "ag_gemm/ag_gemm.cu"),
    "vllm": _GEMM_AR,
    "vllm_moe": (*_GEMM_AR, *_MOE),
}
# Files of older commits whose kernels another one now has.
_PARTS = {"gemm/gemm.cu": ("gemm/gemm_swap_ab.cu",), "gemm_ar/gemm_ar.cu": ("gemm_ar/gemm_ar_tiles.cu",)}
# Until this commit each candidate rested for as long as its own host needed: docs/benchmarks.md, "Traps".
EQUAL_RESTS = "e0cb697"

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<[^>]+>)[^\n]*$', re.MULTILINE)
_OF_FILES = re.compile(r"#pragmaonce|namespace[\w:]*\{|\}")  # lines that a file more brings
Read = Callable[[str], str | None]


Code = dict[str, tuple[str, ...]]


@cache  # most commits have most sources in common
def code(text: str) -> tuple[str, ...]:
    """The lines of a source without comments, includes and whitespace: what remains is what is compiled."""
    text = _COMMENT.sub(lambda match: match.group(1) or " ", text)
    lines = ("".join(line.split()) for line in _INCLUDE.sub("", text).splitlines())
    return tuple(line for line in lines if line)


@cache
def _included(text: str) -> tuple[str, ...]:
    return tuple(match.group(1) for match in _INCLUDE.finditer(text) if match.group(1))


def _lines(code: Code) -> Counter[str]:
    return Counter(line for lines in code.values() for line in lines if not _OF_FILES.fullmatch(line))


def share_changed(then: Code, now: Code, all_then: Code | None = None, all_now: Code | None = None) -> float:
    """The share of the lines of `now` that `then` has nowhere; 0 if lines only moved, between files too.

    all_then, all_now: of the whole tree, because lines also come from host code.
    """
    if {path: "".join(lines) for path, lines in then.items()} == {p: "".join(q) for p, q in now.items()}:
        return 0.0
    before, after = _lines(then), _lines(now)
    left = (_lines(all_then or then) - before) - (_lines(all_now or now) - after)
    before += left & (after - before)
    return max((after - before).total(), int(before != after)) / max(after.total(), 1)


def device_code(sources: tuple[str, ...], read: Read) -> Code:
    """The code of these sources and of all that they include, by path in csrc; absent files are left out.

    Launchers, a .cu without a kernel, and a .h that only these or a .cu include are host code: arguments,
    checks, the choice of tiles.
    """
    found: Code = {}
    todo = list(sources)
    while todo:
        path = todo.pop()
        text = None if path in found else read(path)
        if text is None:
            continue
        on_host = path.endswith(".cu") or "launch" in Path(path).name
        found[path] = () if on_host and "__global__" not in text else code(text)
        todo += _PARTS.get(path, ())
        todo += [name for name in _included(text) if name.endswith(".cuh") or not on_host]
    return found


class History:
    """The commits of a repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changed = cache(self._changed)
        self._sources = cache(self._read)
        self._now = cache(lambda sources: device_code(sources, self._in_tree))
        self._all = cache(lambda csrc: {str(p): code(p.read_text()) for p in csrc.rglob("*.[ch]*")})

    def _git(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["git", "-C", str(self.root), *arguments], capture_output=True, check=False)

    def _read(self, commit: str) -> dict[str, str]:
        """The files of csrc at a commit, by path in it; none of a commit that is not there."""
        archive = self._git("archive", "--format=tar", commit, "csrc")
        if archive.returncode:
            return {}
        found = {}
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            for member in files:
                if (file := files.extractfile(member)) is not None:
                    found[member.name.removeprefix("csrc/")] = file.read().decode(errors="replace")
        return found

    def has(self, commit: str) -> bool:
        return bool(self._sources(commit))

    def _changed(self, op: str, commit: str) -> float:
        """The share of the device code of an operator that is not as at a commit that is there."""
        sources, then = SOURCES[op], self._sources(commit)
        all_then = {path: code(text) for path, text in then.items()}
        return share_changed(
            device_code(sources, then.get), self._now(sources), all_then, self._all(self.root / "csrc")
        )

    def _in_tree(self, path: str) -> str | None:
        file = self.root / "csrc" / path
        return file.read_text() if file.is_file() else None

    def contains(self, commit: str, ancestor: str) -> bool | None:
        """Whether a commit has another one before it; None where the history does not reach that far."""
        found = self._git("merge-base", "--is-ancestor", ancestor, commit).returncode
        return {0: True, 1: False}.get(found)
