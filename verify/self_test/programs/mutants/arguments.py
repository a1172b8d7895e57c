"""Wrong arguments of an operation on a shard: local sizes, positions, dims, flags, expressions of the rank's place."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verify.self_test.programs.mutants.editable_program_and_edits import (
    RightProgram,
    Statement,
    operators,
    with_value,
    without_entry,
)
from verify.self_test.programs.mutants.mutant import Edit

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
)
