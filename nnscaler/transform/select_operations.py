"""Select operations of a graph: by name, module path, parameter or operator (globs), and by layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import groupby

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation


def matches(op: Operation, pattern: str) -> bool:
    """Return whether a pattern names the operation, its module, or a module that contains it."""
    return any(
        fnmatchcase(text, p) for text, p in ((op.name, pattern), (op.module, pattern), (op.module, pattern + ".*"))
    )


def reads(op: Operation, graph: Graph, pattern: str) -> bool:
    """Return whether a pattern names a parameter that the operation reads."""
    parameters = (graph.tensors[name] for name in op.inputs if graph.tensors[name].role == "parameter")
    return any(fnmatchcase(fqn, pattern) for tensor in parameters for fqn in tensor.fqns)


def select(graph: Graph, patterns: Iterable[str]) -> tuple[Operation, ...]:
    """Return the operations that any of the patterns names, in graph order.

    A pattern that names no operation and no module may name parameters: `head*` is the head's operations, not the
    embedding that is tied to `head.weight`. One that names none of these may name operators: `aten.linear.default`,
    `aten.dropout*`.

    Raises NnscalerError("plan_illegal") for a pattern that names nothing.
    """
    chosen: dict[str, Operation] = {}
    for pattern in patterns:
        if pattern in graph.by_name:
            chosen[pattern] = graph.by_name[pattern]
            continue
        found = [op for op in graph.operations if matches(op, pattern)]
        found = found or [op for op in graph.operations if reads(op, graph, pattern)]
        found = found or [op for op in graph.operations if fnmatchcase(op.operator, pattern)]
        if not found:
            raise _nothing(graph, pattern)
        chosen.update((op.name, op) for op in found)
    return tuple(op for op in graph.operations if op.name in chosen)


def _nothing(graph: Graph, pattern: str) -> NnscalerError:
    modules = sorted({op.module for op in graph.operations if op.module})
    names = [op.name for op in graph.operations]
    close = get_close_matches(pattern.rstrip(".*"), [*modules, *names], n=4, cutoff=0.4) or modules[:6]
    return NnscalerError(
        "plan_illegal",
        f"pattern {pattern!r} matches no module and no operation",
        help=f"modules of this model: {', '.join(close)}",
    )


# The layers of a model, read from module paths: a numeric component under a common prefix, such as `blocks.3`.

Key = tuple[str, int]  # (prefix, index)


@dataclass(frozen=True, slots=True)
class Layer:
    """One execution of one layer: `operations` are the names of those that run under its path, in order."""

    prefix: str
    index: int
    operations: tuple[str, ...]

    @property
    def path(self) -> str:
        return layer_path((self.prefix, self.index))


def layer_path(key: Key) -> str:
    """`blocks.3` of ("blocks", 3)."""
    return f"{key[0]}.{key[1]}" if key[0] else str(key[1])


def layers_of(graph: Graph, at_least: int = 2, ignore: Collection[str] = ()) -> tuple[Layer, ...]:
    """Return the layers in order of execution; a layer that runs again after another one appears again.

    Module paths may nest numbers (`stages.0.blocks.1`): the outermost level with `at_least` layers is taken, or the
    one with most layers if none has so many. Operations named in `ignore` do not count. Empty without layers.
    """
    operations = [(op.name, op.module) for op in graph.operations if op.name not in ignore]
    keys = {module: _numbered(module) for _, module in operations}
    best: tuple[Layer, ...] = ()
    for level in range(max((len(found) for found in keys.values()), default=0)):
        stacks = _stacks(keys, level) or (_plain_stacks(graph, keys) if level == 0 else frozenset())
        key_of = {
            module: found[level] if len(found) > level and found[level][0] in stacks else None
            for module, found in keys.items()
        }
        inside = [(key, name) for name, module in operations if (key := key_of[module]) is not None]
        runs = groupby(inside, key=lambda pair: pair[0])
        layers = tuple(Layer(prefix, index, tuple(name for _, name in run)) for (prefix, index), run in runs)
        if len(layers) >= at_least:
            return layers
        best = max(best, layers, key=len)
    return best


def describe_layers(layers: Iterable[Layer]) -> str:
    """`encoder.block.0 .. encoder.block.3, decoder.block.0`."""
    return describe_paths([((layer.prefix, layer.index), "") for layer in layers])


def describe_paths(entries: Sequence[tuple[Key, str]]) -> str:
    """Return the names of layers, each with a suffix, where consecutive layers of one prefix are written `first ..
    last`."""
    runs: list[list[tuple[Key, str]]] = []
    for key, suffix in entries:
        follows = runs and runs[-1][-1][0] == (key[0], key[1] - 1)
        if follows:
            runs[-1].append((key, suffix))
        else:
            runs.append([(key, suffix)])
    names = [[layer_path(key) + suffix for key, suffix in run] for run in runs]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} .. {run[-1]}" for run in names)


def _numbered(module: str) -> tuple[Key, ...]:
    """Return every (prefix, index) on a module path, outermost first."""
    parts = module.split(".")
    return tuple((".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdecimal())


def _stacks(keys: dict[str, tuple[Key, ...]], level: int) -> frozenset[str]:
    """Return the prefixes that hold layers at this level: stacks whose members have modules inside."""
    return frozenset(
        found[level][0]
        for module, found in keys.items()
        if len(found) > level and len(module) > len(layer_path(found[level]))
    )


def _plain_stacks(graph: Graph, keys: dict[str, tuple[Key, ...]]) -> frozenset[str]:
    """Return the outermost prefixes whose members have no modules inside, as those of `Sequential(Linear, ReLU,
    Linear)`.

    They count only where there is nothing better (a block's MLP is not three layers), and where they are most of the
    model: one whose operations read less than half of the parameters' elements (the embedding of time of a U-Net) says
    nothing about where to cut the rest.
    """
    stacks = frozenset(found[0][0] for found in keys.values() if found)
    every = inside = 0
    for tensor in graph.with_role("parameter"):
        readers = [keys.get(op.module, ()) for op, _ in graph.consumers[tensor.name]]
        every += tensor.elements * bool(readers)
        inside += tensor.elements * any(found and found[0][0] in stacks for found in readers)
    return stacks if 2 * inside >= every else frozenset()
