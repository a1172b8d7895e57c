"""Which ranks run what: every rank has one role, and every stage's mesh has as many ranks as its axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from nnscaler.ir.mesh import MICRO
from verify.static.held import Mistake
from verify.static.text import RoleText
from verify.static.walk import Noted


def check_ranks(roles: Sequence[RoleText]) -> tuple[int, list[Noted]]:
    """How many ranks there are, and what is wrong."""
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
