"""Links from a page to files of the repository: the site shows those files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]
# Files of the repository that are a page of the site.
PAGES = {"README.md": "index", "CONTRIBUTING.md": "contributing"}
# Shown with their text; other kinds, such as results in JSON, can be downloaded.
SHOWN = {".py", ".h", ".cc", ".cu", ".cuh", ".md", ".toml", ".txt", ".cmake", ".sh", ""}
FOLDER = "source"
FOLDERS = ("csrc/", "python/", "tests/", "tools/", "examples/", "benchmarks/", "cmake/", "third_party/")


def place(path: Path) -> str | None:
    """Path of a file relative to the repository, or None if it is no file of it, or a part of the site."""
    path = path.resolve()
    if not path.is_file() or not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "docs"):
        return None
    return path.relative_to(ROOT).as_posix()


class FileLinks(SphinxTransform):
    """Leads links to files of the repository, and names of such files, to pages that show them."""

    default_priority = 900

    def apply(self, **_: Any) -> None:
        for node in list(self.document.findall(addnodes.download_reference)):
            self._replace(node, Path(self.env.relfn2path(node["reftarget"], self.env.docname)[1]))
        for node in list(self.document.findall(addnodes.pending_xref)):
            # Markdown outside of docs/ is no page; its name comes as that of one, without the suffix.
            if node.get("reftype") == "myst" and Path(node["reftarget"]).is_absolute():
                self._replace(node, Path(f"{node['reftarget']}.md"))
        for node in list(self.document.findall(nodes.literal)):
            text = node.astext()
            named = text.startswith(FOLDERS) and place(ROOT / text)
            if named and Path(named).suffix in SHOWN and not isinstance(node.parent, nodes.reference):
                reference = self._reference(named)
                node.replace_self(reference)
                reference += node

    def _replace(self, node: nodes.Element, path: Path) -> None:
        name = place(path)
        if name in PAGES:
            node["reftarget"], node["reftargetid"] = PAGES[name], None
        elif name is not None and Path(name).suffix in SHOWN:
            reference = self._reference(name)
            reference += node.children
            node.replace_self(reference)

    def _reference(self, name: str) -> nodes.reference:
        files = getattr(self.env, "repository_files", {})
        files.setdefault(self.env.docname, set()).add(name)
        self.env.repository_files = files
        # Relative to the page, as the site may lie in any folder of a server.
        start = os.path.dirname(self.env.docname) or "."
        uri = os.path.relpath(f"{FOLDER}/{name}.html", start)
        return nodes.reference("", "", internal=True, refuri=uri)


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that some page links to."""
    named: dict[str, set[str]] = getattr(app.env, "repository_files", {})
    formatter = HtmlFormatter(linenos="inline", lineanchors="line", cssclass="highlight")
    for name in sorted(set().union(*named.values())):
        text = (ROOT / name).read_text()
        try:
            lexer = get_lexer_for_filename(name)
        except ClassNotFound:
            lexer = TextLexer()
        body = f"<h1><code>{name}</code></h1>\n{highlight(text, lexer, formatter)}"
        yield f"{FOLDER}/{name}", {"title": name, "body": body}, "page.html"


def forget(app: Sphinx, env: Any, docname: str) -> None:
    getattr(env, "repository_files", {}).pop(docname, None)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(FileLinks)
    app.connect("html-collect-pages", pages)
    app.connect("env-purge-doc", forget)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
