"""Change the graphs of forward and backward that torch.compile makes of stages, before it cuts them in two."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Graph, GraphModule, Node

Pass = Callable[[GraphModule, Any], GraphModule]
Change = Callable[[Graph], int]  # returns how often it changed something


def change_joint_graphs(changes: Iterable[Change]) -> None:
    """Change what this thread compiles from now on: graphs of other code are to stay as they are."""
    import torch._functorch.config as config  # it comes with the compiler, which takes seconds

    before: Pass | None = config.joint_custom_pass
    if getattr(before, "changes_stages", False):
        return

    def changed(module: GraphModule, inputs: Any) -> GraphModule:
        module = module if before is None else before(module, inputs)
        if sum([change(module.graph) for change in changes]):
            module.recompile()
        return module

    vars(changed)["changes_stages"] = True
    config.joint_custom_pass = changed


def effect_of(node: Node) -> object:
    """Return the operator that a node calls as an effect in an order; None: it calls none."""
    effects = node.op == "call_function" and getattr(node.target, "__name__", "") == "with_effects"
    return node.args[1] if effects else None


def result_of(node: Node, index: int) -> Node | None:
    """Return what reads a result of a node with several; 0 of an effect: the token after it."""
    found = (n for n in node.users if n.target is operator.getitem and n.args[1] == index)
    return next(found, None)


def taken(node: Node, index: int) -> Node:
    """Write down one more result of a node that has several. The graph is to be open where it comes."""
    result = node.graph.call_function(operator.getitem, (node, index))
    result.meta["val"] = node.meta["val"][index]
    return result
