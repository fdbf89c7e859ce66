"""How Sphinx builds the site: `make docs`."""

from __future__ import annotations

import importlib.util
import logging
import sys
import tomllib
import warnings
from pathlib import Path

# Megatron says at its import which of its optional packages are missing.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
logging.getLogger("megatron").setLevel(logging.WARNING)

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS / "_ext"), str(ROOT / "python")]

_metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "flux"
author = "the authors of flux"
copyright = author
version = release = _metadata["version"]
html_title = f"flux {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "docstrings",
    "external",
    "repository",
]
root_doc = "index"
nitpicky = True
# A named tuple that flux.explain makes, and nobody else.
nitpick_ignore = [("py:class", "flux.fp8.scales.Scaling"), ("py:class", "flux.plan.network_model.TwoLevel")]
# What annotations call classes that have pages under other names.
nitpick_ignore += [("py:class", name) for name in ("Tensor", "torch.nn.parameter.Parameter")]
nitpick_ignore += [("py:class", "collections.abc.Iterable"), ("py:class", "_Options")]
exclude_patterns = ["_ext/**"]

myst_heading_anchors = 4
# Blocks without a language are commands and the output of programs.
highlight_language = "text"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_type_aliases = {name: name for name in ("GroupLike", "Init", "SaveGathered")}
# The site can be built where the frameworks of the adapters are not installed.
autodoc_mock_imports = [name for name in ("megatron", "transformers") if not importlib.util.find_spec(name)]
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
add_module_names = True
default_role = "code"
smartquotes_action = "D"  # dashes only: shapes such as [M, ..., N] stay as they are typed

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
