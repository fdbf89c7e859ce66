"""Graphs of vLLM as files: JSON, a node a line, with shapes and dtypes, and M for the number of tokens."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS = 41  # in place of M; no other size of the models


def save(graph: fx.Graph, path: Path) -> None:
    """Writes a graph."""
    lines = [json.dumps(_node(node)) for node in graph.nodes]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def load(text: str) -> fx.Graph:
    """The graph that a file holds, with fake results."""
    text = text.replace('"token"', '"row"')  # as flux calls the kind of scales since the graphs were saved
    graph, nodes = fx.Graph(), {}
    with FakeTensorMode():
        for saved in json.loads(text):
            args = _map(saved["args"], nodes)
            kwargs = {name: _map(argument, nodes) for name, argument in saved["kwargs"].items()}
            target = _target(saved["target"]) if saved["op"] == "call_function" else saved["target"]
            node = graph.create_node(saved["op"], target, tuple(args), kwargs, saved["name"])
            nodes[saved["name"]] = node
            if saved["value"] is not None:
                node.meta[saved["meta"]] = _fake(saved["value"])
    graph.lint()
    return graph


def _node(node: fx.Node) -> dict[str, Any]:
    meta = next((name for name in ("val", "example_value") if name in node.meta), None)
    return {
        "name": node.name,
        "op": node.op,
        "target": node.target if isinstance(node.target, str) else _name(node.target),
        "args": _saved(list(node.args)),
        "kwargs": _saved(dict(node.kwargs)),
        "meta": meta,
        "value": None if meta is None else _value(node.meta[meta]),
    }


def _name(function: Any) -> str:
    """A name that _target finds again."""
    if isinstance(function, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{function.name()}"
    if isinstance(function, torch._ops.OpOverloadPacket):
        return f"torch.ops.{function._qualified_op_name.replace('::', '.')}"
    overload = isinstance(function, torch._ops.OpOverload)
    return f"torch.ops.{function}" if overload else f"{function.__module__}.{function.__qualname__}"


def _saved(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return {"node": argument.name}
    if isinstance(argument, list | tuple):
        return [_saved(each) for each in argument]
    if isinstance(argument, dict):
        return {name: _saved(each) for name, each in argument.items()}
    if isinstance(argument, torch.dtype):
        return {"dtype": str(argument).removeprefix("torch.")}
    if isinstance(argument, torch._ops.OpOverload):
        return {"operator": _name(argument)}
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    return {"other": str(argument)}


def _value(value: Any) -> Any:
    """Of a fake result: shape and dtype, a list of these, or a number."""
    if isinstance(value, torch.Tensor):
        sizes = [size if isinstance(size, int) else "M" for size in value.shape]
        return {"shape": sizes, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return [_value(each) for each in value]
    return "M"


def _map(argument: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(argument, list):
        return [_map(each, nodes) for each in argument]
    if not isinstance(argument, dict):
        return argument
    if argument.keys() == {"node"}:
        return nodes[argument["node"]]
    if argument.keys() == {"operator"}:
        return _target(argument["operator"])
    if argument.keys() == {"dtype"}:
        return getattr(torch, argument["dtype"])
    return {name: _map(each, nodes) for name, each in argument.items()}


def _fake(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_fake(each) for each in value)
    if value == "M":
        return TOKENS
    shape = [TOKENS if size == "M" else size for size in value["shape"]]
    return torch.empty(shape, dtype=getattr(torch, value["dtype"]))


def _target(name: str) -> Any:
    """A function by its name; an operator that is not here, and a function of vLLM, is one of that name."""
    module, _, function = name.rpartition(".")
    try:
        if name.startswith("torch.ops."):
            return functools.reduce(getattr, name.split(".")[1:], torch)
        return getattr(importlib.import_module(module), function)
    except (AttributeError, ImportError):
        return _unknown(name)


@functools.cache
def _unknown(name: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(name)

    # That of an operator is followed by its overload's.
    function.__name__ = name.split(".", 3)[3] if name.startswith("torch.ops.") else name.rpartition(".")[2]
    function.__qualname__ = name
    return function
