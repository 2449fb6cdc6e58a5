"""Routers in a layer's graph that the reader's kernels stand in for."""

# N tokens, E experts, K routed experts of a token, H hidden size

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from mreader.experts import chooses_experts
from mreader.graphs import CASTS, VIEWS, axis_of, example_of, is_parameter, name_of
from mreader.opaque import routed_by_gate, routed_by_logits, routed_experts, served

# Up to so many products of two numbers, the logits are computed by the kernel that rotates: every token's programs read
# the whole gate.
_FEW_PRODUCTS = 1 << 20


def route_in_kernels(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Give the routed experts their router's logits, where they choose by themselves: see `chooses_experts`.

    Of few tokens they get the gate and the norm before it, which their kernels go through while they rotate. What chose
    before has no use then, and the compiler leaves it out.
    """
    for node in list(graph.graph.nodes):
        router = _router_of(node) if node.target is routed_experts._opoverload else None
        if router is None or not all(_chooses(module, node, router[1]) for module in served().values()):
            continue
        (x, _, _, down_proj), (logits, *how) = node.args, router
        if gate := _gate_of(logits, node):
            node.target, node.args = routed_by_gate._opoverload, (*gate, *how, down_proj)
        else:
            node.target, node.args = routed_by_logits._opoverload, (x, logits, *how, down_proj)
    graph.recompile()
    return graph


def _chooses(module: Any, experts: Any, routed: int) -> bool:
    return chooses_experts(module, example_of(experts.args[0]), routed)


def _router_of(experts: Any) -> tuple[Any, int, bool] | None:
    """Logits, K and whether weights add up to one, of a router as in `mreader.kernels.route`; None of any other.

    That is topk(softmax(logits)), as it is or divided by its sum, or softmax(topk(logits)), of a product that serves
    nothing else. Between the product and topk there is no narrower type, which could have equal numbers where there
    were none.
    """
    _, ids, weights, _ = experts.args
    if not example_of(weights).is_floating_point():
        return None
    weights = _without_casts(weights)
    if _is_softmax(weights):  # of the largest logits
        largest, renormalize = weights.args[0], True
    else:
        largest, renormalize = _undivided(weights)
    topk: Any = largest.args[0] if name_of(largest) == "getitem" and largest.args[1] == 0 else None
    if name_of(topk) != "topk" or not topk.args or name_of(ids) != "getitem" or ids.args != (topk, 1):
        return None
    arguments = dict(zip(("x", "k", "dim", "largest", "sorted"), topk.args, strict=False)) | topk.kwargs
    scores, routed = arguments.pop("x"), arguments.pop("k")
    if not arguments.items() <= {("dim", -1), ("dim", 1), ("largest", True), ("sorted", True)}:
        return None
    if not _is_softmax(weights):
        if not _is_softmax(scores):
            return None
        scores = scores.args[0]
    logits = scores
    while name_of(logits) in CASTS and _widens(logits):
        logits = logits.args[0]
    if logits.target is not linear or not _serves_only(experts, logits):
        return None
    return logits, routed, renormalize


def _serves_only(experts: Any, logits: Any) -> bool:
    """Whether nothing else has to do with logits, ids, weights and all between: it might change them in place."""
    between = _between(logits, experts)
    return all(user in between for node in between - {experts} for user in node.users)


def _between(logits: Any, experts: Any) -> set[Any]:
    """What makes ids and weights of logits, these and the experts included."""
    between, left = {logits, experts}, [*experts.args[1:3]]
    while left:
        node = left.pop()
        if node not in between:
            between.add(node)
            left.extend(node.args[:1] if name_of(node) in CASTS else node.all_input_nodes)
    return between


def _gate_of(logits: Any, experts: Any) -> tuple[Any, Any, Any, float] | None:
    """Tokens before their norm, gate, norm and its epsilon, of a gate as in `mreader.kernels.decode.Gate`; else None.

    That is few products, by a parameter, of normed tokens that serve nothing but the gate and the experts. From the
    norm on to the experts nothing else is computed: it might change the tokens in place.
    """
    if logits.kwargs or logits.args[2:] not in ((), (None,)):
        return None
    (rows, gate), x = logits.args[:2], experts.args[0]
    normed = _without_views(x)
    norm = _norm_of(normed)
    few = example_of(x).numel() * len(example_of(gate)) <= _FEW_PRODUCTS
    if norm is None or not few or _without_views(rows) is not normed or not is_parameter(gate):
        return None
    if example_of(norm.weight).shape != example_of(x).shape[1:]:
        return None
    allowed = norm.nodes | _between(logits, experts)
    node = min(norm.nodes)
    while node is not experts and (node in allowed or name_of(node) in VIEWS):
        node = node.next
    if node is not experts or not _uses(normed) <= {logits, experts}:
        return None
    with experts.graph.inserting_before(experts):
        tokens = experts.graph.call_method("reshape", (norm.tokens, example_of(x).shape))
    return tokens, gate, norm.weight, norm.epsilon


def _without_views(node: Any) -> Any:
    while name_of(node) in VIEWS:
        node = node.args[0]
    return node


def _uses(node: Any) -> set[Any]:
    """What uses a node or a view of it, but for the views."""
    return {use for user in node.users for use in (_uses(user) if name_of(user) in VIEWS else {user})}


class _Norm(NamedTuple):
    """As `mreader.kernels.route.rms_norm` of tokens; the nodes are those that make it, none of which has other uses."""

    tokens: Any
    weight: Any
    epsilon: float
    nodes: set[Any]


def _norm_of(normed: Any) -> _Norm | None:
    dtype = example_of(normed).dtype
    weight, scaled = _factors(normed, is_parameter)
    quotient = scaled.args[0] if name_of(scaled) in CASTS else scaled
    root, number = _factors(quotient, lambda node: name_of(node) == "rsqrt")
    if name_of(number) not in CASTS:
        return None
    tokens, shifted = number.args[0], root.args[0]
    if name_of(shifted) != "add" or len(shifted.args) != 2:
        return None
    mean, epsilon = shifted.args
    if not isinstance(epsilon, float) or name_of(mean) != "mean" or not mean.args:
        return None
    square = mean.args[0]
    if name_of(square) != "pow" or square.args != (number, 2) or not _is_kept_axis(mean, square) or axis_of(mean) != -1:
        return None
    nodes = {scaled, quotient, root, shifted, mean, square, number}
    alone = all(user in nodes | {normed} for node in nodes for user in node.users)
    alike = example_of(tokens).dtype == example_of(scaled).dtype == dtype
    whole = example_of(tokens).shape == example_of(normed).shape and example_of(quotient).dtype == torch.float32
    return _Norm(tokens, weight, epsilon, nodes | {normed}) if alone and alike and whole else None


def _factors(product: Any, is_one: Callable[[Any], bool]) -> tuple[Any, Any]:
    """The two factors, the one that is such a one first; twice None of anything else."""
    factors: Any = product.args if name_of(product) == "mul" else ()
    if len(factors) == 2:
        for one, other in (factors, factors[::-1]):
            if is_one(one):
                return one, other
    return None, None


def _undivided(weights: Any) -> tuple[Any, bool]:
    """a of a / a.sum(-1, keepdim=True), and whether it was divided."""
    if name_of(weights) in ("truediv", "itruediv", "div", "div_") and len(weights.args) == 2 and not weights.kwargs:
        number, total = weights.args
        if name_of(total) == "sum" and _is_kept_axis(total, number) and axis_of(total) in (-1, 1):
            return number, True
    return weights, False


def _is_kept_axis(node: Any, x: Any) -> bool:
    """Whether a reduction of x keeps the axis along which it goes, and x's dtype."""
    return node.args[:1] == (x,) and node.kwargs.keys() <= {"dim", "keepdim"} and node.kwargs.get("keepdim") is True


def _is_softmax(node: Any) -> bool:
    """Along the last of two axes, not in less than float32."""
    if name_of(node) != "softmax" or not node.args:
        return False
    return example_of(node).dtype == torch.float32 and axis_of(node) in (-1, 1) and example_of(node).dim() == 2


def _widens(cast: Any) -> bool:
    """Whether it has every number of what it is made of, floats of up to 32 bits: the kernels take no others."""
    return example_of(cast).dtype in (example_of(cast.args[0]).dtype, torch.float32)


def _without_casts(node: Any) -> Any:
    while name_of(node) in CASTS:
        node = node.args[0]
    return node
