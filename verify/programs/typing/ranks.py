"""Check the ranks and axes: every rank has one role, and every stage's mesh has as many ranks as its axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from nnscaler.ir.mesh import MICRO
from verify.programs.typing.lines.walk import Noted
from verify.programs.typing.roles.text import RoleText, StageText
from verify.programs.typing.typed_value import Mistake


def check_ranks(roles: Sequence[RoleText]) -> tuple[int, list[Noted]]:
    """Check the ranks and axes of all roles; return the number of ranks, and the mistakes."""
    noted: list[Noted] = []
    every = [rank for role in roles for rank in role.ranks]
    place = roles[0].stages[0] if roles[0].stages else None
    twice = [rank for rank, times in Counter(every).items() if times > 1]
    if place is not None and (twice or sorted(every) != list(range(len(every)))):
        message = f"ranks {twice} have several roles" if twice else f"the roles run on the ranks {sorted(every)}"
        noted.append(Noted(place, place.number, Mistake("communication_mismatch", message)))
    seen: set[int] = set()
    counts = {stage.micro_batches for role in roles for stage in role.stages}
    for role in roles:
        for stage in role.stages:
            message = ""
            if stage.ranks != role.ranks:
                message = f"stage {stage.index} runs on the ranks {stage.ranks}, and its role on {role.ranks}"
            elif prod(stage.axes.values()) != len(stage.ranks) or MICRO in stage.axes:
                message = f"stage {stage.index} has {len(stage.ranks)} ranks and the axes {dict(stage.axes)}"
            elif stage.index in seen:
                message = f"stage {stage.index} occurs twice"
            elif len(counts) > 1:
                message = f"stages have {sorted(counts)} micro-batches: a wrong count of micro-batches"
            seen.add(stage.index)
            if message:
                noted.append(Noted(stage, stage.number, Mistake("communication_mismatch", message)))
    return len(every), noted


def orders_of_axes(stages: Mapping[int, StageText]) -> str:
    """Explain how two stages whose meshes have the same axes order them differently; empty where none do."""
    first: dict[frozenset[str], StageText] = {}
    for stage in stages.values():
        other = first.setdefault(frozenset(stage.axes), stage)
        if list(other.axes) != list(stage.axes):
            orders = f"({', '.join(other.axes)}) and ({', '.join(stage.axes)})"
            return (
                f"stages {other.index} and {stage.index} name the axes of their meshes in different orders, {orders}: "
                "between them a rank keeps its place and not its coordinates, so that what one axis cuts arrives cut "
                "over another"
            )
    return ""


def with_order(noted: Sequence[Noted], stages: Mapping[int, StageText]) -> list[Noted]:
    """Return the mistakes, with the order of axes as the cause of those that it may have."""
    orders = orders_of_axes(stages)
    return [
        replace(n, mistake=Mistake(n.mistake.code, n.mistake.message, orders, n.mistake.tensor))
        if orders and n.mistake.code in ("layouts_disagree", "gradient_reduced_wrongly")
        else n
        for n in noted
    ]
