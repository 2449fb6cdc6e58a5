"""Nodes of a graph that torch's compiler hands over: what they call, and on what."""

from typing import Any

from torch import nn

CASTS, VIEWS = ("to", "float", "type_as"), ("view", "reshape")  # names of methods
# Beside those that end with an underscore.
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem")


def name_of(node: Any) -> str:
    """Of the function or method that a node calls."""
    target = getattr(node, "target", None)
    return str(getattr(target, "__name__", target))


def example_of(node: Any) -> Any:
    """A tensor without numbers, as the node's."""
    return node.meta["example_value"]


def axis_of(node: Any) -> Any:
    """The `dim` of a function or method that takes it behind the tensor."""
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")


def nothing_changes(first: Any, last: Any) -> bool:
    """Whether no operation between two nodes works in place."""
    node = first.next
    while node is not last and not is_in_place(node):
        node = node.next
    return node is last


def is_in_place(node: Any) -> bool:
    name = name_of(node)
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs


def is_parameter(node: Any) -> bool:
    """Whether nothing in the graph writes it, so that kernels may read it, as it lies, before they wait for others."""
    example = getattr(node, "meta", {}).get("example_value")
    return isinstance(example, nn.Parameter) and example.is_contiguous()
