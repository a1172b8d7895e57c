"""Wrong order in time, wrong messages between stages, and wrong updates and versions in a stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from nnscaler.instructions import Instruction, batches_written, going_on, read_instruction, total_order
from nnscaler.scheduling.dependencies import chain, dependencies
from nnscaler.scheduling.schedule import Schedule, parse_order
from verify.self_test.programs.mutants.editable_program_and_edits import (
    Find,
    RightProgram,
    Role,
    each_of,
    micro_of,
    operators,
)
from verify.self_test.programs.mutants.mutant import Edit, Edits


def _several(subject: RightProgram) -> bool:
    return subject.program.plan.micro_batches > 1


def _last_backward(subject: RightProgram) -> Iterator[Edits]:
    """The last micro-batch gets no backward, on no stage."""
    last = subject.program.plan.micro_batches - 1
    if _several(subject):
        yield tuple(r.reordered([i for i in r.order if i[0] == "F" or micro_of(i) != last]) for r in subject.roles)


def _one_backward(subject: RightProgram) -> Iterator[Edit]:
    """One stage leaves a backward out."""
    for role in subject.roles:
        for instruction in role.order:
            if instruction[0] in "BI":
                yield role.reordered([i for i in role.order if i[0] == "F" or i[1:] != instruction[1:]])


def _one_forward(subject: RightProgram) -> Iterator[Edit]:
    for role in subject.roles:
        if _several(subject):
            yield role.reordered([i for i in role.order if i[1:] != role.order[-1][1:]])


def _twice(subject: RightProgram) -> Iterator[Edit]:
    for role in subject.roles:
        for instruction in role.order:
            at = role.order.index(instruction)
            yield role.reordered([*role.order[: at + 1], instruction, *role.order[at + 1 :]])


def _backward_first(subject: RightProgram) -> Iterator[Edit]:
    for role in subject.roles:
        for instruction in role.order:
            if instruction[0] in "BIW":
                at = role.order.index(f"F{instruction[1:]}")
                rest = [i for i in role.order if i != instruction]
                yield role.reordered([*rest[:at], instruction, *rest[at:]])


def _deadlock(subject: RightProgram) -> Iterator[Edits]:
    """An order of one stage in which stages wait for each other. Orders that merely differ are right."""
    if len(subject.roles) < 2 or not _several(subject):
        return
    for role in subject.roles:
        yield from _hanging(subject, role, role.order)


def _hanging(subject: RightProgram, role: Role, right: Sequence[str]) -> Iterator[Edits]:
    """Move one instruction of an order to where it deadlocks, and leaves each pass after what it needs on its stage."""
    for at, moved in enumerate(right):
        for to in range(len(right)):
            rest = [i for i in right if i != moved]
            order = [*rest[:to], moved, *rest[to:]]
            if to != at and _legal(order) and _hangs(subject, role, order):
                yield (role.reordered(order),)


def _legal(order: Sequence[str]) -> bool:
    at = {instruction: position for position, instruction in enumerate(order)}
    needs = {"B": "F", "I": "F", "W": "I"}
    return all(at[f"{needs[i[0]]}{i[1:]}"] < at[i] for i in order if i[0] in needs)


def _hangs(subject: RightProgram, changed: Role, order: Sequence[str]) -> bool:
    """Return whether these orders deadlock: stage s waits for activations of s - 1, and for gradients of s + 1."""
    plan = subject.program.plan
    words = (order if r.file == changed.file else r.order for r in subject.roles)
    made = Schedule("", plan.places, plan.micro_batches, tuple(parse_order(" ".join(own)) for own in words))
    return bool(total_order(made.orders, dependencies(made, chain(made.stages)).__getitem__).stuck)


# Backwards in two halves. The right program may have none: then those of one role are divided first, which is right.


def _in_halves(subject: RightProgram, role: Role) -> list[str]:
    """Return the order with every backward in two halves, one right after the other, where that is right: slices run a
    whole one, and so do stages of which other roles have the order too."""
    plan = subject.program.plan
    own = {stage for stage, devices in enumerate(plan.places) if len(devices) == 1 and not plan.slices}
    return [half for i in parse_order(" ".join(role.order)) for half in _halves_of(i, own)]


def _halves_of(instruction: Instruction, stages: Collection[int]) -> tuple[str, ...]:
    if instruction.kind == "B" and instruction.stage in stages:
        return str(instruction.of("I")), str(instruction.of("W"))
    return (str(instruction),)


def _at_each(kind: str, change: Callable[[list[str], int], list[str] | None]) -> Find:
    """Return the orders that `change` makes at the place of each instruction of a kind; None where it makes none.

    Of a W, it is given the order in halves.
    """

    def find(subject: RightProgram) -> Iterator[Edit]:
        for role in subject.roles:
            order = _with_kind(subject, role, kind)
            for at, instruction in enumerate(order):
                changed = change(list(order), at) if instruction[0] == kind else None
                if changed is not None:
                    yield role.reordered(changed)

    return find


def _with_kind(subject: RightProgram, role: Role, kind: str) -> list[str]:
    return _in_halves(subject, role) if kind == "W" else list(role.order)


def _on_another_stage(kind: str) -> Find:
    """Second halves (W), or updates (U), by the ranks of another stage, which have nothing of them."""

    def find(subject: RightProgram) -> Iterator[Edits]:
        for role in subject.roles:
            order = _with_kind(subject, role, kind)
            for other in subject.roles:
                for moved in (i for i in order if i[0] == kind and other is not role):
                    rest = [i for i in order if i != moved]
                    yield role.reordered(rest), other.reordered([*other.order, moved])

    return find


def _moved(order: list[str], at: int, before: str) -> list[str]:
    """Return the order with the instruction at a place before another one."""
    instruction = order.pop(at)
    order.insert(order.index(before), instruction)
    return order


def _with_whole(order: list[str], at: int) -> list[str]:
    """The first half is a whole backward."""
    order[order.index(f"I{order[at][1:]}")] = f"B{order[at][1:]}"
    return order


def _other_micro_batch(order: list[str], at: int) -> list[str] | None:
    """The second half of one micro-batch is that of another: its own is missing, and the other one's there twice."""
    other = next((i for i in order if i[0] == "W" and i != order[at]), None)
    return None if other is None else [*order[:at], other, *order[at + 1 :]]


def _after_the_last(subject: RightProgram) -> Iterator[Edits]:
    """The step ends before the second halves of the last micro-batch, on all stages: gradients are summed too early."""
    last = subject.program.plan.micro_batches - 1
    yield tuple(
        role.reordered([i for i in _in_halves(subject, role) if i[0] != "W" or micro_of(i) != last])
        for role in subject.roles
    )


def _halves_that_hang(subject: RightProgram) -> Iterator[Edits]:
    """An order in halves in which stages wait for each other."""
    if len(subject.roles) > 1 and _several(subject):
        for role in subject.roles:
            order = _in_halves(subject, role)
            yield from _hanging(subject, role, order) if any(i[0] == "W" for i in order) else ()


def _peers(subject: RightProgram) -> Iterator[Edits]:
    """Both sides of a message agree on the wrong partner."""
    entries = [*subject.entries("sends"), *subject.entries("receives")]
    for key in dict.fromkeys(e.arguments[0] for e in entries):
        ends = [e for e in entries if e.arguments[0] == key and e.keyword("peers")]
        cut = [subject.layout(e.stage, e.name) for e in ends if (e.stage, e.name) in subject.variables]
        if not any(f"{axis}: Sharded" in layout for layout in cut for axis in subject.axes[ends[0].stage]):
            continue  # the ranks of a stage hold equal copies: any partner will do
        turned: dict[str, Edit] = {}
        for entry in ends:
            ranks = re.findall(r"\d+", entry.keyword("peers"))
            if len(ranks) > 1:
                wrong = _turned(ranks) if entry.section == "sends" else [ranks[-1], *ranks[:-1]]
                turned[entry.file] = entry.swapped(f"peers={entry.keyword('peers')}", f"peers=({', '.join(wrong)})")
        if len(turned) == len(ends) > 1:
            yield tuple(turned.values())


def _turned(ranks: Sequence[str]) -> list[str]:
    return [*ranks[1:], ranks[0]]


def _one_peer(subject: RightProgram) -> Iterator[Edit]:
    """One side only sends to, or expects from, the wrong rank."""
    for entry in subject.entries("sends", "receives"):
        ranks = re.findall(r"\d+", entry.keyword("peers"))
        if len(ranks) > 1:
            yield entry.swapped(f"peers={entry.keyword('peers')}", f"peers=({', '.join(_turned(ranks))})")


def _gradient_not_sent(subject: RightProgram) -> Iterator[Edits]:
    """A message whose gradient never comes back: on both sides, or on one."""
    entries = [e for e in (*subject.entries("sends"), *subject.entries("receives")) if "needs_grad=False" not in e.text]
    for key in dict.fromkeys(e.arguments[0] for e in entries):
        edits = tuple(e.with_more("needs_grad=False") for e in entries if e.arguments[0] == key)
        yield edits
        yield edits[:1]


def _gradient_awaited(subject: RightProgram) -> Iterator[Edit]:
    """One side of a message has a gradient where the other one has none."""
    for entry in subject.entries("sends", "receives"):
        if "needs_grad=False" in entry.text and subject.runs_backward(entry.stage):
            yield entry.swapped(", needs_grad=False", "")


def _stale(subject: RightProgram) -> Iterator[Edit]:
    """What a stage sends on is what it received: layers that run several times start from the result of another run."""
    received = {(e.stage, e.name) for e in subject.entries("receives")}
    for entry in subject.entries("sends"):
        role = next(r for r in subject.roles if r.file == entry.file)
        key = entry.arguments[0]
        for number, line in enumerate(role.lines, 1):
            found = re.search(rf"\breturn .*{re.escape(key)}: (\w+)", line)
            made = subject.tensor(entry.stage, found[1]) if found else None
            for stage, name in sorted(received):
                other = subject.tensor(stage, name)
                if found is None or made is None or other is None or stage != entry.stage or other.name == made.name:
                    continue
                if (other.shape, other.dtype) == (made.shape, made.dtype):
                    yield Edit(role.file, number, line, line.replace(f"{key}: {found[1]}", f"{key}: {name}"))


def _message_shape(subject: RightProgram) -> Iterator[Edit]:
    for entry in subject.entries("receives"):
        shape = entry.arguments[2] if len(entry.arguments) > 2 else ""
        sizes = re.findall(r"\d+", shape)
        if len(sizes) > 1 and entry.text.lstrip().startswith('"') and "Receive(" in entry.text:
            yield entry.swapped(shape, f"({', '.join([str(int(sizes[0]) + 1), *sizes[1:]])})")


ORDERS: Mapping[str, Find] = {
    "last backward dropped": _last_backward,
    "a backward dropped on one stage": _one_backward,
    "last micro-batch dropped on one stage": _one_forward,
    "an instruction twice": _twice,
    "backward before forward": _backward_first,
    "order that hangs": _deadlock,
    "second half dropped": _at_each("W", lambda order, at: order[:at] + order[at + 1 :]),
    "first half dropped": _at_each("W", lambda order, at: [i for i in order if i != f"I{order[at][1:]}"]),
    "second half before the first": _at_each("W", lambda order, at: _moved(order, at, f"I{order[at][1:]}")),
    "second half before its forward": _at_each("W", lambda order, at: _moved(order, at, f"F{order[at][1:]}")),
    "second half twice": _at_each("W", lambda order, at: [*order, order[at]]),
    "first half twice": _at_each("W", lambda order, at: [*order[:at], f"I{order[at][1:]}", *order[at:]]),
    "whole backward and second half": _at_each("W", _with_whole),
    "first half and whole backward": _at_each(
        "W", lambda order, at: [*order[:at], f"B{order[at][1:]}", *order[at + 1 :]]
    ),
    "second half of another micro-batch": _at_each("W", _other_micro_batch),
    "second half on another stage": _on_another_stage("W"),
    "gradients used before the last second half": _after_the_last,
    "halves in an order that hangs": _halves_that_hang,
    "messages to the wrong rank": _peers,
    "one side names the wrong rank": _one_peer,
    "missing send": each_of(lambda s: s.entries("sends"), lambda _, e: [Edit(e.file, e.line, e.text, "")]),
    "gradient not sent back": _gradient_not_sent,
    "gradient where there is none": _gradient_awaited,
    "sent on as it was received": _stale,
    "wrong shape of a message": _message_shape,
}


# Streams: programs without updates in their order have no place for these.


def _put(order: list[str], at: int, to: int) -> list[str]:
    """Return the order with the instruction at a place put to another one of those that are left."""
    moved = order.pop(at)
    return [*order[:to], moved, *order[to:]]


def _before_its_backward(order: list[str], at: int) -> list[str]:
    return _put(order, at, min(n for n, i in enumerate(order) if i[1:] == order[at][1:] and i[0] in "BIW"))


def _after_the_next_forward(order: list[str], at: int) -> list[str] | None:
    """The forward that should read the new version reads the one before it."""
    later = next((n for n in range(at + 1, len(order)) if order[n][0] == "F"), None)
    return None if later is None else _put(order, at, later)


def _forward_waits(order: list[str], at: int) -> list[str] | None:
    """A forward that should read an older version waits for this update."""
    earlier = next((n for n in reversed(range(at)) if order[n][0] == "F" and order[n][1:] != order[at][1:]), None)
    return None if earlier is None else _put(order, earlier, at)


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


STREAMS: Mapping[str, Find] = {
    "update dropped": _at_each("U", lambda order, at: order[:at] + order[at + 1 :]),
    "last update dropped": _never_the_last,
    "update twice": _at_each("U", lambda order, at: [*order[:at], order[at], *order[at:]]),
    "update once more at the end": _at_each("U", lambda order, at: [*order, order[at]]),
    "update before its backward": _at_each("U", _before_its_backward),
    "update after the next forward": _at_each("U", _after_the_next_forward),
    "forward after the next update": _at_each("U", _forward_waits),
    "updates exchanged": _at_each("U", _exchanged),
    "updates at the end": _at_the_end,
    "update on another stage": _on_another_stage("U"),
    "order written for a batch more": _written_for_more,
    "no older version kept": _declared("versions", lambda n: 1 if n > 1 else None),
    "one version too few kept": _declared("versions", lambda n: n - 1 if n > 2 else None),
    "less staleness declared": _declared("staleness", lambda n: n - 1 if n else None),
    "more staleness declared": _declared("staleness", lambda n: n + 1),
    "stage without versions": _undeclared,
    "gradient not summed before the update": _not_reduced,
}
OPERATORS = operators("schedule", {**ORDERS, **STREAMS})
