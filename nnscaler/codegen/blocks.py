"""Runs of statements that share a region of the model (no_grad, autocast) or a recompute group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnscaler.communication.communicated import Compute, Statement, reads, writes
from nnscaler.communication.recomputed import group_of
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Region


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive statements of one region or recomputed group.

    statements   in order
    header       the `with` line around them, "" for none
    recompute    the name of the function that they become; None outside of recomputation
    reads        arguments of that function
    writes       results of that function
    """

    statements: tuple[Statement, ...]
    header: str = ""
    recompute: str | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def blocks(graph: Graph, statements: Sequence[Statement], after: frozenset[str], stored: frozenset[str]) -> list[Block]:
    """Consecutive statements of one region or group. Conversions stand outside of regions: what they make may be
    read where gradients are recorded. `after`: variables read later; `stored`: attributes, which are no variables."""
    runs: list[tuple[tuple[str, str | None], list[Statement]]] = []
    for i, statement in enumerate(statements):
        key = _key(graph, statements, i)
        if runs and runs[-1][0] == key:
            runs[-1][1].append(statement)
        else:
            runs.append((key, [statement]))
    result: list[Block] = []
    names: dict[str, int] = {}
    for position, ((header, group), run) in enumerate(runs):
        if group is None:
            result.append(Block(tuple(run), header))
            continue
        later = {v.variable for _, rest in runs[position + 1 :] for s in rest for v in reads(s)} | after
        made = [v.variable for s in run for v in writes(s)]
        local = {v.variable for s in run for v in reads(s)} - set(made)
        names[group] = names.get(group, 0) + 1
        name = group if names[group] == 1 else f"{group}_{names[group]}"
        result.append(Block(tuple(run), "", name, tuple(sorted(local - stored)), tuple(n for n in made if n in later)))
    return result


def _key(graph: Graph, statements: Sequence[Statement], position: int) -> tuple[str, str | None]:
    statement, group = statements[position], group_of(graph, statements, position)
    return (header(statement.operation.region) if isinstance(statement, Compute) and not group else "", group)


def header(region: Region) -> str:
    """Return the `with` line of a region."""
    parts: list[str] = []
    if not region.grad_enabled:
        parts.append("torch.no_grad()")
    if region.autocast == "off":
        parts.append("torch.autocast(self.device.type, enabled=False)")
    elif region.autocast:
        parts.append(f"torch.autocast(self.device.type, dtypes.{region.autocast})")
    return f"with {', '.join(parts)}:" if parts else ""
