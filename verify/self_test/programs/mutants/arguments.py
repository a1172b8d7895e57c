"""Wrong arguments of an operation on a shard: local sizes, positions, dims, flags, expressions of the rank's place."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verify.self_test.programs.mutants.mutant import Edit
from verify.self_test.programs.mutants.mutation_operator import Find, MutationOperator
from verify.self_test.programs.mutants.role_source import RightProgram, Statement

_PLACE = re.compile(r"self\.(\w+)\.index")
_INTEGER = re.compile(r"-?\d+$")
_SIZES = re.compile(r"[(\[][\d, -]+[)\]]$")
# arguments that say nothing about the values: cuDNN's flag, the sparse gradient of an embedding
NO_MEANING = {("aten.layer_norm", 5), ("aten.embedding", 3), ("aten.embedding", 4), ("aten.conv2d.default", 6)}
SYMMETRIC = ("aten.transpose.int",)  # swapping its two dims changes nothing
COMPUTE = ("aten.", "ops.", "user.")


def _statements(subject: RightProgram) -> Iterator[Statement]:
    for prefix in COMPUTE:
        yield from subject.statements(prefix)


def _every(subject: RightProgram) -> Iterator[tuple[Statement, str, str]]:
    """(statement, its call, an expression of the rank's place in it)."""
    for statement in _statements(subject):
        for found in _PLACE.finditer(statement.call):
            yield statement, statement.call, found[0]


def _rank_zero(subject: RightProgram) -> Iterator[Edit]:
    """All ranks take the first rank's part."""
    for statement, call, place in _every(subject):
        yield statement.becomes(call.replace(place, "0"))


def _next_rank(subject: RightProgram) -> Iterator[Edit]:
    for statement, call, place in _every(subject):
        axis = place.removesuffix(".index")
        yield statement.becomes(call.replace(place, f"(({place} + 1) % {axis}.size)"))


def _off_by_one(subject: RightProgram) -> Iterator[Edit]:
    for statement in _statements(subject):
        for name, value in statement.keywords:
            if _PLACE.search(value):
                yield statement.becomes(statement.with_keywords(**{name: f"{value} + 1"}).call)
        for position, value in enumerate(statement.arguments):
            if _PLACE.search(value) and not value.startswith("{"):
                yield statement.becomes(statement.with_argument(position, f"{value} + 1").call)


def _keyword_lost(subject: RightProgram) -> Iterator[Edit]:
    for statement in _statements(subject):
        for name, value in statement.keywords:
            if name not in ("device", "dtype") and value not in ("None", "0", "False", "1.0"):
                yield statement.becomes(statement.with_keywords(**{name: None}).call)


def _number(subject: RightProgram) -> Iterator[Edit]:
    """A whole number (a dim, a start, a count) is one more, or one less."""
    for statement in _statements(subject):
        for position, value in enumerate(statement.arguments):
            if not _INTEGER.match(value) or (statement.callee, position) in NO_MEANING:
                continue
            if statement.callee.startswith("ops.ce_") or abs(int(value)) > 10**6:
                continue  # a label to ignore: any number that is none does
            for other in (int(value) + 1, int(value) - 1):
                if other >= 0 or int(value) < 0:
                    yield statement.becomes(statement.with_argument(position, str(other)).call)


def _sizes_swapped(subject: RightProgram) -> Iterator[Edit]:
    """Two neighbouring sizes, or dims of a permutation, in the wrong order."""
    for statement in _statements(subject):
        for position, value in enumerate(statement.arguments):
            numbers = re.findall(r"-?\d+", value) if _SIZES.match(value) else []
            for i in range(len(numbers) - 1):
                one, two = int(numbers[i]), int(numbers[i + 1])
                if one != two and 1 not in (one, two):
                    changed = [*numbers[:i], numbers[i + 1], numbers[i], *numbers[i + 2 :]]
                    text = f"{value[0]}{', '.join(changed)}{value[-1]}"
                    yield statement.becomes(statement.with_argument(position, text).call)


def _size_shifted(subject: RightProgram) -> Iterator[Edit]:
    """Sizes of pieces that still add up, cut at another place."""
    for statement in _statements(subject):
        if not statement.callee.startswith("aten.split_with_sizes"):
            continue
        numbers = [int(n) for n in re.findall(r"\d+", statement.arguments[1])]
        for i in range(len(numbers) - 1):
            changed = list(numbers)
            changed[i], changed[i + 1] = changed[i] - 1, changed[i + 1] + 1
            yield statement.becomes(statement.with_argument(1, str(changed)).call)


def _whole_size(subject: RightProgram) -> Iterator[Edit]:
    """A size of the whole tensor, where the shard's is meant."""
    for statement in _statements(subject):
        tensor = subject.tensor(statement.stage, statement.targets[0])
        if tensor is None or statement.callee not in ("aten.reshape", "aten.expand", "aten.view"):
            continue
        logical = repr(tuple(tensor.shape))
        if len(statement.arguments) > 1 and statement.arguments[1].replace("[", "(").replace("]", ")") != logical:
            yield statement.becomes(statement.with_argument(1, logical).call)


def _flag(subject: RightProgram) -> Iterator[Edit]:
    for statement in _statements(subject):
        for position, value in enumerate(statement.arguments):
            if value in ("True", "False") and (statement.callee, position) not in NO_MEANING:
                other = "False" if value == "True" else "True"
                if subject.trained(statement):
                    yield statement.becomes(statement.with_argument(position, other).call)


def _operand_lost(subject: RightProgram) -> Iterator[Edit]:
    """An optional operand (a bias, a mask) is left out."""
    for statement in _statements(subject):
        if statement.callee in ("aten.linear", "aten.conv2d", "aten.scaled_dot_product_attention", "aten.layer_norm"):
            last = next((i for i, a in reversed(list(enumerate(statement.arguments))) if a[0].isalpha()), 0)
            optional = 3 if statement.callee == "aten.scaled_dot_product_attention" else 2
            if last >= optional and statement.arguments[last] not in ("None", "True", "False"):
                yield statement.becomes(statement.with_argument(last, "None").call)


def _random_name(subject: RightProgram) -> Iterator[Edit]:
    """A random operation draws the numbers of another one."""
    draws = [s for s in _statements(subject) if "self" in s.arguments]
    for one in draws:
        for two in draws:
            mine, other = (s.arguments[s.arguments.index("self") + 1] for s in (one, two))
            if mine != other:
                yield one.becomes(one.call.replace(mine, other, 1))


def _random_states(subject: RightProgram) -> Iterator[Edit]:
    """A random operation on shards draws the same numbers on every rank, or whole ones different numbers."""
    for statement in _statements(subject):
        for position, value in enumerate(statement.arguments):
            if "self" in statement.arguments and value.startswith("{"):
                for entry in re.findall(r'"\w+": Sharded\([^)]*\)', value):
                    left = value.replace(entry, "").replace("{, ", "{").replace(", }", "}").replace(", , ", ", ")
                    yield statement.becomes(statement.with_argument(position, left).call)


FAMILY = "argument"
KINDS: dict[str, Find] = {
    "first rank's part on all": _rank_zero,
    "next rank's part": _next_rank,
    "off by one": _off_by_one,
    "keyword lost": _keyword_lost,
    "whole number": _number,
    "sizes swapped": _sizes_swapped,
    "cut at another place": _size_shifted,
    "whole size for local size": _whole_size,
    "flag": _flag,
    "optional operand lost": _operand_lost,
}
OPERATORS = (
    *(MutationOperator(FAMILY, kind, find) for kind, find in KINDS.items()),
    MutationOperator("random", "numbers of another operation", _random_name),
    MutationOperator("random", "same numbers on shards", _random_states),
)
