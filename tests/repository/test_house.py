"""Laws of the house that a program can check.

Each law is a function from a source tree to its violations, and is shown a planted violation too, so that
none of them passes by finding nothing to look at.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP = {".h", ".cc", ".cu", ".cuh"}
CODE = CPP | {".py", ".cmake"}
TEXT = CODE | {".md", ".toml", ".txt", ".yml", ".yaml", ""}
NOT_OURS = {"build", "dist", "__pycache__", "results", "LICENSE"}
MAX_LINES, USUAL_LINES, MAY_BE_LONGER = 700, 500, 0.05
# Of functions in these parts that are not public.
MAX_ARGUMENTS = 8
FEW_ARGUMENTS = [f"python/flux/{part}" for part in ("calls", "comm", "fp8", "ops", "plan")]
WRITTEN = {"docs/results.md"}  # by a program
# Quotes what the laws forbid.
THIS_FILE = "tests/repository/test_house.py"

# Which parts of the package a part may import; "flux" stands for the public names.
_BASE = {"_deprecated", "_invariance", "_env", "_files", "_log", "_native", "errors"}
_OPERATE = _BASE | {"comm", "measured", "_memory", "fp8", "plan", "calls"}
_SERVES = _OPERATE | {"flux", "ops", "moe", "testing", "machine"}
MAY_IMPORT = {
    "__init__": {"_invariance", "errors", "ops", "plan", "moe", "layers", "integrations", "testing"},
    "__main__": {"cli"},
    "_deprecated": set(),
    "_env": set(),
    "_invariance": {"_env"},
    "_log": set(),
    "_files": set(),
    "errors": set(),
    "_native": {"_env", "errors"},
    "measured": {"_env", "_files", "_log"},
    "comm": _BASE | {"measured"},
    "_memory": set(),
    "fp8": _BASE | {"comm", "_memory"},
    "plan": _BASE | {"comm", "measured", "fp8"},
    "calls": _BASE | {"comm", "fp8", "plan", "_memory"},
    "ops": _OPERATE,
    "_sharded": _BASE | {"comm"},
    "moe": _OPERATE | {"ops", "_sharded"},
    "layers": _OPERATE | {"flux", "ops", "_sharded"},
    "integrations": _OPERATE | {"flux", "ops", "moe", "layers"},
    "peers": set(),
    "machine": {"_native", "peers", "measured"},
    "testing": _OPERATE | {"flux", "ops", "moe"},
    "bench": _SERVES | {"peers", "layers", "integrations"},
    "cli": _SERVES | {"integrations", "bench"},
}
PUBLIC_HOSTS = {
    "www.apache.org",
    "arxiv.org",
    "docs.nvidia.com",
    "docs.python.org",
    "docs.pytorch.org",
    "github.com",
}


def files(root: Path, suffixes: set[str], *folders: str) -> Iterator[tuple[str, str]]:
    """Path relative to the root, and text, of every file of ours with one of the suffixes."""
    for start in [root / folder for folder in folders] or [root]:
        for path in sorted(start.rglob("*")):
            relative = path.relative_to(root)
            hidden = relative.parts[0].startswith(".") and relative.parts[0] != ".ci"
            egg = any(part.endswith(".egg-info") for part in relative.parts)
            ours = not (hidden or egg or set(relative.parts) & NOT_OURS)
            if ours and path.is_file() and path.suffix in suffixes:
                yield str(relative), path.read_text()


def includes(root: Path) -> Iterator[tuple[str, str, str]]:
    """(file, its folder in csrc, what it includes)."""
    for path, text in files(root, CPP, "csrc"):
        for target in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', text, re.MULTILINE):
            yield path, path.split("/")[1], target


def foreign_headers(root: Path) -> list[str]:
    """Headers of torch and Python stay in csrc/bindings."""
    foreign = re.compile(r"(torch|ATen|c10|pybind11)/|Python\.h$")
    return [
        f"{p}: {target}"
        for p, folder, target in includes(root)
        if folder != "bindings" and foreign.match(target)
    ]


def upward_includes(root: Path) -> list[str]:
    """runtime <- gemm <- op folders <- bindings, instances; op folders don't include each other."""
    folders = {path.name for path in (root / "csrc").iterdir() if path.is_dir()}
    found = []
    for path, folder, target in includes(root):
        other = target.split("/")[0]
        allowed = {"runtime": set(), "gemm": {"runtime"}, "bindings": folders, "instances": folders}.get(
            folder, {"runtime", "gemm"}
        )
        if other in folders and other not in allowed | {folder}:
            found.append(f"{path}: {target}")
    return found


def one_architecture(root: Path) -> list[str]:
    """Headers of csrc/gemm know no architecture: only its .cu files name a mainloop."""
    return [
        f"{path}: {target}"
        for path, _, target in includes(root)
        if path.count("/") == 2 and path.startswith("csrc/gemm/") and Path(path).suffix != ".cu"
        if re.match(r"gemm/sm\d+/|cute/|cutlass/", target)
    ]


def python_imports(root: Path) -> list[str]:
    """Parts of the package import only what lies below them."""
    package = root / "python" / "flux"
    found = []
    for path, text in files(root, {".py"}, "python/flux"):
        parts = Path(path).relative_to("python/flux").with_suffix("").parts
        for node in ast.walk(ast.parse(text)):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                if node.level:
                    found.append(f"{path}:{node.lineno}: relative import")
                base = node.module or ""
                targets = [f"flux.{alias.name}" for alias in node.names] if base == "flux" else [base]
            for target in targets:
                names = target.split(".")
                if names[0] != "flux":
                    continue
                inside = len(names) > 1 and (
                    (package / names[1]).is_dir() or (package / f"{names[1]}.py").exists()
                )
                part = names[1] if inside else "_native" if names[-1] == "_core" else "flux"
                if part != parts[0] and part not in MAY_IMPORT[parts[0]]:
                    found.append(f"{path}:{node.lineno}: {target}")
    return found


def ways_of_faces(root: Path) -> list[str]:
    """Ways of running an operator import no public function of groups: they are passed what they call."""
    faces = {path.stem for path in (root / "python/flux/ops").glob("*.py") if "GroupLike" in path.read_text()}
    found = []
    for path, text in files(root, {".py"}, "python/flux/ops/ways"):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names] if node.module == "flux.ops" else []
            names += [(node.module or "").removeprefix("flux.ops.")]
            found += [f"{path}:{node.lineno}: {name}" for name in names if name in faces]
    return found


def many_arguments(root: Path) -> list[str]:
    """No function but a public one takes more than MAX_ARGUMENTS: what belongs together is one."""
    public = set(re.findall(r'^    "(\w+)",$', (root / "python/flux/__init__.py").read_text(), re.MULTILINE))
    return [
        f"{path}:{node.lineno}: {node.name}"
        for path, text in files(root, {".py"}, *FEW_ARGUMENTS)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if node.name not in public
        if len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) > MAX_ARGUMENTS
    ]


def several_nodes(root: Path) -> list[str]:
    """What serves groups of one node does not know of those with several: of comm, only the registry does."""
    return [
        f"{path}: {line}"
        for path, text in files(root, {".py"}, "python/flux/comm")
        if not path.startswith("python/flux/comm/nodes/") and path != "python/flux/comm/registry.py"
        for line in re.findall(r"^\s*(?:from|import) flux\.comm(?:\.| import )nodes.*", text, re.MULTILINE)
    ]


def long_files(root: Path) -> list[str]:
    """No file has more than MAX_LINES, and few have more than USUAL_LINES."""
    lines = {path: text.count("\n") for path, text in files(root, CODE | {".md"}) if path not in WRITTEN}
    long = [path for path, count in lines.items() if count > USUAL_LINES]
    too_many = len(long) > max(1, MAY_BE_LONGER * len(lines))
    return long if too_many else [path for path in long if lines[path] > MAX_LINES]


def machine_facts(root: Path) -> list[str]:
    """No GPU is known by its name or SM count: what depends on the machine is asked of the machine."""
    fact = re.compile(
        r"\b(?:A100|B200|GH200|H100|H200|H800)\b|sms?\b.*\b(?:132|114|78)\b|\b(?:132|114|78)\b.*\bsms?\b",
        re.I,
    )
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in files(root, CODE, "csrc", "python")
        for number, line in enumerate(text.splitlines(), 1)
        if fact.search(line)
    ]


def places(root: Path) -> list[str]:
    """The tree names no machine's folders and no host but public documentation."""
    folder = re.compile(r"(?<![\w.$}*-])/(?:home|root|work|opt|mnt)(?:/|\b(?=[\s\"'`]))")
    host = re.compile(r"https?://([\w.-]+)")
    found = []
    for path, text in files(root, TEXT):
        if path == THIS_FILE:
            continue
        found += [f"{path}: {match}" for match in folder.findall(text)]
        found += [f"{path}: {name}" for name in host.findall(text) if name not in PUBLIC_HOSTS]
    return found


def unknown_variables(root: Path) -> list[str]:
    """Every FLUX_* environment variable that is read stands in the table of flux/_env.py."""
    table = environment_table(root)
    read = re.compile(r"(?:environ(?:\.get\(|\[|\.setdefault\()|getenv\()\s*[\"'](FLUX_\w+)")
    sources = [*files(root, {".py"}, "python"), ("setup.py", (root / "setup.py").read_text())]
    return [f"{path}: {name}" for path, text in sources for name in read.findall(text) if name not in table]


def environment_table(root: Path) -> set[str]:
    # Loaded by itself: importing flux would need the native library.
    spec = importlib.util.spec_from_file_location("house_env", root / "python" / "flux" / "_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house_env"] = module
    spec.loader.exec_module(module)
    return {variable.name for variable in module.VARIABLES}


def postponed(root: Path) -> list[str]:
    note = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
    return [path for path, text in files(root, CODE) if note.search(text) and path != THIS_FILE]


_ENV = "class V:\n    name = 'FLUX_KNOWN'\nVARIABLES = (V(),)\n"
# Each law with a file that breaks it.
LAWS: list[tuple[Callable[[Path], list[str]], str, str]] = [
    (foreign_headers, "csrc/gemm/gemm.cu", "#include <torch/library.h>\n"),
    (foreign_headers, "csrc/runtime/device.h", "  # include <Python.h>\n"),
    (upward_includes, "csrc/gemm_rs/store.cuh", '#include "ag_gemm/plan.h"\n'),
    (upward_includes, "csrc/runtime/tensor_map.cc", '#include "gemm/plan.h"\n'),
    (one_architecture, "csrc/gemm/finish.cuh", '#include "gemm/sm90/smem.cuh"\n'),
    (python_imports, "python/flux/comm/group.py", "def f():\n    from flux.ops import gemm\n"),
    (python_imports, "python/flux/ops/gemm.py", "import flux\n"),
    (python_imports, "python/flux/bench/a.py", "from . import b\n"),
    (ways_of_faces, "python/flux/ops/ways/gemm_ar.py", "from flux.ops import gemm, gemm_rs\n"),
    (ways_of_faces, "python/flux/ops/ways/gemm_ar.py", "from flux.ops.gemm_rs import reference\n"),
    (many_arguments, "python/flux/calls/front.py", "def f(a, b, c, d, e, *, f, g, h, i): ...\n"),
    (many_arguments, "python/flux/ops/gemm.py", "def run(a, b, c, d, e, f, g, h, i): ...\n"),
    (several_nodes, "python/flux/comm/cpu.py", "from flux.comm.nodes.rail import Rail\n"),
    (several_nodes, "python/flux/comm/cuda.py", "from flux.comm import nodes\n"),
    (long_files, "python/flux/ops/gemm.py", "x = 1\n" * (MAX_LINES + 1)),
    (machine_facts, "csrc/gemm/select.cc", "constexpr int kNumSms = 132;\n"),
    (machine_facts, "python/flux/ops/gemm.py", "if 'H200' in name: pass\n"),
    (places, "docs/guide.md", "see /home/someone/flux\n"),
    (places, ".ci/run", "pip install -i https://packages.example.net/simple x\n"),
    (unknown_variables, "python/flux/comm/shm.py", "import os\nos.environ.get('FLUX_SECRET')\n"),
    (postponed, "csrc/gemm/gemm.cu", "// TODO: tails\n"),
]


@pytest.mark.parametrize("law", dict.fromkeys(law for law, _, _ in LAWS), ids=lambda law: law.__name__)
def test_house_keeps(law: Callable[[Path], list[str]]) -> None:
    assert law(ROOT) == []


@pytest.mark.parametrize(("law", "path", "text"), LAWS, ids=lambda value: getattr(value, "__name__", ""))
def test_law_finds(law: Callable[[Path], list[str]], path: str, text: str, tmp_path: Path) -> None:
    for file, content in {
        "python/flux/__init__.py": '__all__ = [\n    "gemm",\n]\n',
        "python/flux/_env.py": _ENV,
        "python/flux/ops/__init__.py": "from flux.comm import group\n",
        "python/flux/ops/gemm_rs.py": "from flux.comm.group import GroupLike\n",
        "python/flux/ops/ways/gemm_rs.py": "from flux.ops import gemm\n",
        "python/flux/comm/__init__.py": "import os\nos.environ.get('FLUX_KNOWN')\n",
        "csrc/gemm/plan.h": '#include <cstdint>\n#include "runtime/macros.h"\n',
        "csrc/ag_gemm/plan.h": '#include "gemm/plan.h"\n',
        "csrc/bindings/ops.cc": '#include <torch/library.h>\n#include "ag_gemm/plan.h"\n',
        "setup.py": "",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    (tmp_path / "csrc" / "runtime").mkdir()
    assert law(tmp_path) == []
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert len(law(tmp_path)) == 1
