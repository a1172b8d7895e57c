"""Wrong order in time and wrong messages between stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from verify.self_test.programs.mutants.mutant import Edit, Edits
from verify.self_test.programs.mutants.mutation_operator import each_of, operators
from verify.self_test.programs.mutants.role_source import RightProgram, Role


def _several(subject: RightProgram) -> bool:
    return subject.program.plan.micro_batches > 1


def _last_backward(subject: RightProgram) -> Iterator[Edits]:
    """The last micro-batch gets no backward, on no stage."""
    last = subject.program.plan.micro_batches - 1
    if _several(subject):
        yield tuple(
            r.reordered([i for i in r.order if not (i[0] == "B" and i.endswith(f".{last}"))]) for r in subject.roles
        )


def _one_backward(subject: RightProgram) -> Iterator[Edit]:
    """One stage leaves a backward out."""
    for role in subject.roles:
        for instruction in role.order:
            if instruction[0] == "B":
                yield role.reordered([i for i in role.order if i != instruction])


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
            if instruction[0] == "B":
                at = role.order.index(f"F{instruction[1:]}")
                rest = [i for i in role.order if i != instruction]
                yield role.reordered([*rest[:at], instruction, *rest[at:]])


def _deadlock(subject: RightProgram) -> Iterator[Edits]:
    """An order of one stage in which stages wait for each other. Orders that merely differ are right."""
    if len(subject.roles) < 2 or not _several(subject):
        return
    for role in subject.roles:
        for at, moved in enumerate(role.order):
            for to in range(len(role.order)):
                rest = [i for i in role.order if i != moved]
                order = [*rest[:to], moved, *rest[to:]]
                if to != at and _legal(order) and _hangs(subject, role, order):
                    yield (role.reordered(order),)


def _legal(order: Sequence[str]) -> bool:
    return all(order.index(f"F{i[1:]}") < order.index(i) for i in order if i[0] == "B")


def _hangs(subject: RightProgram, changed: Role, order: Sequence[str]) -> bool:
    """Return whether these orders deadlock: stage s waits for activations of s - 1, and for gradients of s + 1."""
    queues = {r.file: list(order if r.file == changed.file else r.order) for r in subject.roles}
    last = subject.program.plan.stages - 1
    done: set[str] = set()
    while any(queues.values()):
        ready = [file for file, queue in queues.items() if queue and _ready(queue[0], last, done)]
        if not ready:
            return True
        for file in ready:
            done.add(queues[file].pop(0))
    return False


def _ready(instruction: str, last: int, done: set[str]) -> bool:
    stage, micro = (int(n) for n in instruction[1:].split("."))
    if instruction[0] == "F":
        return stage == 0 or f"F{stage - 1}.{micro}" in done
    return stage == last or f"B{stage + 1}.{micro}" in done


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


OPERATORS = operators(
    "schedule",
    {
        "last backward dropped": _last_backward,
        "a backward dropped on one stage": _one_backward,
        "last micro-batch dropped on one stage": _one_forward,
        "an instruction twice": _twice,
        "backward before forward": _backward_first,
        "order that hangs": _deadlock,
        "messages to the wrong rank": _peers,
        "one side names the wrong rank": _one_peer,
        "missing send": each_of(lambda s: s.entries("sends"), lambda _, e: [Edit(e.file, e.line, e.text, "")]),
        "gradient not sent back": _gradient_not_sent,
        "gradient where there is none": _gradient_awaited,
        "sent on as it was received": _stale,
        "wrong shape of a message": _message_shape,
    },
)
