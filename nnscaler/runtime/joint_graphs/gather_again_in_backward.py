"""Gather parameters once more in the backward of a compiled stage, where it reads them (ZeRO-3).

A graph of torch.compile holds forward and backward until it is cut in two, and what both read is kept in between: of
parameters that rest in shards, the whole model. So before the cut each read of backward gets a gather of its own, right
before the first reader, as autograd does without a graph (`sharded_parameter_gathers`). It takes its place among the
effects of backward: every rank begins the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch.fx import Graph, Node

from nnscaler.runtime.joint_graphs.change_before_partition import effect_of, result_of, taken

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def gather_again(graph: Graph) -> int:
    """Let backward gather what it reads, in a graph of forward and backward, where the gathers say so. Return how many
    it got. What has one dim is not worth a call."""
    token = next((n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("tangents_token")), None)
    backward = _reached_from(filter(_is_gradient, graph.nodes))
    gather = torch.ops.nnscaler.gather_parameter.default
    effects = [n for n in graph.nodes if n not in backward and effect_of(n) is gather and n.args[-1]]
    if token is None or not effects:  # backward has no effects, or the graph is of other code
        return 0
    _to_front(graph, token)
    wholes = {n: result_of(n, 1) for n in effects}
    origins = {
        view: (effect, whole)
        for effect, whole in wholes.items()
        if whole is not None and whole.meta["val"].dim() > 1
        for view in _views(whole, backward)
    }
    made: dict[Node, Node] = {}  # what backward reads instead
    last = token  # of forward and backward as they were
    gathered = 0
    for node in [n for n in graph.nodes if n in backward]:
        for read in [n for n in node.all_input_nodes if n in origins]:
            effect, whole = origins[read]
            if whole not in made:
                with graph.inserting_before(node):
                    token, made[whole] = _again(graph, effect, token)
                gathered += 1
            with graph.inserting_before(node):
                node.replace_input_with(read, _again_view(graph, read, made))
        if effect_of(node) is not None:
            node.args = (token, *node.args[1:])
            after = result_of(node, 0)
            assert after is not None, "effects hand their token on"
            token = last = after
    if token is not last:  # something is gathered behind the last effect
        next(n for n in graph.nodes if n.op == "output").replace_input_with(last, token)
    return gathered


def _again(graph: Graph, effect: Node, token: Node) -> tuple[Node, Node]:
    """Return the token after one more gather, and what it gathers. `effect`: the gather of forward."""
    assert callable(effect.target)
    made = graph.call_function(effect.target, (token, *effect.args[1:]), dict(effect.kwargs))
    made.meta.update({key: effect.meta[key] for key in ("val", "tensor_meta") if key in effect.meta})
    return taken(made, 0), taken(made, 1)


def _again_view(graph: Graph, view: Node, made: dict[Node, Node]) -> Node:
    """Return a view of what is gathered again, as forward has it of what it gathered."""
    if view not in made:
        copy = graph.node_copy(view, lambda n: _again_view(graph, n, made) if n is view.args[0] else n)
        made[view] = copy
    return made[view]


def _views(whole: Node, backward: Collection[Node]) -> Iterator[Node]:
    """Yield what forward gathered, its views of that, and its copies in another dtype."""
    yield whole
    for user in whole.users:
        shown = getattr(user.target, "is_view", False) or user.target in _COPIES
        if shown and user not in backward and user.all_input_nodes == [whole]:
            yield from _views(user, backward)


def _to_front(graph: Graph, token: Node) -> None:
    """Move the token of backward to the other inputs: it was met where backward has its first effect."""
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n is not token]
    inputs[-1].append(token)


def _is_gradient(node: Node) -> bool:
    """Return whether a node is an input of backward alone: a gradient, or the token before its first effect."""
    return node.op == "placeholder" and node.name.startswith("tangents")


def _reached_from(nodes: Iterable[Node]) -> Mapping[Node, None]:
    """Return the nodes, and all that read what they make; but not the output, which has results of forward too."""
    found = dict.fromkeys(nodes)
    waiting = list(found)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user.op != "output":
                found[user] = None
                waiting.append(user)
    return found
