"""Wrong declarations: what is stored how, what is summed over which ranks, which piece of the batch a rank reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from verify.self_test.programs.mutants.editable_program_and_edits import (
    DeclarationEntry,
    Find,
    RightProgram,
    each_of,
    micro_of,
    operators,
)
from verify.self_test.programs.mutants.mutant import Edit, Edits

_STATE = re.compile(r'"(\w+)": ((?:Sharded|Partial|Replicated)\([^()]*(?:\([^()]*\))?[^()]*\))')
_OUTER = re.compile(r", outer=(\d+)")


def _parameters(subject: RightProgram) -> Iterator[DeclarationEntry]:
    yield from (e for e in subject.entries("parameters") if "used=False" not in e.text)


def _reduce(names: Iterable[str]) -> str:
    return "reduce=(" + "".join(f'"{n}", ' for n in names).rstrip(" ") + ")"


def _reduced(change: Callable[[list[str], list[str]], Iterator[list[str]]]) -> Find:
    """`change` yields other axes for the sum of a gradient; it is given those that are declared, and all."""

    def find(subject: RightProgram) -> Iterator[Edit]:
        for entry in _parameters(subject):
            declared = entry.keyword("reduce")
            for names in change(re.findall(r'"(\w+)"', declared), list(subject.axes[entry.stage])):
                text = _reduce(names)
                yield entry.swapped(f"reduce={declared}", text) if declared else entry.with_more(text)

    return find


def _not_reduced(names: list[str], _: list[str]) -> Iterator[list[str]]:
    """The gradient is not summed over an axis."""
    yield from ([n for n in names if n != name] for name in names)


def _reduced_too_often(names: list[str], axes: list[str]) -> Iterator[list[str]]:
    """The gradient is summed over an axis on which it is whole, or a shard."""
    yield from ([*names, axis] for axis in axes if axis not in names)


def _reduced_on_another(names: list[str], axes: list[str]) -> Iterator[list[str]]:
    yield from ([axis] for axis in axes if len(names) == 1 and axis != names[0])


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


def _at_rest(subject: RightProgram) -> Iterator[Edit]:
    """A parameter or buffer is cut along another dim, otherwise, or not at all."""
    for entry in subject.entries("parameters", "frozen", "buffers"):
        for found in _STATE.finditer(entry.states):
            yield from (entry.with_states(found[2], wrong) for wrong in _other_states(found[2]))
            yield entry.without_state(found[0])
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


def _other_name(subject: RightProgram) -> Iterator[Edits]:
    """Two parameters of one shape change places: names that count from the start of a stage do that."""
    for section in ("parameters", "buffers"):
        for one, two in pairwise(subject.entries(section)):
            if one.exchangeable(two) and "copies" not in one.text:
                yield one.exchanged(two)


def _same_name(subject: RightProgram) -> Iterator[Edit]:
    """One parameter is stored under the name of another one of its shape."""
    entries = list(_parameters(subject))
    for one in entries:
        for two in entries:
            if one.stage == two.stage and one.name != two.name and one.arguments[1:] == two.arguments[1:]:
                yield one.named(two)
                break


def _input_states(subject: RightProgram) -> Iterator[Edit]:
    """A rank, or a micro-batch, reads another piece of one of the inputs."""
    for section in ("inputs", "prepare_inputs"):
        for entry in subject.entries(section):
            for found in _STATE.finditer(entry.states):
                yield entry.without_state(found[0])
                if section == "inputs":  # for what is only counted, pieces may come in any order
                    yield from (entry.with_states(found[2], wrong) for wrong in _other_states(found[2]))


def _loss_states(subject: RightProgram) -> Iterator[Edit]:
    """The loss is not summed over an axis, or over one too many."""
    for entry in subject.entries("loss"):
        yield from (entry.without_state(found[0]) for found in _STATE.finditer(entry.states))
        for axis in subject.axes[entry.stage]:
            if f'"{axis}"' not in entry.states:
                yield entry.with_state(axis, "Partial()")


def _micro_batches(subject: RightProgram) -> Iterator[Edits]:
    """Half of the micro-batches are run, or the program takes itself for one without any."""
    for role in subject.roles:
        for number, line in enumerate(role.lines, 1):
            count = line.strip().removeprefix("micro_batches = ")
            if count.isdigit() and count != line.strip() and int(count) > 1:
                half = int(count) // 2
                kept = [i for i in role.order if micro_of(i) < half]
                yield (Edit(role.file, number, line, line.replace(f"= {count}", f"= {half}")), role.reordered(kept))


OPERATORS = operators(
    "declaration",
    {
        "gradient not reduced": _reduced(_not_reduced),
        "gradient reduced too often": _reduced(_reduced_too_often),
        "gradient reduced over another axis": _reduced(_reduced_on_another),
        "tied parameter not summed": _untied,
        "wrong copies": _wrong_copies,
        "parameter declared unused": each_of(_parameters, lambda _, entry: [entry.with_more("used=False")]),
        "stored in another layout": _at_rest,
        "names exchanged": _other_name,
        "stored under another name": _same_name,
        "stored in bfloat16": each_of(_parameters, lambda _, entry: [entry.swapped('"float32"', '"bfloat16"')]),
        "another piece of an input": _input_states,
        "states of the loss": _loss_states,
        "wrong count of micro-batches": _micro_batches,
    },
)
