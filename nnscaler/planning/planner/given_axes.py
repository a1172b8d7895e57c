"""The axes of a configuration on which nothing is searched: those of the batch, of experts, and of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nnscaler.ir.graph import Graph
from nnscaler.ir.placement import Choice
from nnscaler.ir.signature import Signature
from nnscaler.planning.context_parallel import context_parallel
from nnscaler.planning.cost.model import AxisPlace
from nnscaler.planning.experts import expert_steps
from nnscaler.planning.sharding.problem_config import Setting, make_setting
from nnscaler.transform.plan import CP, DP, EP, Axes, Plan, Step


def given_axes(
    graph: Graph,
    signatures: Mapping[str, Signature],
    parts: int,
    ep: int,
    cp: int,
    places: Mapping[str, AxisPlace],
) -> Setting:
    """Return the setting in which the batch is cut into `parts`, `ep` of them divide the experts, and `cp` ranks each
    sequence, on the last axis."""
    mesh: Axes = ((DP, parts),) if parts > 1 else ()
    steps: tuple[Step, ...] = ()
    if ep > 1:
        mesh = ((DP, parts // ep), (EP, ep))
        steps = expert_steps(graph, signatures, Plan(mesh, data_axes=(DP, EP)), mesh, ep)
    made = make_setting(graph, signatures, mesh, (), 1, places, steps)
    return made if cp == 1 else _with_tokens(graph, signatures, made, cp)


def _with_tokens(graph: Graph, signatures: Mapping[str, Signature], setting: Setting, cp: int) -> Setting:
    choices, _ = context_parallel(graph, signatures, CP, cp, setting.made, setting.axes)
    same: dict[tuple[Choice, ...], tuple[Choice, ...]] = {}
    joined = {name: (*before[:-1], choices[name], before[-1]) for name, before in setting.made.items()}
    shared = {name: same.setdefault(made, made) for name, made in joined.items()}
    return replace(setting, given=(*setting.given, (CP, cp)), made=shared)
