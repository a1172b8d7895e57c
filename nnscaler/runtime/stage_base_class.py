"""The base class of the stages of a generated role module, and the declarations that it reads.

A role module defines `STAGES`, `RANKS` and `SCHEDULE`; a stage declares where its tensors come from and go to, and
`forward` computes one micro-batch. Shapes of stored tensors are logical; those of messages are local.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor

from nnscaler.instructions import FORM, SLICES, Instruction, StagePasses, batches_written, check_order, shows_its_middle
from nnscaler.layout import MICRO, SLICE, State
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.communication.token_slice_cache import KeptRows
from nnscaler.runtime.shards import ravel
from nnscaler.runtime.torch_compile import GraphNumbers


def parse_schedule(text: str, stages: Sequence[type[Stage]]) -> tuple[Instruction, ...]:
    """Read the instructions of one device.

    A program may be run without all of its backwards, as one without a loss is. Raises ProgramError for anything else
    that `check_order` finds.
    """
    written = batches_written(text.split())
    passes = {
        s.index: StagePasses(times_of(s) if s.staleness is None else (written,), "may", s.staleness, s.versions)
        for s in stages
    }
    instructions, mistakes = check_order(text.split(), passes)
    if not all(map(shows_its_middle, passes.values())):
        raise ProgramError(f"SCHEDULE is written for {written} batches, and does not show how a stream goes on")
    if mistakes:
        sliced = any(stage.slices > 1 for stage in stages)
        raise ProgramError(f"SCHEDULE {mistakes[0].message}; {SLICES if sliced else FORM}")
    return instructions


INPUT_GRADIENT = (
    "nnscaler_gradient_of_"  # of parameters that are zero and are added to an input, whose gradient they get
)
LOSS = "loss"  # its name among the results

Ranks = tuple[int, ...]
Size = int | Mapping[str, tuple[int, ...]]  # of a dim; `{"dp": (3, 2)}`: by the rank's index on an axis
Slices = tuple[tuple[int, int, int], ...]  # (start, stop, step) of each dim
Message = tuple[int, int, Slices, Slices]  # source rank, destination rank, slices there and here


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable tensor.

    fqn      its name in the model
    shape    logical
    dtype    its name
    states   by axis; an axis without one is Invariant
    reduce   axes on which each rank's gradient is a partial sum
    copies   the ranks of every stage that holds it, this one included, position by position (empty: only this stage)
    used     False for one that no operation reads: its gradient stays None
    rest     states by which it is sharded further between steps (ZeRO-1, ZeRO-2), on axes where the text reads it whole
    scatter  when its gradient is divided like `rest`: after the "step" (ZeRO-1), or after each "micro_batch" (ZeRO-2)
    master   its dtype between steps; empty: `dtype`
    sums     dtype in which its gradient is summed over ranks; empty: float32 for one of half precision, else its own
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    states: Mapping[str, State] = field(default_factory=dict)
    reduce: tuple[str, ...] = ()
    copies: tuple[Ranks, ...] = ()
    used: bool = True
    rest: Mapping[str, State] = field(default_factory=dict)
    scatter: str = "step"
    master: str = ""
    sums: str = ""

    @property
    def at_rest(self) -> Mapping[str, State]:
        """Return the states between steps: what the optimizer, checkpoints and the verification see."""
        return {**self.states, **self.rest} if self.rest else self.states

    @property
    def summed(self) -> tuple[str, ...]:
        """Return the axes over which the gradient of the tensor at rest is still a partial sum."""
        return tuple(axis for axis in self.reduce if axis not in self.rest)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A stored tensor without gradient."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    states: Mapping[str, State] = field(default_factory=dict)

    @property
    def at_rest(self) -> Mapping[str, State]:
        """Return the states between steps, which are those in a step."""
        return self.states


@dataclass(frozen=True, slots=True)
class Constant(Buffer):
    """A tensor that the model's code made, stored with the program."""


@dataclass(frozen=True, slots=True)
class Input:
    """This rank's piece of an input of the step; the axis "micro" cuts micro-batches."""

    name: str
    states: Mapping[str, State] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Receive:
    """A tensor that an earlier stage computes.

    key          name of the tensor
    stage        that computes it
    shape        local
    dtype        its name
    peers        `peers[i]` sends to this stage's i-th rank
    needs_grad   whether its gradient goes back
    """

    key: str
    stage: int
    shape: tuple[Size, ...]
    dtype: str
    peers: Ranks
    needs_grad: bool = True


@dataclass(frozen=True, slots=True)
class Send:
    """An output of this stage that a later stage reads.

    key          name of the tensor
    stage        that reads it
    peers        this stage's i-th rank sends to `peers[i]`
    needs_grad   whether its gradient comes back
    """

    key: str
    stage: int
    peers: Ranks
    needs_grad: bool = True


@dataclass(frozen=True, slots=True)
class Exchange:
    """A tensor that crosses to a mesh of another shape, as a `receives` entry on one side and a `sends` entry on the
    other.

    key          name of the tensor
    stage        the stage on the other side
    messages     from producer to consumer ranks; the pieces that reach a rank tile its local tensor
    backward     from consumer to producer ranks, for the gradient
    shape        local
    dtype        its name
    needs_grad   whether its gradient goes back
    """

    key: str
    stage: int
    messages: tuple[Message, ...]
    backward: tuple[Message, ...]
    shape: tuple[Size, ...]
    dtype: str = "float32"
    needs_grad: bool = True


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss that a stage returns.

    states  per axis ("micro" included): Invariant or Partial
    casts   dtypes to which the whole loss is cast, in order
    """

    states: Mapping[str, State] = field(default_factory=dict)
    casts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that the model returns besides its loss, as this stage makes it.

    shape    logical, of the whole step
    dtype    its name
    states   by axis, "micro" included; one that is missing holds the whole
    """

    shape: tuple[int, ...]
    dtype: str
    states: Mapping[str, State] = field(default_factory=dict)


@dataclass(slots=True)
class RunContext:
    """The state of a run that operators may read: dropout needs it. The executor keeps it up to date.

    seed      of the run
    dropout   whether numbers are drawn by the seed; False: nothing is dropped
    step      optimizer steps that were made
    passes    batches that were run, by which random numbers are drawn: the batches of one step, and a step that is made
              again because its gradients were not finite, draw other numbers
    """

    seed: int = 0
    dropout: bool = True
    step: int = 0
    passes: int = 0


Observer = Callable[[str, Tensor], None]


class Stage:
    """Base of the stages of a role module. The executor makes one object per rank, with an `AxisGroup` for each axis
    (`micro` is the current micro-batch, `slice` the slice of it, if there are `slices`, and an axis of `time_axes` the
    current piece of its region) and a tensor for each declared parameter, frozen parameter, buffer and constant.
    Subclasses define `forward`, and `prepare` where `prepare_inputs` is not empty."""

    index: ClassVar[int] = 0
    ranks: ClassVar[Ranks] = (0,)
    axes: ClassVar[Mapping[str, int]] = {}
    micro_batches: ClassVar[int] = 1
    staleness: ClassVar[int | None] = None  # of a stream: the updates that a forward goes without
    versions: ClassVar[int] = 1  # of its parameters that are kept at a time
    slices: ClassVar[int] = 1
    time_axes: ClassVar[Mapping[str, int]] = {}
    parameters: ClassVar[Mapping[str, Parameter]] = {}
    frozen: ClassVar[Mapping[str, Parameter]] = {}
    buffers: ClassVar[Mapping[str, Buffer]] = {}
    constants: ClassVar[Mapping[str, Buffer]] = {}
    inputs: ClassVar[Mapping[str, Input]] = {}
    prepare_inputs: ClassVar[Mapping[str, Input]] = {}
    receives: ClassVar[Mapping[str, Receive | Exchange]] = {}
    sends: ClassVar[tuple[Send | Exchange, ...]] = ()
    loss: ClassVar[Loss | None] = None
    results: ClassVar[Mapping[str, Result]] = {}
    updates: ClassVar[Mapping[str, str]] = {}
    graph_number: int | None = None  # by which operators in graphs of torch.compile find it

    micro: AxisGroup
    slice: AxisGroup
    device: torch.device
    context: RunContext
    at_rest: dict[str, torch.nn.Parameter]
    prepare: Callable[..., Mapping[str, Any]]
    forward: Callable[..., Mapping[str, Tensor]]

    def __init__(self, rank: int, context: RunContext, observer: Observer | None = None) -> None:
        self.rank = rank
        self.device = torch.device("cpu")  # the builder names another
        self.context = context
        self.at_rest = {}  # parameter -> its tensor between steps; mostly its leaf
        enter(self, (0,) * len(times_of(self)), None)
        for axis, size in self.time_axes.items():
            setattr(self, axis, AxisGroup(axis, size, 0))
        self._observer = observer

    def coordinates(self) -> dict[str, int]:
        """Return this rank's index on every axis, and the current piece, slice and micro-batch."""
        return {axis: getattr(self, axis).index for axis in self.sizes()}

    def sizes(self) -> dict[str, int]:
        return {**self.axes, **self.time_axes, **sizes_in_time(self)}

    def in_piece(self, function: Callable[..., Any], **index: int) -> Callable[..., Any]:
        """Return the function at a place on an axis in time (`co=1`), also where it runs again in backward."""
        ((axis, number),) = index.items()

        def run(*tensors: Any) -> Any:
            with self.at_piece(axis, number):
                return function(*tensors)

        return run

    @contextmanager
    def at_piece(self, axis: str, number: int) -> Iterator[None]:
        """Go to a place on an axis in time, and back."""
        outside = getattr(self, axis)
        setattr(self, axis, AxisGroup(axis, self.time_axes[axis], number))
        try:
            yield
        finally:
            setattr(self, axis, outside)

    def local(self, shape: tuple[Size, ...]) -> tuple[int, ...]:
        """Return this rank's numbers of a declared shape."""
        return tuple(
            size if isinstance(size, int) else sum(by[getattr(self, axis).index] for axis, by in size.items())
            for size in shape
        )

    def _observe(self, name: str, value: Any) -> None:
        """Hand a value to the observer, after each assignment in a program that was loaded for observation."""
        if self._observer is not None and isinstance(value, Tensor):
            self._observer(name, value)


def enter(stage: Stage, at: tuple[int, ...], kept: KeptRows | None) -> None:
    """Go to a place in time: the micro-batch, and its slice if there are some. `kept`: the rows of its slices."""
    stage.micro = AxisGroup(MICRO, stage.micro_batches, at[0])
    if stage.slices > 1:
        stage.slice = AxisGroup(SLICE, stage.slices, at[1], kept=kept)


def times_of(stage: Stage | type[Stage]) -> tuple[int, ...]:
    """Return the size of each axis in time of a step: micro-batches, then slices where there are some."""
    return (stage.micro_batches, stage.slices) if stage.slices > 1 else (stage.micro_batches,)


def is_observed(stage: Stage) -> bool:
    """Return whether the values of a stage are handed to an observer."""
    return stage._observer is not None


def number_of(stage: Stage | type[Stage], at: tuple[int, ...]) -> int:
    """Return the number of a place in time: the micro-batch where there are no slices, else that of its slice."""
    names = (MICRO, SLICE)[: len(at)]
    return ravel(dict(zip(names, at, strict=True)), dict(zip(names, times_of(stage), strict=True)))


def sizes_in_time(stage: Stage | type[Stage]) -> dict[str, int]:
    """Return the axes in time of a step with their sizes, in the order of layouts."""
    return {**({SLICE: stage.slices} if stage.slices > 1 else {}), MICRO: stage.micro_batches}


def place_in_time(stage: Stage | type[Stage], number: int) -> dict[str, int]:
    """Return the place with this number on the axes in time: the inverse of `number_of`."""
    at = dict(zip((MICRO, SLICE), divmod(number, stage.slices), strict=True))
    return {axis: at[axis] for axis in sizes_in_time(stage)}


def is_trained(stage: Stage | type[Stage]) -> bool:
    """Return whether a gradient comes to the stage: of the loss, or of what it sends."""
    return stage.loss is not None or any(send.needs_grad for send in stage.sends)


def may_gather_again(stage: Stage) -> bool:
    """Return whether backward gathers parameters again that the text of a stage gathers where it reads them.

    It does for what autograd saves, which must be the same on all ranks. It need not be where their parts of a batch
    have unequal sizes (a product may copy a parameter, or not). Of a stage that is compiled, whose graph gathers, it is
    asked before.
    """
    states = [state for source in stage.inputs.values() for state in source.states.values()]
    sizes = [size for receive in stage.receives.values() for size in receive.shape]
    unequal = any(getattr(state, "sizes", ()) for state in states) or not all(isinstance(n, int) for n in sizes)
    if unequal or "forward" in vars(stage):
        return False
    return any(name in ("all_gather", "all_gather_replicated") for code in codes_of(stage) for name in code.co_names)


def codes_of(stage: Stage) -> list[CodeType]:
    """Return the code of the text of a stage's forward, and of the functions in it."""
    codes = [type(stage).forward.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return codes


def place_of(stage: Stage) -> str:
    """file:line of the stage's forward: where its messages are declared to come and go."""
    code = type(stage).forward.__code__  # of the text, also where another forward was compiled from it
    return f"{code.co_filename}:{code.co_firstlineno}"


def piece_shape(slices: Slices) -> tuple[int, ...]:
    return tuple(len(range(*s)) for s in slices)


def as_index(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(*s) for s in slices)


numbered_stages: GraphNumbers[Stage] = GraphNumbers()
