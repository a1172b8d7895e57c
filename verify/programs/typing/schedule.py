"""Check every role's order of instructions: it is complete, and agrees with one total order over all roles.

The total order respects every message and every gradient that comes back. It is found by topological sorting (Kahn
1962), and is the certificate that nothing waits for ever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verify.programs.typing.roles.text import RoleText, StageText
from verify.programs.typing.typed_value import Mistake

_INSTRUCTION = re.compile(r"([FB])([0-9]{1,9})\.([0-9]{1,9})$")
Instruction = tuple[str, int, int]  # kind, stage, micro-batch


@dataclass(frozen=True, slots=True)
class Order:
    """`total`: all instructions of all roles, in an order in which they can run. `wrong`: per role."""

    total: tuple[Instruction, ...]
    wrong: tuple[tuple[RoleText, Mistake], ...]


def check_schedule(roles: Sequence[RoleText], stages: Mapping[int, StageText], trains: bool = True) -> Order:
    """Check the schedules of all roles. Raises nothing: mistakes are in the result.

    `trains`: the model has a loss, so that every forward has its backward; else there is none.
    """
    orders: list[list[Instruction]] = []
    wrong: list[tuple[RoleText, Mistake]] = []
    for role in roles:
        order, mistakes = _read(role, trains)
        orders.append(order)
        wrong += [(role, m) for m in mistakes]
    total, stuck = _run(orders, stages)
    if stuck:
        heads = [f"{roles[r].file} is at {_text(i)} and waits for {_text(w)}" for r, (i, w) in stuck.items()]
        role = roles[min(stuck)]
        mistake = Mistake("deadlock", "the schedule comes to a halt: " + "; ".join(heads), _cycle(stuck, orders))
        wrong.append((role, mistake))
    return Order(tuple(total), tuple(wrong))


def _read(role: RoleText, trains: bool) -> tuple[list[Instruction], list[Mistake]]:
    counts = {stage.index: stage.micro_batches for stage in role.stages}
    order: list[Instruction] = []
    mistakes: list[Mistake] = []
    for word in role.schedule:
        match = _INSTRUCTION.match(word)
        if match is None or int(match[3]) >= counts.get(int(match[2]), 0):
            mistakes.append(Mistake("deadlock", f"SCHEDULE of {role.file} has {word!r}, which this role cannot run"))
            continue
        instruction = (match[1], int(match[2]), int(match[3]))
        if match[1] == "B" and not trains:
            message = f"SCHEDULE of {role.file} runs {word}, and the model has no loss"
            mistakes.append(Mistake("gradient_reduced_wrongly", message, "there is nothing to start a backward from"))
            continue
        if instruction in order:
            cause = "its gradient would be added twice" if match[1] == "B" else None
            mistakes.append(Mistake("gradient_reduced_wrongly", f"SCHEDULE of {role.file} runs {word} twice", cause))
            continue
        order.append(instruction)
    for stage, micros in counts.items():
        for micro in range(min(micros, len(order) + 1)):  # so many words leave out one of these, if there are more
            forward, backward = ("F", stage, micro), ("B", stage, micro)
            if forward not in order:
                message = f"SCHEDULE of {role.file} never runs {_text(forward)}"
                cause = "micro-batches are left out of the step: a wrong count of micro-batches"
                mistakes.append(Mistake("not_covered", message, cause))
            elif not trains:
                continue
            elif backward not in order:
                message = f"SCHEDULE of {role.file} never runs {_text(backward)}"
                cause = "gradients are summed before the last micro-batch's backward: its part is missing"
                mistakes.append(Mistake("gradient_reduced_wrongly", message, cause))
            elif order.index(backward) < order.index(forward):
                message = f"SCHEDULE of {role.file} runs {_text(backward)} before its forward"
                mistakes.append(Mistake("deadlock", message))
    return order, mistakes


def _waits(instruction: Instruction, stages: Mapping[int, StageText]) -> list[Instruction]:
    """Return the instructions that must run before this one: those that its messages and gradients come from."""
    kind, index, micro = instruction
    stage = stages[index]
    if kind == "F":
        return [("F", r.stage, micro) for r in stage.receives if r.stage != index]
    return [("F", index, micro), *(("B", s.stage, micro) for s in stage.sends if s.needs_grad and s.stage != index)]


def _run(
    orders: Sequence[Sequence[Instruction]], stages: Mapping[int, StageText]
) -> tuple[list[Instruction], dict[int, tuple[Instruction, Instruction]]]:
    """Sort all instructions topologically (Kahn 1962), each role in its own order, with messages that arrive at once.

    Returns the total order, and for each role that halts, its instruction and the one that this waits for.
    """
    position = [0] * len(orders)
    done: set[Instruction] = set()
    total: list[Instruction] = []
    waits = {i: _waits(i, stages) for order in orders for i in order}
    moved = True
    while moved:
        moved = False
        for role, order in enumerate(orders):
            while position[role] < len(order) and all(w in done for w in waits[order[position[role]]]):
                done.add(order[position[role]])
                total.append(order[position[role]])
                position[role] += 1
                moved = True
    stuck: dict[int, tuple[Instruction, Instruction]] = {}
    for role, order in enumerate(orders):
        if position[role] < len(order):
            head = order[position[role]]
            stuck[role] = (head, next(w for w in waits[head] if w not in done))
    return total, stuck


def _cycle(stuck: Mapping[int, tuple[Instruction, Instruction]], orders: Sequence[Sequence[Instruction]]) -> str:
    awaited = {w for _, w in stuck.values()}
    if not any(w in order for w in awaited for order in orders):
        return "what is waited for is in no schedule: a missing send, or a backward that never runs"
    return "each waits for what comes later in another's order: a mismatched order of sends and receives"


def _text(instruction: Instruction) -> str:
    kind, stage, micro = instruction
    return f"{kind}{stage}.{micro}"
