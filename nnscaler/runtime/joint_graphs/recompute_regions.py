"""Compute the activations of recomputed regions again in the backward of a compiled stage, collectives and all.

torch.compile has no effects in an order (collectives, gathers of parameters) inside of what torch.utils.checkpoint
runs, and would end its graph at each of them. So a region is written into the graph as it is, between two marks, and
before torch cuts the graph of forward and backward in two, what its backward reads of the region is computed once more:

    forward    x' = enter(x);  h = all_reduce(x' @ w);  y = leave(gelu(h))
    backward   restart(dy);  dh = gelu_backward(dy, h);  ...

becomes

    forward    h = all_reduce(x @ w);  y = gelu(h)
    backward   x'' = hold(x, dy);  h'' = all_reduce(x'' @ w);  dh = gelu_backward(dy, h'');  ...

`hold` copies the region's arguments when the gradient of its results is there, as an effect among the others of
backward: without it the copies of operations would be those of forward for torch, which would keep their results. Only
what leads to something that backward reads is computed again; a last collective is not, as in the run without a graph.
No region lies in another one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.fx import Graph, Node

from nnscaler.runtime.joint_graphs.change_before_partition import effect_of, result_of, taken
from nnscaler.runtime.torch_compile import place_in_graph

_numbers: ContextVar[Iterator[int] | None] = ContextVar("numbers", default=None)


@contextmanager
def regions_in_graphs() -> Iterator[None]:
    """Number the regions of a forward that is compiled inside, from zero: torch finds a graph that it has kept by all
    constants."""
    token = _numbers.set(count())
    try:
        yield
    finally:
        _numbers.reset(token)


def number_of_region() -> int | None:
    """Return the number of a region that is met; None: graphs end inside of regions. A constant of what is compiled, by
    `compiled`."""
    numbers = _numbers.get()
    return None if numbers is None else next(numbers)


def marked(function: Callable[..., Any], tensors: Sequence[Any], number: int) -> tuple[Any, ...]:
    """Call `function(*tensors)`, a region of this number, in a forward that torch.compile reads."""
    place, given = place_in_graph(), list(tensors)
    for trained in (True, False):
        places = [i for i, t in enumerate(given) if isinstance(t, Tensor) and t.requires_grad is trained]
        if places:
            entered = torch.ops.nnscaler.enter_region([given[i] for i in places], number, place)
            for i, tensor in zip(places, entered, strict=True):
                given[i] = tensor
    results = list(function(*given))
    all_places = [i for i, t in enumerate(results) if isinstance(t, Tensor)]
    places = [i for i in all_places if results[i].requires_grad] or all_places
    left = torch.ops.nnscaler.leave_region([results[i] for i in places], number)
    for i, tensor in zip(places, left, strict=True):
        results[i] = tensor
    return tuple(results)


# The marks, which copy where nothing changes the graph, and what backward has of the last one: `restart_region`, which
# becomes `hold`.


@torch.library.custom_op("nnscaler::enter_region", mutates_args=())
def _enter(tensors: list[Tensor], _number: int, _place: str) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


@torch.library.custom_op("nnscaler::leave_region", mutates_args=())
def _leave(tensors: list[Tensor], _number: int) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


@torch.library.custom_op("nnscaler::restart_region", mutates_args=())
def _restart(_gradient: Tensor, _number: int) -> None:
    return None


@torch.library.custom_op("nnscaler::hold", mutates_args=())
def _hold(_gradient: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


@_enter.register_fake
@_leave.register_fake
def _(tensors: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


@_restart.register_fake
def _(_: Tensor, __: int) -> None:
    return None


@_hold.register_fake
def _(_: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _keep_number(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch names them
    ctx.number = inputs[1]


def _from_region(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, None]:
    torch.ops.nnscaler.restart_region(next(g for g in gradients if g is not None), ctx.number)
    return gradients, None


_enter.register_autograd(lambda _, gradients: (gradients, None, None))
_leave.register_autograd(_from_region, setup_context=_keep_number)
for _operator in (_restart, _hold):
    _operator.register_effect(EffectType.ORDERED)

_ENTER, _LEAVE = torch.ops.nnscaler.enter_region.default, torch.ops.nnscaler.leave_region.default
_KEPT = (
    "torch.compile ends its graph inside of a region that is to be recomputed, and the region keeps its activations;"
    " TORCH_LOGS=graph_breaks tells what ended it"
)


def recompute_regions(graph: Graph) -> int:
    """Take the marks of regions out of a graph of forward and backward, and let backward compute again what it reads of
    them. Return how many marks there were."""
    nodes = list(graph.nodes)
    marks = [n for n in nodes if n.target in (_ENTER, _LEAVE)]
    left = {n.args[1] for n in marks if n.target is _LEAVE}
    for place in sorted({str(n.args[2]) for n in marks if n.target is _ENTER and n.args[1] not in left}):
        warn(f"{place or 'a rank program'}: {_KEPT}", stacklevel=2)
    for position, restart in enumerate(nodes):
        if effect_of(restart) is torch.ops.nnscaler.restart_region.default:
            own = [i for i, n in enumerate(nodes) if n in marks and n.args[1] == restart.args[3]]
            backward = {n for n in nodes[position + 1 :] if n.op != "output"}  # of this region, and what comes later
            _compute_again(graph, restart, nodes[own[0] : own[-1]], backward)
    for mark in marks:
        _take_out(graph, mark)
    return len(marks)


def _compute_again(graph: Graph, restart: Node, nodes: Sequence[Node], backward: Collection[Node]) -> None:
    """Compute what `backward` reads of a region in the place of `restart`. `nodes`: the region, in order, with
    what marks its beginning."""
    entries = [mark for mark in nodes if mark.target is _ENTER]
    arguments = {user: _given(mark, user) for mark in entries for user in mark.users}
    wanted = {n for n in nodes if any(user in backward for user in n.users)}
    region = dict.fromkeys(nodes[: max((i + 1 for i, n in enumerate(nodes) if n in wanted), default=0)])
    wanted |= {n for n in region if effect_of(n) is not None}  # every call up to there, as where a region runs again
    for node in reversed(region):
        if node in wanted and node not in arguments:
            token = node.args[0] if effect_of(node) is not None else None
            wanted |= {n for n in node.all_input_nodes if n in region and n is not token}
    held = [n for n in arguments if n in wanted]
    if not held:  # parameters are all that it is made of: torch computes again what is worth it
        return
    after = result_of(restart, 0)
    assert after is not None, "effects hand their token on"
    token, _, gradient, *_ = restart.args
    assert callable(restart.target)
    with graph.inserting_before(restart):
        hold = (token, torch.ops.nnscaler.hold.default, gradient, [arguments[n] for n in held])
        copies = graph.call_function(restart.target, hold)
        copies.meta["val"] = (after.meta["val"], [n.meta["val"] for n in held])
        token, copied = taken(copies, 0), taken(copies, 1)
        made = {n: taken(copied, i) for i, n in enumerate(held)}
        for node in region:
            if node in wanted and node not in made:
                made[node] = graph.node_copy(node, lambda n: made.get(n, n))
                if effect_of(node) is not None:
                    made[node].args = (token, *made[node].args[1:])
                    token = taken(made[node], 0)
    for node in wanted:
        for user in [user for user in node.users if user in backward]:
            user.replace_input_with(node, made[node])
    after.replace_all_uses_with(token)
    for node in (*restart.users, restart):
        graph.erase_node(node)


def _take_out(graph: Graph, mark: Node) -> None:
    """Let the readers of what a mark hands on read what it is given: a copy of it, where it lies otherwise in memory,
    or an input would be a result."""
    for user in list(mark.users):
        source = _given(mark, user)
        alike = source.meta["val"].stride() == user.meta["val"].stride()
        if not alike or (_is_input(source) and any(n.op == "output" for n in user.users)):
            with graph.inserting_before(user):
                source = graph.call_function(torch.ops.aten.clone.default, (source,))
                source.meta.update(user.meta)
        user.replace_all_uses_with(source)
        graph.erase_node(user)
    graph.erase_node(mark)


def _given(mark: Node, user: Node) -> Node:
    """Return what a mark is given that a reader takes of what it hands on."""
    tensors: Any = mark.args[0]
    source: Node = tensors[user.args[1]]
    return source


def _is_input(node: Node) -> bool:
    """Return whether a tensor is an input of the graph, or a view of one."""
    while getattr(node.target, "is_view", False) or node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
