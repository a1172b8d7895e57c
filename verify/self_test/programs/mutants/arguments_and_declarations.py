"""Wrong arguments of operations on shards, and wrong declarations of stages.

Arguments are local sizes, positions, dims, flags, expressions of the rank's place. Declarations are what is stored how,
what is summed over which ranks, which piece of the batch a rank reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from verify.self_test.programs.mutants.editable_program_and_edits import (
    DeclarationEntry,
    Find,
    RightProgram,
    Statement,
    each_of,
    micro_of,
    operators,
    with_value,
    without_entry,
)
from verify.self_test.programs.mutants.mutant import Edit, Edits

_PLACE = re.compile(r"self\.(\w+)\.index")
_INTEGER = re.compile(r"-?\d+$")
_SIZES = re.compile(r"[(\[][\d, -]+[)\]]$")
# arguments that say nothing about the values: cuDNN's flag, the sparse gradient of an embedding
NO_MEANING = {("aten.layer_norm", 5), ("aten.embedding", 3), ("aten.embedding", 4), ("aten.conv2d.default", 6)}
COMPUTE = ("aten.", "ops.", "user.")


def _statements(subject: RightProgram) -> Iterator[Statement]:
    for prefix in COMPUTE:
        yield from subject.statements(prefix)


def _rank_zero(_: RightProgram, s: Statement) -> Iterator[str]:
    """All ranks take the first rank's part."""
    yield from (s.call.replace(found[0], "0") for found in _PLACE.finditer(s.call))


def _next_rank(_: RightProgram, s: Statement) -> Iterator[str]:
    for found in _PLACE.finditer(s.call):
        yield s.call.replace(found[0], f"(({found[0]} + 1) % {found[0].removesuffix('.index')}.size)")


def _off_by_one(_: RightProgram, s: Statement) -> Iterator[str]:
    for name, value in s.keywords:
        if _PLACE.search(value):
            yield s.with_keywords(**{name: f"{value} + 1"}).call
    for position, value in enumerate(s.arguments):
        if _PLACE.search(value) and not value.startswith("{"):
            yield s.with_argument(position, f"{value} + 1").call


def _keyword_lost(_: RightProgram, s: Statement) -> Iterator[str]:
    for name, value in s.keywords:
        if name not in ("device", "dtype") and value not in ("None", "0", "False", "1.0"):
            yield s.with_keywords(**{name: None}).call


def _number(_: RightProgram, s: Statement) -> Iterator[str]:
    """A whole number (a dim, a start, a count) is one more, or one less."""
    for position, value in enumerate(s.arguments):
        if not _INTEGER.match(value) or (s.callee, position) in NO_MEANING:
            continue
        if s.callee.startswith("ops.ce_") or abs(int(value)) > 10**6:
            continue  # a label to ignore: any number that is none does
        for other in (int(value) + 1, int(value) - 1):
            if other >= 0 or int(value) < 0:
                yield s.with_argument(position, str(other)).call


def _sizes_swapped(_: RightProgram, s: Statement) -> Iterator[str]:
    """Two neighbouring sizes, or dims of a permutation, in the wrong order."""
    for position, value in enumerate(s.arguments):
        numbers = re.findall(r"-?\d+", value) if _SIZES.match(value) else []
        for i in range(len(numbers) - 1):
            one, two = int(numbers[i]), int(numbers[i + 1])
            if one != two and 1 not in (one, two):
                changed = [*numbers[:i], numbers[i + 1], numbers[i], *numbers[i + 2 :]]
                yield s.with_argument(position, f"{value[0]}{', '.join(changed)}{value[-1]}").call


def _size_shifted(_: RightProgram, s: Statement) -> Iterator[str]:
    """Sizes of pieces that still add up, cut at another place."""
    if s.callee.startswith("aten.split_with_sizes"):
        numbers = [int(n) for n in re.findall(r"\d+", s.arguments[1])]
        for i in range(len(numbers) - 1):
            changed = list(numbers)
            changed[i], changed[i + 1] = changed[i] - 1, changed[i + 1] + 1
            yield s.with_argument(1, str(changed)).call


def _whole_size(subject: RightProgram, s: Statement) -> Iterator[str]:
    """A size of the whole tensor, where the shard's is meant."""
    tensor = subject.tensor(s.stage, s.targets[0])
    if tensor is not None and s.callee in ("aten.reshape", "aten.expand", "aten.view"):
        logical = repr(tuple(tensor.shape))
        if len(s.arguments) > 1 and s.arguments[1].replace("[", "(").replace("]", ")") != logical:
            yield s.with_argument(1, logical).call


def _flag(subject: RightProgram, s: Statement) -> Iterator[str]:
    for position, value in enumerate(s.arguments):
        if value in ("True", "False") and (s.callee, position) not in NO_MEANING and subject.trained(s):
            yield s.with_argument(position, "False" if value == "True" else "True").call


def _operand_lost(_: RightProgram, s: Statement) -> Iterator[str]:
    """An optional operand (a bias, a mask) is left out."""
    if s.callee in ("aten.linear", "aten.conv2d", "aten.scaled_dot_product_attention", "aten.layer_norm"):
        last = next((i for i, a in reversed(list(enumerate(s.arguments))) if a[0].isalpha()), 0)
        optional = 3 if s.callee == "aten.scaled_dot_product_attention" else 2
        if last >= optional and s.arguments[last] not in ("None", "True", "False"):
            yield s.with_argument(last, "None").call


def _random_name(subject: RightProgram) -> Iterator[Edit]:
    """A random operation draws the numbers of another one."""
    draws = [s for s in _statements(subject) if "self" in s.arguments]
    for one in draws:
        for two in draws:
            mine, other = (s.arguments[s.arguments.index("self") + 1] for s in (one, two))
            if mine != other:
                yield one.becomes(one.call.replace(mine, other, 1))


def _random_states(_: RightProgram, s: Statement) -> Iterator[str]:
    """A random operation on shards draws the same numbers on every rank, or whole ones different numbers."""
    for position, value in enumerate(s.arguments):
        if "self" in s.arguments and value.startswith("{"):
            for entry in re.findall(r'"\w+": Sharded\([^)]*\)', value):
                yield s.with_argument(position, without_entry(value, entry)).call


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


OPERATORS = (
    *operators(
        "argument",
        {
            "first rank's part on all": with_value(_statements, _rank_zero),
            "next rank's part": with_value(_statements, _next_rank),
            "off by one": with_value(_statements, _off_by_one),
            "keyword lost": with_value(_statements, _keyword_lost),
            "whole number": with_value(_statements, _number),
            "sizes swapped": with_value(_statements, _sizes_swapped),
            "cut at another place": with_value(_statements, _size_shifted),
            "whole size for local size": with_value(_statements, _whole_size),
            "flag": with_value(_statements, _flag),
            "optional operand lost": with_value(_statements, _operand_lost),
        },
    ),
    *operators(
        "random",
        {
            "numbers of another operation": _random_name,
            "same numbers on shards": with_value(_statements, _random_states),
        },
    ),
    *operators(
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
    ),
)
