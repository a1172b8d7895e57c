"""The text of a role program as data, read without running it; arguments as values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from op_registry.call import DType, instances_in
from op_registry.rank_expression import Expression, by_index, index

from nnscaler.ir.graph import Region
from nnscaler.layout import Invariant, Partial, Replicated, Sharded, State

ALIAS = "="  # the function of a line that only names a tensor anew
ITEM = "[]"  # the function of a line that takes one of the results of another: (variable, number)


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor in an argument: a local variable, or (`stored`) an attribute of the stage."""

    name: str
    stored: bool = False


class Mark(Enum):
    """Arguments that stand for the run, not for the model."""

    STAGE = "self"
    DEVICE = "self.device"


@dataclass(frozen=True, slots=True)
class OutsideGrammar:
    """A place of the text that is outside of the grammar of rank programs. `targets`: what it would have assigned."""

    line: int
    why: str
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """One assignment.

    targets   variables, "_" for a dropped result: it is a variable like others
    hint      its comment, in which the writer states layouts; not trusted, only tried first among legal typings
    sequence  the result is unpacked: `a, b = ...`, `a, = ...`
    """

    number: int
    text: str
    targets: tuple[str, ...]
    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    region: Region = field(default_factory=Region)
    hint: str = ""
    sequence: bool = False  # the result is unpacked: `a, b = ...`, `a, = ...`

    @property
    def is_conversion(self) -> bool:
        return self.function.startswith("comm.")

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The tensors that a line in canonical form is given, left to right."""
        return tuple(instances_in(self.kwargs, Variable))


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A nested function and its call, whose activations are computed again in backward. `bound`: (name inside, the
    variable given)."""

    number: int
    bound: tuple[tuple[str, Variable], ...]
    lines: tuple[Assignment | OutsideGrammar, ...]
    results: tuple[Variable, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RegionPieces:
    """A nested function, its calls for the pieces of a region, and `comm.join` of their results.

    bound    (name inside, the variable given to every piece)
    lines    of the function
    results  of the function
    targets  what they are once they are joined
    axis     the axis in time
    indices  of the pieces that are run, in order
    states   how each result is said to lie over the axis
    """

    number: int
    bound: tuple[tuple[str, Variable], ...]
    lines: tuple[Assignment | OutsideGrammar, ...]
    results: tuple[Variable, ...]
    targets: tuple[str, ...]
    axis: str
    indices: tuple[int, ...]
    states: tuple[State, ...]


Statement = Assignment | Recomputed | RegionPieces | OutsideGrammar


@dataclass(frozen=True, slots=True)
class Body:
    """`prepare` or `forward`."""

    number: int
    arguments: tuple[str, ...]
    statements: tuple[Statement, ...]
    returned: Mapping[str, Variable]


@dataclass(frozen=True, slots=True)
class StoredText:
    """A declared parameter, buffer or constant. `states`: by axis, in a step; `rest`: what is added between steps."""

    number: int
    kind: str  # "parameter" | "frozen" | "buffer" | "constant"
    variable: str
    fqn: str
    shape: tuple[int, ...]
    dtype: str
    states: Mapping[str, State]
    reduce: tuple[str, ...] = ()
    copies: tuple[tuple[int, ...], ...] = ()
    used: bool = True
    rest: Mapping[str, State] = field(default_factory=dict)
    scatter: str = "step"
    master: str = ""
    sums: str = ""


@dataclass(frozen=True, slots=True)
class InputText:
    number: int
    variable: str
    name: str
    states: Mapping[str, State]


@dataclass(frozen=True, slots=True)
class MessageText:
    """A `Send` or a `Receive`: the other stage, and the rank there of each position here."""

    number: int
    key: str
    stage: int
    peers: tuple[int, ...]
    needs_grad: bool
    variable: str = ""  # of a Receive
    shape: tuple[int | Expression, ...] = ()
    dtype: str = ""


Piece = tuple[int, int, tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True, slots=True)
class ExchangeText:
    """One side of a transfer between meshes of different shape."""

    number: int
    key: str
    stage: int
    messages: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    shape: tuple[int | Expression, ...]
    dtype: str
    needs_grad: bool
    variable: str = ""  # of the receiving side


@dataclass(frozen=True)
class ResultText:
    """A result besides the loss, as a stage declares it."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    states: Mapping[str, State]


@dataclass(frozen=True)
class StageText:
    """One stage class. `loss` is None where the stage computes none, `staleness` where a step ends with one update."""

    file: str
    number: int
    index: int
    ranks: tuple[int, ...]
    axes: Mapping[str, int]
    micro_batches: int
    stored: tuple[StoredText, ...]
    inputs: tuple[InputText, ...]
    prepare_inputs: tuple[InputText, ...]
    receives: tuple[MessageText | ExchangeText, ...]
    sends: tuple[MessageText | ExchangeText, ...]
    loss: Mapping[str, State] | None
    loss_casts: tuple[str, ...]
    updates: Mapping[str, str]
    prepare: Body | None
    forward: Body
    source: tuple[str, ...] = ()
    results: tuple[ResultText, ...] = ()
    time_axes: Mapping[str, int] = field(default_factory=dict)
    slices: int = 1
    staleness: int | None = None
    versions: int = 1

    @property
    def times(self) -> tuple[int, ...]:
        """The size of each axis in time of a step: micro-batches, then slices where there are some."""
        return (self.micro_batches, self.slices) if self.slices > 1 else (self.micro_batches,)


@dataclass(frozen=True)
class RoleText:
    """One file. `user`: attribute of `user` -> registered name of the operator."""

    file: str
    ranks: tuple[int, ...]
    schedule: tuple[str, ...]
    schedule_line: int
    stages: tuple[StageText, ...]
    user: Mapping[str, str]
    problems: tuple[OutsideGrammar, ...] = ()


# Arguments of the text as values: literals, dtypes, layouts, affine expressions of coordinates, and variables.

_STATES: dict[str, type] = {"Sharded": Sharded, "Partial": Partial, "Replicated": Replicated, "Invariant": Invariant}
_SHOWN = 120  # letters of a line that cannot be read


class Unreadable(Exception):
    """The text is not what a rank program may say. `args[0]` is why."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(why)
        self.line: int = getattr(node, "lineno", 0)


def cannot_be_read(source: Sequence[str], number: int, error: Exception) -> str:
    """Say that a line is none that the prover knows what to make of: reading it failed with this error."""
    text = source[number - 1].strip() if 0 < number <= len(source) else ""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"`{shown}` cannot be read: {type(error).__name__}: {str(error)[:_SHOWN]}"


def read_value(node: ast.expr) -> Any:
    """Return the value of an argument.

    Raises Unreadable for what depends on the rank in any other way than affinely.
    """
    match node:
        case ast.Constant(value=value):
            return _bounded(node, value)
        case ast.Name(id=name):
            return Mark.STAGE if name == "self" else Variable(name)
        case ast.Attribute():
            return _attribute(node)
        case ast.List(elts=items):
            return [read_value(i) for i in items]
        case ast.Tuple(elts=items):
            return tuple(read_value(i) for i in items)
        case ast.Dict(keys=keys, values=values):
            if None in keys:
                raise Unreadable(node, f"`{ast.unparse(node)}` unpacks a dict")
            return {read_value(k): read_value(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.Call():
            return _call(node)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _arithmetic(node, operator.mul, -1, read_value(operand))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _arithmetic(node, operator.add, read_value(left), read_value(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _arithmetic(node, operator.mul, read_value(left), read_value(right))
        case ast.BinOp(left=left, op=ast.Sub() | ast.Div() as op, right=right):
            return _of_numbers(node, op, read_value(left), read_value(right))
        case ast.Subscript(value=ast.Tuple() as table, slice=place):
            return _entry(node, read_value(table), read_value(place))
        case ast.IfExp() | ast.Compare() | ast.BoolOp():
            raise Unreadable(node, f"`{ast.unparse(node)}` makes ranks or runs do different things")
    raise Unreadable(node, f"`{ast.unparse(node)}` is no argument that a rank program has")


def _entry(node: ast.Subscript, table: Any, place: Any) -> Any:
    """`(7, 7, 6)[self.tp.index]`."""
    axes = [axis for axis, times in place.terms if times == 1] if isinstance(place, Expression) else []
    if len(axes) != 1 or place != index(axes[0]) or not all(type(value) is int for value in table):
        raise Unreadable(node, f"`{ast.unparse(node)}` is no table of whole numbers by the index of an axis")
    return by_index(axes[0], table)


def _attribute(node: ast.Attribute) -> Any:
    match node:
        case ast.Attribute(value=ast.Name(id="dtypes"), attr=name):
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise Unreadable(node, f"`{ast.unparse(node)}` is no dtype")
            return DType(name)
        case ast.Attribute(value=ast.Name(id="self"), attr="device"):
            return Mark.DEVICE
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return Variable(name, stored=True)
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=axis), attr="index"):
            return index(axis)
    raise Unreadable(node, f"`{ast.unparse(node)}` is no argument that a rank program has")


def _call(node: ast.Call) -> Any:
    given = [read_value(a) for a in node.args]
    named = {k.arg: read_value(k.value) for k in node.keywords if k.arg}
    if len(named) < len(node.keywords):
        raise Unreadable(node, f"`{ast.unparse(node)}` unpacks keyword arguments, or names one twice")
    match node.func:
        case ast.Name(id=name) if name in _STATES:
            try:
                state = _STATES[name](*given, **named)
            except TypeError as error:
                raise Unreadable(node, f"`{ast.unparse(node)}`: {error}") from error
            if not _is_state(state):
                raise Unreadable(node, f"`{ast.unparse(node)}` is no layout")
            return state
        case ast.Name(id="float" | "complex" as name) if given and not named:
            try:
                return float(*given) if name == "float" else complex(*given)
            except (TypeError, ValueError) as error:
                raise Unreadable(node, f"`{ast.unparse(node)}`: {error}") from error
    raise Unreadable(node, f"`{ast.unparse(node)}` stands inside of another call")


def _bounded(node: ast.expr, value: Any) -> Any:
    """Return the value, if it is no whole number of more bits than those that torch calculates with."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise Unreadable(node, "a whole number has more than 64 bits")
    return value


def _is_state(state: Any) -> bool:
    """Return whether the numbers of a state are valid: dims from 0, and cuts either by sections or by an outer."""
    if isinstance(state, Partial):
        return state.reduction in ("sum", "max")
    if not isinstance(state, Sharded):
        return True
    if not isinstance(state.sections, tuple) or not isinstance(state.sizes, tuple):
        return False
    whole = all(type(n) is int and n >= 0 for n in (state.dim, state.outer, *state.sections, *state.sizes))
    return whole and state.outer >= 1 and not (state.sections and (state.outer > 1 or state.sizes))


def _of_numbers(node: ast.expr, op: ast.operator, left: Any, right: Any) -> int | float:
    """Return a difference or a quotient of two plain numbers."""
    if type(left) in (int, float) and type(right) in (int, float) and (isinstance(op, ast.Sub) or right != 0):
        difference: int | float = left - right if isinstance(op, ast.Sub) else left / right
        _bounded(node, difference)
        return difference
    raise Unreadable(node, f"`{ast.unparse(node)}` is arithmetic that a rank program does not have")


def _arithmetic(node: ast.expr, function: Any, left: Any, right: Any) -> Any:
    numbers = (int, float, complex)
    plain = isinstance(left, numbers) and isinstance(right, numbers)
    affine = isinstance(left, int | Expression) and isinstance(right, int | Expression)
    both = isinstance(left, Expression) and isinstance(right, Expression)
    if plain or (affine and not (both and function is operator.mul)):
        return _bounded(node, function(left, right))
    raise Unreadable(node, f"`{ast.unparse(node)}` is arithmetic that a rank program does not have")


STREAM = ("staleness", "versions")  # what a stage of a stream declares


def read_stream(node: ast.ClassDef, found: Mapping[str, ast.expr]) -> tuple[int | None, int]:
    """Return the staleness of a stage and the versions that it keeps; none, and one, where it declares neither.

    Raises Unreadable for what the runtime would not take.
    """
    values = [read_value(found[name]) for name in STREAM if name in found]
    if not values:
        return None, 1
    if len(values) != len(STREAM) or not all(type(v) is int for v in values) or values[0] < 0 or values[1] < 1:
        raise Unreadable(node, f"`class {node.name}` declares {values} of {' and '.join(STREAM)}")
    return values[0], values[1]
