"""Wrong declarations: what is stored how, what is summed over which ranks, which piece of the batch a rank reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from verify.self_test.programs.mutants.mutant import Edit, Edits
from verify.self_test.programs.mutants.mutation_operator import Find, MutationOperator
from verify.self_test.programs.mutants.role_source import DeclarationEntry, RightProgram

_STATE = re.compile(r'"(\w+)": ((?:Sharded|Partial|Replicated)\([^()]*(?:\([^()]*\))?[^()]*\))')
_OUTER = re.compile(r", outer=(\d+)")


def _parameters(subject: RightProgram) -> Iterator[DeclarationEntry]:
    yield from (e for e in subject.entries("parameters") if "used=False" not in e.text)


def _not_reduced(subject: RightProgram) -> Iterator[Edit]:
    """The gradient is not summed over an axis."""
    for entry in _parameters(subject):
        reduce = entry.keyword("reduce")
        if reduce:
            names = re.findall(r'"(\w+)"', reduce)
            for name in names:
                left = [n for n in names if n != name]
                text = "(" + "".join(f'"{n}", ' for n in left).rstrip(" ") + ")"
                yield entry.swapped(f"reduce={reduce}", f"reduce={text}")


def _reduced_too_often(subject: RightProgram) -> Iterator[Edit]:
    """The gradient is summed over an axis on which it is whole, or a shard."""
    for entry in _parameters(subject):
        names = re.findall(r'"(\w+)"', entry.keyword("reduce"))
        for axis in subject.axes[entry.stage]:
            if axis not in names:
                text = "reduce=(" + "".join(f'"{n}", ' for n in (*names, axis)).rstrip(" ") + ")"
                if entry.keyword("reduce"):
                    yield entry.swapped(f"reduce={entry.keyword('reduce')}", text)
                else:
                    yield entry.with_more(text)


def _reduced_on_another(subject: RightProgram) -> Iterator[Edit]:
    for entry in _parameters(subject):
        names = re.findall(r'"(\w+)"', entry.keyword("reduce"))
        for axis in subject.axes[entry.stage]:
            if len(names) == 1 and axis != names[0]:
                yield entry.swapped(f"reduce={entry.keyword('reduce')}", f'reduce=("{axis}",)')


def _untied(subject: RightProgram) -> Iterator[Edits]:
    """A tied parameter is not summed over the stages that hold it."""
    found: dict[str, list[Edit]] = {}
    for entry in _parameters(subject):
        copies = entry.keyword("copies")
        if copies:
            found.setdefault(entry.arguments[0], []).append(entry.swapped(f", copies={copies}", ""))
    yield from (tuple(edits) for edits in found.values())


def _wrong_copies(subject: RightProgram) -> Iterator[Edit]:
    """The copies of a tied parameter are looked for on other ranks, or on one stage only."""
    for entry in _parameters(subject):
        copies = entry.keyword("copies")
        if not copies:
            continue
        yield entry.swapped(f", copies={copies}", "")
        groups = re.findall(r"\(([\d, ]+)\)", copies)
        numbers = [re.findall(r"\d+", g) for g in groups]
        if len(numbers) > 1 and len(numbers[1]) > 1:
            turned = [numbers[0], [*numbers[1][1:], numbers[1][0]], *numbers[2:]]
            text = "(" + ", ".join(f"({', '.join(g)})" for g in turned) + ")"
            yield entry.swapped(f"copies={copies}", f"copies={text}")


def _unused(subject: RightProgram) -> Iterator[Edit]:
    for entry in _parameters(subject):
        yield entry.with_more("used=False")


def _at_rest(subject: RightProgram) -> Iterator[Edit]:
    """A parameter or buffer is cut along another dim, otherwise, or not at all."""
    for entry in subject.entries("parameters", "frozen", "buffers"):
        for found in _STATE.finditer(entry.states):
            for wrong in _other_states(found[2]):
                yield entry.swapped(entry.states, entry.states.replace(found[2], wrong, 1))
            yield entry.swapped(entry.states, _without(entry.states, found[0]))
        if entry.states == "{}" and entry.section == "parameters":
            for axis in subject.axes[entry.stage]:
                yield entry.swapped(", {}", f', {{"{axis}": Sharded(0)}}')


def _other_states(state: str) -> Iterator[str]:
    if not state.startswith("Sharded"):
        return
    if _OUTER.search(state):
        yield _OUTER.sub("", state)
    elif "sections" in state:
        yield re.sub(r", sections=\([\d, ]*\)", "", state)
    else:
        yield state.replace(")", ", outer=2)")
    yield state.replace("Sharded(0", "Sharded(1") if "Sharded(0" in state else state.replace("Sharded(1", "Sharded(0")


def _without(states: str, entry: str) -> str:
    return states.replace(entry, "").replace("{, ", "{").replace(", }", "}").replace(", , ", ", ")


def _other_name(subject: RightProgram) -> Iterator[Edits]:
    """Two parameters of one shape change places: names that count from the start of a stage do that."""
    for section in ("parameters", "buffers"):
        entries = list(subject.entries(section))
        for one, two in pairwise(entries):
            _swap = one.file == two.file and one.arguments[1:] == two.arguments[1:] and one.keywords == two.keywords
            if _swap and "copies" not in one.text:
                yield (one.swapped(one.arguments[0], two.arguments[0]), two.swapped(two.arguments[0], one.arguments[0]))


def _same_name(subject: RightProgram) -> Iterator[Edit]:
    """One parameter is stored under the name of another one of its shape."""
    entries = list(_parameters(subject))
    for one in entries:
        for two in entries:
            if one.stage == two.stage and one.name != two.name and one.arguments[1:] == two.arguments[1:]:
                yield one.swapped(one.arguments[0], two.arguments[0])
                break


def _stored_low(subject: RightProgram) -> Iterator[Edit]:
    for entry in _parameters(subject):
        yield entry.swapped('"float32"', '"bfloat16"')


def _input_states(subject: RightProgram) -> Iterator[Edit]:
    """A rank, or a micro-batch, reads another piece of one of the inputs."""
    for section in ("inputs", "prepare_inputs"):
        for entry in subject.entries(section):
            for found in _STATE.finditer(entry.states):
                yield entry.swapped(entry.states, _without(entry.states, found[0]))
                if section == "inputs":  # for what is only counted, pieces may come in any order
                    for wrong in _other_states(found[2]):
                        yield entry.swapped(entry.states, entry.states.replace(found[2], wrong, 1))


def _loss_states(subject: RightProgram) -> Iterator[Edit]:
    """The loss is not summed over an axis, or over one too many."""
    for entry in subject.entries("loss"):
        for found in _STATE.finditer(entry.states):
            yield entry.swapped(entry.states, _without(entry.states, found[0]))
        for axis in subject.axes[entry.stage]:
            if f'"{axis}"' not in entry.states:
                more = f'"{axis}": Partial()'
                yield entry.swapped(
                    entry.states, f"{{{more}}}" if entry.states == "{}" else entry.states[:-1] + f", {more}}}"
                )


def _micro_batches(subject: RightProgram) -> Iterator[Edits]:
    """Half of the micro-batches are run, or the program takes itself for one without any."""
    for role in subject.roles:
        for number, line in enumerate(role.lines, 1):
            count = line.strip().removeprefix("micro_batches = ")
            if count.isdigit() and count != line.strip() and int(count) > 1:
                half = int(count) // 2
                kept = [i for i in role.order if int(i.partition(".")[2]) < half]
                yield (
                    Edit(role.file, number, line, line.replace(f"= {count}", f"= {half}")),
                    role.reordered(kept),
                )


FAMILY = "declaration"
KINDS: dict[str, Find] = {
    "gradient not reduced": _not_reduced,
    "gradient reduced too often": _reduced_too_often,
    "gradient reduced over another axis": _reduced_on_another,
    "tied parameter not summed": _untied,
    "wrong copies": _wrong_copies,
    "parameter declared unused": _unused,
    "stored in another layout": _at_rest,
    "names exchanged": _other_name,
    "stored under another name": _same_name,
    "stored in bfloat16": _stored_low,
    "another piece of an input": _input_states,
    "states of the loss": _loss_states,
    "wrong count of micro-batches": _micro_batches,
}
OPERATORS = tuple(MutationOperator(FAMILY, kind, find) for kind, find in KINDS.items())
