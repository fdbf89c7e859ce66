"""What docstrings need besides napoleon: links, several errors in one line, and code after `Example::`."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from names import public
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform

_SEVERAL_ERRORS = re.compile(r"^( +)(\w+(?:, \w+)+): (.*)$")
_NAME = re.compile(r"(?<![\w./`\"])(flux(?:\.\w+)+)(\(\w*\))?")


def _link(match: re.Match[str]) -> str:
    name = match.group(1)
    return f":py:obj:`{match.group()} <{name}>`" if name in public() else match.group()


def _errors(lines: list[str]) -> list[str]:
    """One entry for each error of `TypeError, ValueError: text`, which napoleon takes for one."""
    result: list[str] = []
    inside = False
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if line.strip():
            inside = line == "Raises:" or (inside and line.startswith(" "))
        match = _SEVERAL_ERRORS.match(line) if inside else None
        if match is None:
            result.append(line)
            continue
        indent, names, text = match.groups()
        rest = []
        while index < len(lines) and lines[index].startswith(indent + " "):
            rest.append(lines[index])
            index += 1
        for name in names.split(", "):
            result += [f"{indent}{name}: {text}", *rest]
    return result


def _returns(lines: list[str]) -> list[str]:
    """Returns as a field: napoleon would take what stands before a colon for a type."""
    if "Returns:" not in lines:
        return lines
    at = lines.index("Returns:")
    return [*lines[:at], f":returns: {lines[at + 1].strip()}", *lines[at + 2 :]]


def rewrite(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _returns(_errors(lines))
    if "Example::" in lines:
        at = lines.index("Example::")
        code = lines[at + 1 :]
        lines[:] = [_NAME.sub(_link, line) for line in lines[:at]]
        lines += [".. rubric:: Example", "", ".. code-block:: python", *code, ""]
    else:
        lines[:] = [_NAME.sub(_link, line) for line in lines]


def signature(app: Sphinx, what: str, name: str, *_: Any) -> tuple[str, str] | None:
    """No arguments for what flux makes and users only read: its attributes say the same."""
    return ("", "") if name in ("flux.Plan", "flux.moe.Routing") else None


def order(app: Sphinx, domain: str, kind: str, content: addnodes.desc_content) -> None:
    """Puts the type of a result behind its description, and leaves out the one that says nothing."""
    for fields in content.findall(nodes.field_list):
        by_name = {field[0].astext(): field for field in fields.findall(nodes.field)}
        returns, kind_of_result = by_name.get("returns"), by_name.get("rtype")
        if returns is None or kind_of_result is None:
            continue
        fields.remove(kind_of_result)
        if kind_of_result[1].astext() not in ("Any", "typing.Any", "~typing.Any"):
            fields.insert(fields.index(returns) + 1, kind_of_result)


class NameLinks(SphinxTransform):
    """Leads `flux.gemm_rs` in the text of a page to its entry in the reference."""

    default_priority = 890

    def apply(self, **_: Any) -> None:
        for node in list(self.document.findall(nodes.literal)):
            name = node.astext().removesuffix("()")
            linked = isinstance(node.parent, (nodes.reference, addnodes.pending_xref))
            if linked or name not in public():
                continue
            reference = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=name, refdoc=self.env.docname, refexplicit=True
            )
            node.replace_self(reference)
            reference += node


def one_signature(app: Sphinx) -> None:
    """The overloads of a function say for type checkers what its docstring says in words."""
    for module in ("flux.ops.ag_gemm", "flux.ops.all_reduce", "flux.ops.gemm_ar"):
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.clear()


def setup(app: Sphinx) -> dict[str, Any]:
    # Before napoleon, which comes at the default priority.
    app.connect("autodoc-process-docstring", rewrite, priority=400)
    app.connect("autodoc-process-signature", signature)
    # After autodoc, which adds types.
    app.connect("object-description-transform", order, priority=900)
    app.connect("builder-inited", one_signature)
    app.add_transform(NameLinks)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
