"""Lines without effect: dead code (pure operators whose results nothing reads) and moves of elements that are undone.

Tensors without values ("meta") of a rank's shape say what torch would make of such a line; where shards are of unequal
sizes, one for each place in the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch

from op_registry.call import DType
from op_registry.rank_expression import Expression
from op_registry.registry import facts_of

from nnscaler.ir.conversion_table_and_paths import shape_of_rank
from nnscaler.ir.graph import Graph
from verify.programs.typing.lines.canonical_calls import has_dims, operator_of
from verify.programs.typing.program_files.rank_program_syntax import Assignment, Variable
from verify.programs.typing.typed_value import Axes, Held

# pure, and nothing makes them fail but shapes and dtypes
_TOTAL = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default abs.default square.default pow.Tensor_Scalar"
        " exp.default log.default sqrt.default rsqrt.default sin.default cos.default tanh.default sigmoid.default"
        " relu.default gelu.default silu.default maximum.default minimum.default sum.default sum.dim_IntList"
        " mean.default mean.dim amax.default amin.default softmax.int log_softmax.int matmul.default linear.default"
        " cat.default stack.default zeros_like.default ones_like.default"
    ).split()
)
_TOTAL_AT_ALL_SIZES = _TOTAL - {"aten.cat.default", "aten.stack.default"}  # of one tensor; its dims, and no sizes
_OF_MEMORY = frozenset({"memory_format", "layout", "device", "pin_memory"})  # without values nothing shows their effect
_LARGEST = 1 << 26  # elements that a rank has memory for beside its own tensors
_MANY = 64  # places in a mesh that are looked at one by one
Locals = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class MovedTensor:
    """A tensor that a line made by moving the elements of another one.

    held  its type; None where the model has no such tensor
    line  the line that made it
    of    the tensor whose elements it moved
    """

    held: Held | None
    line: Assignment | None = None
    of: MovedTensor | None = None

    def path(self) -> Iterator[MovedTensor]:
        """Yield this tensor, the one that it was made of, and so on."""
        here: MovedTensor | None = self
        while here is not None:
            yield here
            here = here.of


def moves(line: Assignment) -> bool:
    """Return whether each element of the line's result is an element of its first operand, in another place."""
    return _is_move(operator_of(line.function, {})) and isinstance(line.kwargs.get("self"), Variable)


def idle_at_all_sizes(line: Assignment, operands: Iterable[Locals]) -> bool:
    """Return whether a line that does nothing at the sample's sizes does nothing at any.

    Elements may be computed one by one, and dims exchanged. What names a size or a place in a dim (`slice`, `view`,
    `squeeze`), or fits one tensor's sizes to another's, is seen at the sample's sizes only; so is an exchange of
    dims where two of them have size 1 on a rank.
    """
    operator = operator_of(line.function, {})
    if operator is None or len(line.variables) != 1:
        return False
    if not _is_move(operator):
        return operator in _TOTAL_AT_ALL_SIZES
    moved = facts_of(operator).moves
    if moved in ("transpose", "permute"):
        shapes = [tensor.shape for local in operands for tensor in local]
        return bool(shapes) and all(list(shape).count(1) < 2 for shape in shapes)
    return moved in ("value", "cast")


def _is_move(operator: str | None) -> bool:
    """Return whether the gradient of each element goes, too, to the one element of the operand that it is.

    What becomes of the elements is asked of tensors without values. They do not tell of a cast that depends on the
    device (autocast's own two), so that the one cast is taken that says its dtype and nothing else.
    """
    if operator is None:
        return False
    facts = facts_of(operator)
    if facts.moves == "cast":
        return operator == "aten.to.dtype"
    return facts.moves not in (None, "pad") and not facts.detached


def as_before(move: MovedTensor, graph: Graph, axes: Axes) -> MovedTensor | None:
    """Return the tensor on the way that has the same elements in the same places, on every rank; None
    if there is none."""
    path = list(move.path())[::-1]
    locals_ = [() if step.held is None else local_tensors(step.held, graph, axes) for step in path]
    found = {_as_before(path, locals_, place) for place in range(max(map(len, locals_), default=0))}
    number = found.pop() if len(found) == 1 else None
    if number is None:
        return None
    known = path[number]
    assert known.held is not None
    recorded = all(step.line is not None and step.line.region.grad_enabled for step in path[number + 1 :])
    return known if recorded or not graph.tensors[known.held.tensor].needs_grad else None


def _as_before(path: Sequence[MovedTensor], locals_: Sequence[Locals], place: int) -> int | None:
    """Return the number of that tensor on the way, on the ranks at one place."""
    views: list[torch.Tensor | None] = []
    start = 0  # of what is a view of one tensor
    for number, step in enumerate(path):
        before = views[-1] if views else None
        made = _viewed(step.line, before) if before is not None and step.line is not None else None
        if made is None:
            made, start = _at(locals_[number], place), number
        views.append(made)
    last = views[-1]
    for number in range(start, len(path) - 1):
        view = views[number]
        if path[number].held is not None and view is not None and last is not None and _same_place(view, last):
            return number
    return None


def _viewed(line: Assignment, operand: torch.Tensor) -> torch.Tensor | None:
    """Return the result of a move as a view of the operand; None where it is none, or may fail."""
    operator, source = operator_of(line.function, {}), line.kwargs["self"]
    if operator is None or line.variables != (source,) or not _may_run(operator, line, operand.ndim):
        return None
    if operator == "aten.clone.default":
        return operand
    if facts_of(operator).moves == "reshape" and _call(operator, line.kwargs, {source: _scattered(operand)}) is None:
        return None
    made = _call(operator, line.kwargs, {source: operand})
    base = operand if operand._base is None else operand._base
    return made if made is not None and (made is operand or made._base is base) else None


def idle_result(line: Assignment, operands: Mapping[Variable, Held | Locals], graph: Graph, axes: Axes) -> Locals:
    """Return the line's results without values; empty where the line may have an effect, or fail."""
    tensors = {v: local_tensors(k, graph, axes) if isinstance(k, Held) else k for v, k in operands.items()}
    places = range(max(map(len, tensors.values()), default=0))
    made = [_idle_at(line, {v: _at(local, place) for v, local in tensors.items()}) for place in places]
    return tuple(tensor for tensor in made if tensor is not None) if None not in made else ()


def _idle_at(line: Assignment, tensors: Mapping[Variable, torch.Tensor | None]) -> torch.Tensor | None:
    operator = operator_of(line.function, {})
    given = {variable: tensor for variable, tensor in tensors.items() if tensor is not None and tensor.numel()}
    if operator is None or not (operator in _TOTAL or _is_move(operator)) or len(given) < len(tensors):
        return None
    first = next((given[v].ndim for v in line.variables), 0)
    if not _may_run(operator, line, first):
        return None
    if operator == "aten.to.dtype" and all(t.is_floating_point() for t in given.values()):
        return _call(operator, line.kwargs, given)  # wrong if anything reads it
    if operator in _TOTAL:
        dtypes = {t.dtype for t in given.values()}
        if line.region.autocast or len(dtypes) != 1 or not all(t.is_floating_point() for t in given.values()):
            return None  # shapes without values do not show what kernels say of dtypes
    if any(isinstance(v, str) for v in line.kwargs.values()):
        return None
    if facts_of(operator).moves == "reshape":
        scattered = {variable: _scattered(tensor) for variable, tensor in given.items()}
        if _call(operator, line.kwargs, scattered) is None:
            return None
    made = _call(operator, line.kwargs, given)
    largest = max((tensor.numel() for tensor in given.values()), default=0)
    if made is None or made.numel() > max(largest, _LARGEST):
        return None
    return made if all(made.dtype == t.dtype for t in given.values()) else None


def _may_run(operator: str, line: Assignment, dims: int) -> bool:
    """Return whether kernels refuse no argument that tensors without values take. `dims`: of the first operand."""
    return not _OF_MEMORY.intersection(line.kwargs) and has_dims(operator, line.kwargs, dims)


def local_tensors(held: Held, graph: Graph, axes: Axes) -> Locals:
    """Return a rank's piece, without values: one for all ranks, or one for each place in the mesh; none where they are
    too many."""
    tensor = graph.tensors[held.tensor]
    shape = shape_of_rank(held.layout, axes.pairs, tensor.shape)
    uneven = any(isinstance(size, Expression) for size in shape)
    if uneven and prod(axes.sizes) > _MANY:
        return ()
    places = product(*(range(size) for size in axes.sizes)) if uneven else [(0,) * len(axes.sizes)]
    indices = [dict(zip(axes.names, place, strict=True)) for place in places]
    sizes = [[s.evaluate(at) if isinstance(s, Expression) else s for s in shape] for at in indices]
    return tuple(torch.empty(local, dtype=getattr(torch, tensor.dtype), device="meta") for local in sizes)


def _at(local: Locals, place: int) -> torch.Tensor | None:
    return None if not local else local[0] if len(local) == 1 else local[place]


def _call(operator: str, kwargs: Mapping[str, Any], tensors: Mapping[Variable, torch.Tensor]) -> torch.Tensor | None:
    def value(given: Any) -> Any:
        match given:
            case Variable():
                return tensors[given]
            case DType(name=name):
                return getattr(torch, name)
            case list() | tuple():
                return [value(v) for v in given]
            case None | bool() | int() | float() | complex() | str():
                return given
        raise ValueError(f"{given} depends on the rank")

    namespace, name, overload = operator.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    try:
        with torch.no_grad():
            made = function(**{name: value(given) for name, given in kwargs.items()})
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, OverflowError):
        return None
    return made if isinstance(made, torch.Tensor) else None


def _scattered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this shape of which no two dims lie in memory as one: where it can be viewed in another shape,
    every tensor can, and `aten.view` does not fail."""
    strides, stride = [], 2
    for size in reversed(tensor.shape):
        strides.append(stride)
        stride = stride * size + 1
    return torch.empty_strided(tensor.shape, strides[::-1], dtype=tensor.dtype, device="meta")


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    where = [
        (t.dtype, t.shape, t.storage_offset(), [s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1])
        for t in (a, b)
    ]
    return where[0] == where[1]
