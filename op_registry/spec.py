"""The record of one operator: everything that the compiler and the checker know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from op_registry.call import AxisShard, Call
from op_registry.infer_torch_schema import returns_alias
from op_registry.source_location import SourceLocation

AnnotationResult = str | tuple[str, Mapping[str, int]]  # the text, and sizes that shapes alone do not determine
AnnotationFunction = Callable[[Call], AnnotationResult]
LinearSets = tuple[frozenset[int], ...]
Shards = Mapping[str, tuple[AxisShard, ...]]
Moves = Literal["value", "cast", "reshape", "unit dims", "expand", "transpose", "permute", "part", "pad"]


@dataclass(frozen=True, slots=True)
class SchemaParameter:
    """A parameter of a registered operator.

    name      of the parameter
    tensor    whether it is a tensor or a list of them
    default   the value in a call that leaves it out
    """

    name: str
    tensor: bool
    default: Any = None


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """The facts of one operator.

    name           `aten.linear.default`, `nnscaler.ce_pick`, or a registered name such as `my_op`
    annotation     text in the annotation language, or a function from the call to it
    linear         sets of tensor arguments (by index) in which the operator is jointly linear: partial sums in all
                   of a set give a partial sum. May be a function of the call. Affine calls have none
    contiguous     identifiers that may only be split into contiguous blocks by one axis (their hook uses an offset)
    shape_argument (position, keyword, output): that argument lists the sizes of that output, and follows its shard
    circulates     identifiers of the results, each with one of operands that lack it: both may be split over one axis,
                   and what lacks the first is passed around the axis, inside of what `localize` makes of the call
    localize       rewrites a call for one shard; arguments are (call, shards by identifier); may change the operator.
                   Raises `Refusal` with a reason where it cannot
    uneven         shards may have unequal sizes. None: they may where no hook rewrites the call; a hook that reads
                   `AxisShard.sizes` (`op_registry.rank_expression` does) says True
    flops          multiply-add pairs times two of one call, from the sizes of identifiers; None: the compiler counts
    random         draws random numbers, of the runtime's own: it is told its place
    draws_if       positions of arguments (a probability, a switch): torch draws where all of them are true
    moves          every element of the results is one of the first operand: how it is rearranged; None: it computes
                     "value"      not at all                "reshape"    in the same order, in another shape
                     "cast"       in another dtype          "unit dims"  dims of size 1 come or go
                     "expand"     dims are repeated         "transpose"  dims change places; done twice it is undone
                     "part"       some of it, or pieces     "permute"    dims in another order
                     "pad"        with numbers around it
    detached       outputs without a gradient although they may be floats: all of them (True), or these
    gathers        reads of its first operand what indices point at, as much as it writes
    keeps_nothing  its derivative reads no values, although it is not linear: `x + 1`, a cast
    keeps_result   its derivative reads what it makes, and no operand: `exp`, `relu`
    hands_on       its derivative is the gradient as it comes, summed where an operand was broadcast
    backward_flops floating point operations of backward for each of forward: two products for one
    target         the Python callable of a registered operator
    parameters     the schema's parameters in order, of a registered operator; empty: not known
    where          file and line of a user's operator, and `qualname`, its name in that file
    callers        the files that were running when it was registered, the innermost first, up to an import
    """

    name: str
    annotation: str | AnnotationFunction
    linear: LinearSets | Callable[[Call], LinearSets] = ()
    contiguous: frozenset[str] = frozenset()
    shape_argument: tuple[int, str, int] | None = None
    circulates: tuple[tuple[str, str], ...] = ()
    localize: Callable[[Call, Shards], Call] | None = None
    uneven: bool | None = None
    flops: Callable[[Mapping[str, int]], int] | None = None
    random: bool = False
    draws_if: tuple[int, ...] = ()
    moves: Moves | None = None
    detached: bool | frozenset[int] = False
    gathers: bool = False
    keeps_nothing: bool = False
    keeps_result: bool = False
    hands_on: bool = False
    backward_flops: float = 2.0
    gradient: Literal["derivative", "custom"] = "derivative"
    sample_inputs: Callable[[], Any] | None = None
    target: Callable[..., Any] | None = None
    where: SourceLocation | None = None
    qualname: str | None = None
    callers: tuple[str, ...] = ()
    parameters: tuple[SchemaParameter, ...] = ()

    @property
    def allows_uneven(self) -> bool:
        """Whether its shards may have unequal sizes: what `uneven` says, else whether no hook rewrites its calls."""
        return self.localize is None if self.uneven is None else self.uneven

    @property
    def view(self) -> bool:
        """Return whether its results lie in its first operand's memory, as torch's schema says.

        A cast does where it changes nothing, which no graph has. Where strides do not allow it, `reshape` copies.
        """
        return self.moves != "cast" and returns_alias(self.name)

    def is_detached(self, output: int) -> bool:
        """Return whether torch connects this output to no input."""
        return self.detached if isinstance(self.detached, bool) else output in self.detached


class Refusal(Exception):
    """A `localize` hook (or a split) cannot do this shard; the message says why, and what would work."""
