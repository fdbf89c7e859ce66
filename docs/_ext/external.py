"""Links to names of Python and PyTorch, without inventories: these would make a build need a network."""

from __future__ import annotations

import builtins
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

PYTHON = "https://docs.python.org/3/library/"
TORCH = "https://docs.pytorch.org/docs/stable/"
PAGES = {
    "torch.Tensor": f"{TORCH}tensors.html#torch.Tensor",
    "torch.dtype": f"{TORCH}tensor_attributes.html#torch.dtype",
    "torch.device": f"{TORCH}tensor_attributes.html#torch.device",
    "torch.nn.Module": f"{TORCH}generated/torch.nn.Module.html",
    "torch.nn.RMSNorm": f"{TORCH}generated/torch.nn.RMSNorm.html",
    "torch.distributed.ProcessGroup": f"{TORCH}distributed.html",
    "torch.distributed.device_mesh.DeviceMesh": f"{TORCH}distributed.html",
    "torch.distributed.tensor.parallel.ColwiseParallel": f"{TORCH}distributed.tensor.parallel.html",
    "torch.distributed.tensor.parallel.RowwiseParallel": f"{TORCH}distributed.tensor.parallel.html",
    "torch.distributed.tensor.placement_types.Placement": f"{TORCH}distributed.tensor.html",
    "collections.abc.Callable": f"{PYTHON}collections.abc.html#collections.abc.Callable",
    "collections.abc.Collection": f"{PYTHON}collections.abc.html#collections.abc.Collection",
    "collections.abc.Mapping": f"{PYTHON}collections.abc.html#collections.abc.Mapping",
    "collections.abc.Sequence": f"{PYTHON}collections.abc.html#collections.abc.Sequence",
    "contextlib.AbstractContextManager": f"{PYTHON}contextlib.html#contextlib.AbstractContextManager",
    "typing.Any": f"{PYTHON}typing.html#typing.Any",
    "typing.Literal": f"{PYTHON}typing.html#typing.Literal",
    "typing.NamedTuple": f"{PYTHON}typing.html#typing.NamedTuple",
}
# Names under which Python knows a few of those.
OTHER_NAMES = {
    "Any": "typing.Any",
    "Placement": "torch.distributed.tensor.placement_types.Placement",
    "Literal": "typing.Literal",
    "NamedTuple": "typing.NamedTuple",
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch._C._distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.nn.modules.normalization.RMSNorm": "torch.nn.RMSNorm",
}


def page(name: str) -> str | None:
    """Where a name is documented, or None for one that is not known here."""
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        return f"{PYTHON}exceptions.html#{name}"
    if name in ("None", "True", "False"):
        return f"{PYTHON}constants.html#{name}"
    if isinstance(found, type):
        return f"{PYTHON}stdtypes.html" if name != "object" else f"{PYTHON}functions.html#object"
    return PAGES.get(OTHER_NAMES.get(name, name))


def resolve(app: Sphinx, env: Any, node: pending_xref, content: nodes.Element) -> nodes.Element | None:
    uri = page(node["reftarget"]) if node.get("refdomain") == "py" else None
    if uri is None:
        return None
    reference = nodes.reference("", "", internal=False, refuri=uri)
    reference += content
    return reference


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
