"""Wrong updates and versions in a stream: programs without updates in their order have no place for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from nnscaler.instructions import batches_written, going_on, read_instruction
from verify.self_test.programs.mutants.editable_program import Find, RightProgram, operators
from verify.self_test.programs.mutants.mutant import Edit, Edits

Change = Callable[[list[str], int], list[str] | None]


def _at_updates(change: Change) -> Find:
    """Return the orders that `change` makes at the place of each update; None where it makes none."""

    def find(subject: RightProgram) -> Iterator[Edit]:
        for role in subject.roles:
            for at, instruction in enumerate(role.order):
                changed = change(list(role.order), at) if instruction[0] == "U" else None
                if changed is not None:
                    yield role.reordered(changed)

    return find


def _moved(order: list[str], at: int, to: int) -> list[str]:
    """Return the order with the instruction at a place put to another one of those that are left."""
    moved = order.pop(at)
    return [*order[:to], moved, *order[to:]]


def _before_its_backward(order: list[str], at: int) -> list[str]:
    return _moved(order, at, min(n for n, i in enumerate(order) if i[1:] == order[at][1:] and i[0] in "BIW"))


def _after_the_next_forward(order: list[str], at: int) -> list[str] | None:
    """The forward that should read the new version reads the one before it."""
    later = next((n for n in range(at + 1, len(order)) if order[n][0] == "F"), None)
    return None if later is None else _moved(order, at, later)


def _forward_waits(order: list[str], at: int) -> list[str] | None:
    """A forward that should read an older version waits for this update."""
    earlier = next((n for n in reversed(range(at)) if order[n][0] == "F" and order[n][1:] != order[at][1:]), None)
    return None if earlier is None else _moved(order, earlier, at)


def _exchanged(order: list[str], at: int) -> list[str] | None:
    """Two updates, each with the gradient of the other's batch."""
    other = next((n for n in range(at + 1, len(order)) if order[n][0] == "U"), None)
    if other is not None:
        order[at], order[other] = order[other], order[at]
    return None if other is None else order


def _at_the_end(subject: RightProgram) -> Iterator[Edits]:
    """All updates come when the last batch is through, on every stage."""
    edits = tuple(
        r.reordered([*(i for i in r.order if i[0] != "U"), *(i for i in r.order if i[0] == "U")]) for r in subject.roles
    )
    if _is_stream(subject):
        yield edits


def _never_the_last(subject: RightProgram) -> Iterator[Edits]:
    """The gradient of the last batch is applied on no stage."""
    if _is_stream(subject):
        last = max((i for r in subject.roles for i in r.order if i[0] == "U"), key=lambda i: int(i.split(".")[1]))
        tail = "." + last.split(".")[1]
        yield tuple(r.reordered([i for i in r.order if i[0] != "U" or not i.endswith(tail)]) for r in subject.roles)


def _written_for_more(subject: RightProgram) -> Iterator[Edit]:
    """The order of one device is written for a batch more than those of the others."""
    for role in subject.roles if _is_stream(subject) else ():
        order = [read for read in map(read_instruction, role.order) if read is not None]
        longer = range(batches_written(role.order) + 1)
        yield role.reordered([str(i) for i in going_on(order, longer.__contains__)])


def _on_another_stage(subject: RightProgram) -> Iterator[Edits]:
    """An update is made by the ranks of another stage, which have no gradient of it."""
    for role in subject.roles:
        for other in subject.roles:
            for update in (i for i in role.order if i[0] == "U" and other is not role):
                rest = [i for i in role.order if i != update]
                yield role.reordered(rest), other.reordered([*other.order, update])


def _declared(name: str, change: Callable[[int], int | None]) -> Find:
    """Return the texts in which a stage declares another number."""

    def find(subject: RightProgram) -> Iterator[Edit]:
        for role in subject.roles:
            for number, line in enumerate(role.lines, 1):
                found = re.fullmatch(rf"    {name} = ([0-9]+)", line)
                other = change(int(found[1])) if found else None
                if other is not None:
                    yield Edit(role.file, number, line, f"    {name} = {other}")

    return find


def _undeclared(subject: RightProgram) -> Iterator[Edits]:
    """One stage of a stream is that of a step."""
    for role in subject.roles:
        declared = [(n, line) for n, line in enumerate(role.lines, 1) if re.match("    (staleness|versions) = ", line)]
        yield tuple(Edit(role.file, number, line, "") for number, line in declared)


def _not_reduced(subject: RightProgram) -> Iterator[Edit]:
    """An update with a gradient that was not summed over the data parts."""
    for entry in subject.entries("parameters"):
        if entry.keyword("reduce") and _is_stream(subject):
            yield entry.swapped(f", reduce={entry.keyword('reduce')}", "")


def _is_stream(subject: RightProgram) -> bool:
    return any(i[0] == "U" for role in subject.roles for i in role.order)


OPERATORS = operators(
    "schedule",
    {
        "update dropped": _at_updates(lambda order, at: order[:at] + order[at + 1 :]),
        "last update dropped": _never_the_last,
        "update twice": _at_updates(lambda order, at: [*order[:at], order[at], *order[at:]]),
        "update once more at the end": _at_updates(lambda order, at: [*order, order[at]]),
        "update before its backward": _at_updates(_before_its_backward),
        "update after the next forward": _at_updates(_after_the_next_forward),
        "forward after the next update": _at_updates(_forward_waits),
        "updates exchanged": _at_updates(_exchanged),
        "updates at the end": _at_the_end,
        "update on another stage": _on_another_stage,
        "order written for a batch more": _written_for_more,
        "no older version kept": _declared("versions", lambda n: 1 if n > 1 else None),
        "one version too few kept": _declared("versions", lambda n: n - 1 if n > 2 else None),
        "less staleness declared": _declared("staleness", lambda n: n - 1 if n else None),
        "more staleness declared": _declared("staleness", lambda n: n + 1),
        "stage without versions": _undeclared,
        "gradient not summed before the update": _not_reduced,
    },
)
