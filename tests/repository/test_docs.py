"""What the documentation says about names that a program can look up: links, variables. Its examples run in
test_doc_examples.py.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flux
from flux import _env

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from names import Definition, example, public, tree  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    titles = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Some `title`, here\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#some-title-here) [y](b.md#other) [z](c.md) [w](https://arxiv.org)\n")
    assert broken_links(page) == ["b.md#other", "c.md"]


def test_environment_table_is_that_of_the_code() -> None:
    assert _env.table() in (ROOT / "docs" / "troubleshooting.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_an_unknown_variable(page: Path) -> None:
    known = {variable.name for variable in _env.VARIABLES}
    assert set(re.findall(r"\bFLUX_[A-Z_]+\b", page.read_text())) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_are_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, str(page), "exec")


def signatures(text: str) -> dict[str, str]:
    """Functions and classes whose arguments a page lists: in blocks that are no program, or first in rows."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    listed = "\n".join(block for language, block in blocks if not language)
    calls = re.findall(r"^(?:\w+ += +)?((?:flux\.)?[\w.]+)\(([^()]*)\)", listed, re.MULTILINE)
    calls += re.findall(r"^\| `((?:flux\.)?[\w.]+)\(([^()`]*\*[^()`]*)\)`", text, re.MULTILINE)
    return {name: arguments for name, arguments in calls if hasattr(flux.layers, name) or "flux." in name}


def named(name: str) -> Callable[..., object]:
    parts = name.removeprefix("flux.").split(".")
    return functools.reduce(getattr, parts, flux if name.startswith("flux.") else flux.layers)


def taken(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def is_signature(name: str, arguments: str) -> bool:
    """Whether these are the function's names, order, kinds and defaults; before "..." some of them."""
    some, told = arguments.endswith("..."), dict[str, Any](torch=torch)
    exec(f"def function({arguments.rstrip(', *.') if some else arguments}): pass", told)
    listed, own = taken(told["function"]), taken(named(name))
    return listed == ([each for each in own if each in listed] if some else own)


def wrong_arguments(text: str) -> list[str]:
    """Signatures that are not the code's; and names in tables of arguments, and keywords in code spans, that
    no such function has.
    """
    own = signatures(text)
    wrong = [name for name, arguments in own.items() if not is_signature(name, arguments)]
    known = {parameter for name in own or LISTED for parameter in inspect.signature(named(name)).parameters}
    for rows in re.findall(r"^\| argument \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        cells = " ".join(row.split("|")[1] for row in rows.splitlines())
        wrong += [name for name in re.findall(r"`(\w+)`", cells) if name not in known]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for name, arguments in re.findall(r"`(flux\.[\w.]+)\(([^()`]*)\)`", prose):
        parameters = inspect.signature(named(name)).parameters
        wrong += [f"{name}: {key}" for key in re.findall(r"(\w+)=", arguments) if key not in parameters]
    return wrong


LISTED = {name for page in PAGES for name in signatures(page.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_arguments_are_those_of_the_code(page: Path) -> None:
    assert wrong_arguments(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```\nflux.wgrad_accum(grad_output, x, main_grad)  # adds\n```\n", []),
        ("```\nflux.wgrad_accum(x, grad_output, main_grad)\n```\n", ["flux.wgrad_accum"]),
        ("```\nflux.all_gather(x, group=None, out=None)\n```\n", ["flux.all_gather"]),
        ("| `RMSNorm(hidden_size, eps=1e-6, *, ...)` |\n", []),
        ("| `RMSNorm(hidden_size, eps=1e-5, *, ...)` |\n", ["RMSNorm"]),
        ("| argument | |\n|---|---|\n| `weight`, `scale` | of it |\n", ["scale"]),
        ("call `flux.reserve(max_m=8,\nrows=8)` before", ["flux.reserve: rows"]),
        ("```python\nflux.gemm(x, w)\n```\n", []),
    ],
)
def test_wrong_arguments_are_found(text: str, wrong: list[str]) -> None:
    assert wrong_arguments(text) == wrong
    assert {"flux.gemm_rs", "flux.moe.route", "flux.moe.MoEMLP", "column_linear", "ParallelMLP"} <= LISTED


# Docstrings of all public functions and classes: arguments, result, errors and an example, which runs in
# test_doc_examples.py; and the pages of the reference, which show all of them.

# What raises nothing of its own, or only what the class that it stands in for raises.
NO_ERRORS = {
    "flux.CommTimeoutError",
    "flux.Plan",
    "flux.integrations.async_tp.install",
    "flux.integrations.async_tp.uninstall",
    "flux.integrations.dtensor.FluxColwiseParallel",
    "flux.integrations.dtensor.FluxRowwiseParallel",
    "flux.integrations.dtensor.FluxSharedColwiseParallel",
    "flux.integrations.megatron.FluxMoELayer",
    "flux.integrations.megatron.accumulate_into_main_grad",
    "flux.integrations.megatron.coverage",
    "flux.integrations.megatron.get_flux_layer_spec",
    "flux.integrations.transformers.FluxRowwiseParallel",
    "flux.integrations.transformers.install",
    "flux.integrations.transformers.register",
    "flux.integrations.transformers.uninstall",
    "flux.moe.Routing",
    "flux.moe.reference.moe_mlp",
    "flux.testing.RankFailure",
    "flux.testing.SpawnError",
}
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$\n((?:^(?: .*)?$\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*\n(?:^     .*\n)*)", re.MULTILINE)


def sections(node: Definition) -> dict[str, str]:
    return dict(_SECTION.findall(ast.get_docstring(node) or ""))


def documented(node: Definition) -> dict[str, str]:
    """Arguments, or attributes, that a docstring describes, and what it says of them."""
    found = sections(node)
    entries = _ENTRY.findall(found.get("Args", "") + "\n" + found.get("Attributes", "") + "\n")
    return {name: text for names, text in entries for name in names.split(", ")}


def tensors(node: ast.FunctionDef) -> set[str]:
    """Arguments of a function that are tensors, or sequences of them."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {a.arg for a in named if a.annotation and "Tensor" in ast.unparse(a.annotation)}


def arguments(node: Definition, module: ast.Module) -> set[str]:
    """What a function, or a class's __init__, takes; of a dataclass or NamedTuple its fields."""
    if isinstance(node, ast.ClassDef):
        fields = {
            a.target.id for a in node.body if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)
        }
        inits = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        if inits:
            return arguments(inits[0], module)
        bases = {ast.unparse(base) for base in node.bases}
        if fields and (node.decorator_list or "NamedTuple" in bases):
            return fields
        above = [c for c in module.body if isinstance(c, ast.ClassDef) and c.name in bases]
        return arguments(above[0], module) if above else set()
    spec = node.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    return {a.arg for a in (*named, spec.vararg, spec.kwarg) if a is not None} - {"self"}


def lacks(name: str, node: Definition, module: ast.Module) -> list[str]:
    """What a docstring leaves out, or has too much."""
    text, found = ast.get_docstring(node) or "", sections(node)
    missing = [] if example(node) else ["Example::"]
    # Those of another library's class are documented there.
    if not re.search(r"^Arguments\b[^.]* are those\s+of ", text, re.MULTILINE):
        taken, described = arguments(node, module), documented(node)
        missing += sorted(taken - described.keys())
        if isinstance(node, ast.FunctionDef):
            missing += [f"no argument {other}" for other in sorted(described.keys() - taken)]
            missing += [
                f"shape of {name}"
                for name in sorted(tensors(node) & described.keys())
                if "[" not in described[name] and "shape" not in described[name]
            ]
            if tensors(node) and not re.search(r"dtype|float", "".join(described.values())):
                missing.append("dtype")
    if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or ast.Constant(None)) != "None":
        missing += [] if "Returns" in found else ["Returns"]
    if ("Raises" in found) == (name in NO_ERRORS):
        missing.append("Raises")
    return missing


@pytest.mark.parametrize("name", public())
def test_docstring_is_complete(name: str) -> None:
    place, node = public()[name]
    module = tree(place)
    assert module is not None
    assert lacks(name, node, module) == []


def test_exceptions_are_public_names() -> None:
    assert set(public()) >= NO_ERRORS


COMPLETE = '''
def f(x: int) -> int:
    """Adds one.

    Args:
        x: a number.

    Returns:
        The next one.

    Raises:
        TypeError: it is none.

    Example::

        assert f(1) == 2
    """
'''


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", []),
        ("Example::", "Such as::", ["Example::"]),
        ("x: a number", "y: a number", ["x", "no argument y"]),
        ("(x: int)", "(x: int, *, z: int)", ["z"]),
        ("Returns:", "Gives:", ["Returns"]),
        ("Raises:", "Errors:", ["Raises"]),
        ("(x: int)", "(x: torch.Tensor)", ["shape of x", "dtype"]),
    ],
)
def test_incomplete_docstrings_are_found(old: str, new: str, expected: list[str]) -> None:
    module = ast.parse(COMPLETE.replace(old, new) if old else COMPLETE)
    node = module.body[0]
    assert isinstance(node, ast.FunctionDef)
    assert lacks("f", node, module) == expected


def test_reference_shows_every_public_name_once() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", pages, re.MULTILINE)
    assert sorted(shown) == sorted(public())
