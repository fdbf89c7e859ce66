"""Suites of problem sizes, one TOML file each. A suite is data: adding a model is adding four lines."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from flux import _files
from flux._files import Count, Within
from flux.bench.model import wire_bytes

# What a row says of its problem.
SHAPE = ("op", "model", "pattern", "m", "n", "k", "variant", "scales")
_PATTERNS = ("ag_gemm", "gemm_rs", "gemm_ar", "all_reduce")


@dataclass(frozen=True)
class Problem:
    """One row of a benchmark.

    ``m, n, k`` are the global sizes of the projection. ``pattern`` says how tensor parallelism cuts it:
    ``ag_gemm`` divides ``n`` (x is gathered), ``gemm_rs`` and ``gemm_ar`` divide ``k`` (the sum is scattered,
    or every rank gets it), so does ``all_reduce``, of which k means nothing; ``local`` divides nothing.
    ``scales`` is "tensor", "row" or "block" for fp8 operands.
    """

    op: str
    model: str
    pattern: str
    m: int
    n: int
    k: int
    scales: str = field(default="", kw_only=True)

    def local(self, tp: int) -> tuple[int, int, int]:
        """(M, N, K) of the GEMM of a rank. Raises ValueError if ``tp`` does not divide what is cut."""
        if self.pattern == "local":
            return self.m, self.n, self.k
        name, size = ("n", self.n) if self.pattern == "ag_gemm" else ("k", self.k)
        if size % tp:
            raise ValueError(f"{self.op}: {name} must be divisible by the {tp} ranks, got {name}={size}")
        if self.pattern == "ag_gemm":
            return self.m, self.n // tp, self.k
        return self.m, self.n, self.k // tp

    def on_wire(self, tp: int, element_bytes: int) -> int:
        return wire_bytes(self.pattern, self.m, self.n, self.k, tp, element_bytes)

    @property
    def variant(self) -> str:
        """What tells this row from others of its op, model and M."""
        return ""


def one_of(name: str, known: Collection[str], where: str = "", option: str = "--model") -> None:
    """Raises ValueError if a name is none of those that are known. where: those are."""
    if name not in known:
        raise ValueError(f"bench: {option} expected to be one of {', '.join(known)}{where}, got {name!r}")


@dataclass(frozen=True)
class Request:
    """What rows a user wants of an op whose rows are those of models and not of a suite.

    models, m, imbalance, ep: empty for the op's own choice. world: processes.
    """

    op: str
    cuda: bool
    world: int
    models: tuple[str, ...] = ()
    m: tuple[int, ...] = ()
    imbalance: tuple[str, ...] = ()
    ep: tuple[int, ...] = ()

    def pick(self, known: Sequence[str]) -> tuple[str, ...]:
        """The names of the wanted models, else ValueError: by default all real ones; on CPUs the tiny one."""
        for name in self.models:
            one_of(name, known)
        return self.models or tuple(name for name in known if (name == "tiny") != self.cuda)


@dataclass(frozen=True)
class Model:
    """The projections of one model: pattern name -> (n, k), both global."""

    name: str
    shapes: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Suite:
    name: str
    description: str
    dtype: str
    m: tuple[int, ...]
    models: tuple[Model, ...]

    def problems(self, op: str, patterns: tuple[str, ...]) -> list[Problem]:
        """Rows of ``op``: every model that has one of ``patterns``, at every M."""
        return [
            Problem(op, model.name, pattern, m, *model.shapes[pattern])
            for pattern in patterns
            for model in self.models
            if pattern in model.shapes
            for m in self.m
        ]

    def select(self, models: list[str] | None = None, m: list[int] | None = None) -> Suite:
        """The part of the suite with these model names, else ValueError, and these M."""
        known = {model.name: model for model in self.models}
        for name in models or ():
            one_of(name, known, f" (suite {self.name})")
        chosen = tuple(known[name] for name in models or known)
        return replace(self, models=chosen, m=tuple(m or self.m))


def available() -> list[str]:
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


@dataclass(frozen=True)
class _Shape:
    n: Count
    k: Count


@dataclass(frozen=True)
class _ModelOfFile:
    name: str
    ag_gemm: _Shape | None = None
    gemm_rs: _Shape | None = None
    gemm_ar: _Shape | None = None
    all_reduce: _Shape | None = None


@dataclass(frozen=True)
class _Head:
    name: str
    dtype: Literal["bfloat16", "float16", "float32"]  # fp8 needs scales: an option of the command
    m: Annotated[tuple[Count, ...], Within(1)]
    description: str = ""


@dataclass(frozen=True)
class _File:
    suite: _Head
    model: Annotated[list[_ModelOfFile], Within(1)]


def parse(text: str) -> Suite:
    """Reads a suite from TOML text; ValueError says which key is wrong."""
    file: _File = _files.parse(_File, _files.plain(tomllib.loads(text)), "suite")
    models = (
        Model(of.name, {p: (shape.n, shape.k) for p in _PATTERNS if (shape := getattr(of, p))})
        for of in file.model
    )
    head = file.suite
    return Suite(head.name, head.description, head.dtype, head.m, tuple(models))


def load(name: str) -> Suite:
    """A suite by name (see :func:`available`) or by path to a TOML file; ValueError names the file."""
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ValueError(f"bench: --suite {name}: suite file not found")
        text = _files.read_text(path)
        try:
            return parse(text)
        except (ValueError, RecursionError) as error:
            kind = "" if str(error).startswith("suite: ") else "suite: no TOML: "
            raise ValueError(f"bench: {name}: {kind}{error}") from error
    one_of(name, available(), " or a .toml file", "--suite")
    return parse((resources.files(__name__) / f"{name}.toml").read_text())
