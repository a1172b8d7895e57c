"""Shard parameters at rest over an axis whose ranks all read them: ZeRO, fully sharded data parallel.

Such a parameter's layout at rest has one more `Sharded`. Under ZeRO-3 that of its leaf has it too: to be read it is
converted like any tensor, gathered forward, its gradient reduced and scattered backward. Under ZeRO-1 and 2 the leaf is
whole on that axis, and the runtime makes the same conversion once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from op_registry.annotation.splits import balanced

from nnscaler.errors import NnscalerError
from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_placement import Rest
from nnscaler.layout import Layout, Sharded
from nnscaler.transform.plan import Plan, RestStep


def resting(graph: Graph, plan: Plan) -> dict[str, dict[str, Rest]]:
    """parameter (tensor name) -> the axes over which it rests sharded, as far as its sizes allow, and how on each.

    Raises NnscalerError("plan_illegal") for a pattern that names no parameter.
    """
    found: dict[str, dict[str, Rest]] = {}
    for step in plan.steps:
        if isinstance(step, RestStep):
            for name in select_parameters(graph, step.parameters):
                found.setdefault(name, {})[step.axis] = Rest(step.zero, step.owned)
    return found


def assign_owners(weights: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the rank that each parameter rests on, whole: the next largest goes to the rank with the least (Graham's
    LPT rule).

    `weights`: of each parameter, its number of elements or what its update costs. The same mapping gives the same
    owners, whatever its order; two ranks differ by at most the largest weight.
    """
    loads = [0] * ranks
    owners: dict[str, int] = {}
    for name in sorted(weights, key=lambda n: (-weights[n], n)):
        rank = loads.index(min(loads))
        owners[name] = rank
        loads[rank] += weights[name]
    return {name: owners[name] for name in weights}


def on_owner(layout: Layout, axis: int, sizes: Sequence[int], shape: Sequence[int], owner: int) -> Layout:
    """`layout` with the tensor whole on the `owner`-th rank of `axis`, and nothing of it on the others. As it is where
    other axes cut every dim, or there is none."""
    cut = {state.dim for state in layout if isinstance(state, Sharded)}
    dim = next((d for d in range(len(shape)) if d not in cut and shape[d]), None)
    if dim is None or sizes[axis] == 1:
        return layout
    parts = tuple(shape[dim] if index == owner else 0 for index in range(sizes[axis]))
    return (*layout[:axis], Sharded(dim, sizes=parts), *layout[axis + 1 :])


def select_parameters(graph: Graph, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the tensor names of the parameters that any of the patterns names: a parameter, a module that has it, a
    glob."""
    parameters = graph.with_role("parameter")
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [
            t.name
            for t in parameters
            if any(n == pattern or fnmatchcase(n, p) for n in t.fqns for p in (pattern, f"{pattern}.*"))
        ]
        if not found:
            names = [n for t in parameters for n in t.fqns]
            close = get_close_matches(pattern.rstrip(".*"), names, n=4, cutoff=0.4) or names[:4]
            raise NnscalerError(
                "plan_illegal",
                f"a rest step names {pattern!r}, which is no parameter and no module with parameters",
                help=f"parameters of this model: {', '.join(close)}",
            )
        chosen.update(dict.fromkeys(found))
    return tuple(t.name for t in parameters if t.name in chosen)


def sharded_at_rest(layout: Layout, axis: int, sizes: Sequence[int], shape: Sequence[int]) -> Layout:
    """`layout` with the tensor sharded over `axis` too: along the first dim that divides and that no other axis cuts,
    else inside of one that another axis cuts, else into sizes that differ by one. As it is where no dim will do."""
    cut: Mapping[int, list[tuple[Sharded, int]]] = {dim: [] for dim in range(len(shape))}
    for state, parts in zip(layout, sizes, strict=True):
        if isinstance(state, Sharded):
            cut[state.dim].append((state, parts))
    plain = [Sharded(dim) for dim in cut if not cut[dim]]
    nested = [Sharded(dim, outer=max(s.outer * parts for s, parts in own)) for dim, own in cut.items() if own]
    uneven = [replace(state, sizes=balanced(shape[state.dim], sizes[axis])) for state in plain]
    for state in (*plain, *nested, *(state for state in uneven if state.sizes)):
        made = (*layout[:axis], state, *layout[axis + 1 :])
        if explain_illegal(made, sizes, shape) is None:
            return made
    return layout
