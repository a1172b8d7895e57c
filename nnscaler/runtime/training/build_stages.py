"""Make the stage objects of one rank: axis groups, and local tensors cut from the logical state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.communication import differentiable_collectives
from nnscaler.runtime.communication.collectives_in_graphs import communicators
from nnscaler.runtime.communication.communicator import Communicator, ProgramError
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads
from nnscaler.runtime.joint_graphs.change_before_partition import change_joint_graphs
from nnscaler.runtime.joint_graphs.gather_again_in_backward import gather_again
from nnscaler.runtime.joint_graphs.recompute_regions import number_of_region, recompute_regions, regions_in_graphs
from nnscaler.runtime.keep_freed_memory import give_back_freed_memory
from nnscaler.runtime.program.user_operators import UserOperators
from nnscaler.runtime.shards import local_shape, ravel, shard, unravel
from nnscaler.runtime.stage_base_class import (
    INPUT_GRADIENT,
    Buffer,
    Observer,
    Parameter,
    RunContext,
    Stage,
    codes_of,
    numbered_stages,
)
from nnscaler.runtime.torch_compile import apart, compiled, leave_in_python
from nnscaler.runtime.training.autocast_on_any_device import dtype_named, dtype_of_run
from nnscaler.runtime.training.gradients.accumulate_and_reduce import Gradients
from nnscaler.runtime.training.gradients.parameters_of_compiled_stages import compiled_with_parameters
from nnscaler.runtime.training.zero_1_2_and_master_weights import AtRest, divisions_of

State = Mapping[str, Tensor]


Key = tuple[str, int]  # name in the model, position in the stage's mesh


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter of a rank: the leaf that its text reads, and the tensor at rest (one object where they are equal).

    trained  by the program; a user who freezes one that is sets `requires_grad` of the tensor at rest
    """

    leaf: torch.nn.Parameter
    rest: torch.nn.Parameter
    description: Parameter
    trained: bool


class StageBuilder:
    """Builds the stages of one rank; a tensor that two stages hold at the same position is one tensor.

    `given`: parameters of another program for the same model, whose tensors at rest become those of this one. `reads`:
    gathers parameters before the text reads them.
    """

    def __init__(
        self,
        communicator: Communicator,
        state: State,
        precision: str | None,
        device: torch.device,
        run: RunContext,
        given: Mapping[Key, Held] = MappingProxyType({}),
        reads: ParameterReads | None = None,
    ) -> None:
        self._communicator, self._reads = communicator, reads
        self._state = state
        self._precision = precision
        self._device = device
        self._run = run
        self._given = given
        self.held: dict[Key, Held] = {}
        self.resting: list[AtRest] = []  # of all stages, in order

    def build(self, stage_class: type[Stage], observer: Observer | None = None) -> Stage:
        """Raises ProgramError when the rank is not in the stage's mesh, or the state lacks a tensor."""
        rank = self._communicator.rank
        if rank not in stage_class.ranks or prod(stage_class.axes.values()) != len(stage_class.ranks):
            raise ProgramError(
                f"rank {rank}: stage {stage_class.index} runs on ranks {stage_class.ranks} with axes {stage_class.axes}"
            )
        stage = stage_class(rank, self._run, observer)
        stage.device = self._device
        self._connect(stage)
        for trained, declared in ((True, stage.parameters), (False, stage.frozen)):
            for name, description in declared.items():
                held = self._parameter(stage, description, trained)
                setattr(stage, name, held.leaf)
                stage.at_rest[name] = held.rest
                if self._reads is not None:
                    self._reads.know([held.leaf])
        for name, stored in (*stage.buffers.items(), *stage.constants.items()):
            setattr(stage, name, self._cut(stage, stored))
        return stage

    def _connect(self, stage: Stage) -> None:
        here = unravel(stage.ranks.index(stage.rank), stage.axes)
        for axis, size in stage.axes.items():
            ranks = tuple(stage.ranks[ravel({**here, axis: i}, stage.axes)] for i in range(size))
            group = AxisGroup(axis, size, here[axis], ranks, self._communicator, reads=self._reads)
            setattr(stage, axis, group)

    def _parameter(self, stage: Stage, description: Parameter, trained: bool) -> Held:
        key = (description.fqn, stage.ranks.index(stage.rank))
        if key in self.held and description.copies:
            return self.held[key]
        known = self._known(stage, description, trained)
        if known is None:
            rest = torch.nn.Parameter(self._cut(stage, description), requires_grad=trained)
        elif trained and not known.trained and known.description.at_rest != description.at_rest:
            rest = torch.nn.Parameter(self._divided(stage, description, known.rest.detach()))
        elif known.trained == trained:
            rest = known.rest
        else:  # the same memory: what trains it in one program is seen by the other
            rest = torch.nn.Parameter(known.rest.detach(), requires_grad=trained)
        if known is not None and not trained:
            description = replace(description, rest=known.description.rest, reduce=(), scatter="step")
        leaf = rest
        dtype = dtype_named(description.dtype, self._precision)
        if description.rest or rest.dtype != dtype:
            shape = local_shape(description.shape, description.states, stage.sizes(), stage.coordinates())
            alike = known is not None and (known.leaf.shape, known.leaf.dtype) == (shape, dtype)
            if known is not None and alike and trained and known.trained:
                leaf = known.leaf
            else:
                leaf = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=self._device), requires_grad=trained)
            self.resting.append(AtRest(leaf, rest, divisions_of(stage, description), description.scatter))
        if known is None:
            rest.description = description  # type: ignore[attr-defined]
        self.held[key] = Held(leaf, rest, description, trained)
        return self.held[key]

    def _known(self, stage: Stage, description: Parameter, trained: bool) -> Held | None:
        """Return the given parameter of this name; one that nothing reads here or there is left out where it lies
        otherwise.

        Where it is divided less here, or there (`one_tensor`), it is gathered: `adopted`, and `_parameter` here. Raises
        ProgramError where it lies otherwise else.
        """
        if description.fqn.startswith(INPUT_GRADIENT):
            return None  # of its own size in every program
        known = self._given.get((description.fqn, stage.ranks.index(stage.rank)))
        if known is None:
            return None
        theirs = known.description
        if one_tensor((description, trained), (theirs, known.trained)):
            return known
        if not (description.used and theirs.used):
            return None
        where = f"rank {stage.rank}, stage {stage.index}: {description.fqn!r}"
        message = f"{where} lies as {dict(description.at_rest)} between steps, and in the program before as"
        raise ProgramError(f"{message} {dict(theirs.at_rest)}")

    def _divided(self, stage: Stage, description: Parameter, whole: Tensor) -> Tensor:
        """Return what rests here of a tensor that another program holds as this one's leaf lies."""
        for division in divisions_of(stage, description):
            whole = division.part(whole, division.index)
        return whole.to(dtype_named(description.master or description.dtype, self._precision)).clone()

    def _cut(self, stage: Stage, description: Parameter | Buffer) -> Tensor:
        if description.fqn.startswith(INPUT_GRADIENT):
            logical: Tensor | None = torch.zeros(()).expand(description.shape)
        else:
            logical = self._state.get(description.fqn)
        where, shape = f"rank {stage.rank}, stage {stage.index}: {description.fqn!r}", tuple(description.shape)
        if logical is None:
            raise ProgramError(f"{where} is not in the state")
        if tuple(logical.shape) != shape:
            raise ProgramError(f"{where} has shape {tuple(logical.shape)} in the state, {shape} in the program")
        try:
            piece = shard(logical.detach(), description.at_rest, stage.sizes(), stage.coordinates())
        except ValueError as error:
            raise ProgramError(f"{where}: {error}") from error
        dtype = description.master if isinstance(description, Parameter) and description.master else description.dtype
        return piece.to(self._device, dtype_named(dtype, self._precision))


def one_tensor(*programs: tuple[Parameter, bool]) -> bool:
    """Return whether two programs may have one tensor for a parameter. Of each: how it lies, and whether it is trained.

    One that does not train it may divide it less between steps than the other.
    """
    (one, trained), (other, both) = programs
    alike = dict(one.at_rest) == dict(other.at_rest)
    return alike or (not (trained and both) and dict(one.states) == dict(other.states))


def taken_over(programs: Iterable[Mapping[Key, Held]]) -> dict[Key, Held]:
    """Return the parameters that one more program over them starts from, of those that several have: where an
    operation reads it, and of these where it is trained."""
    found: dict[Key, Held] = {}
    for key, one in (pair for held in programs for pair in held.items()):
        known = found.get(key)
        if known is None or (one.description.used, one.trained) > (known.description.used, known.trained):
            found[key] = one
    return found


def adopted(stages: Iterable[Stage], held: dict[Key, Held], given: Mapping[Key, Held]) -> tuple[AtRest, ...]:
    """Let a program read its frozen parameters from where another one, which trains them, divides them between steps.

    Changes `held` and the stages; returns what is now to be gathered before a run.
    """
    found: dict[Key, AtRest] = {}
    for stage in stages:
        for name, own in stage.frozen.items():
            key = (own.fqn, stage.ranks.index(stage.rank))
            mine, theirs = held[key], given.get(key)
            if theirs is None or not theirs.trained or mine.rest.shape == theirs.rest.shape:
                continue
            if not (own.used and theirs.description.used):  # it is another tensor, which nothing changes or reads
                continue
            description = replace(own, rest=theirs.description.rest, reduce=(), scatter="step")
            rest = torch.nn.Parameter(theirs.rest.detach(), requires_grad=False)
            stage.at_rest[name] = rest
            found[key] = AtRest(mine.leaf, rest, divisions_of(stage, description), "step")
            held[key] = Held(mine.leaf, rest, description, trained=False)
    return tuple(found.values())


def compile_each(
    stages: Iterable[Stage], communicator: Communicator, gradients: Gradients, reads: ParameterReads
) -> None:
    """Compile the forward of each stage, and with it its backward. Collectives, and gradients on their way, are in the
    graphs where they may be."""
    number = communicators.of(communicator)
    leave_in_python([apart, *vars(differentiable_collectives).values()])
    constant = (dtype_of_run, number_of_region)
    for stage in stages:
        operators = UserOperators.digests_in(type(stage).forward.__globals__)
        make = partial(compiled, constant=constant, several=communicator.world_size > 1, operators=operators)
        stage.graph_number = numbered_stages.of(stage)
        apart_again = _recomputes_apart(stage)
        for axis in () if apart_again else stage.axes:
            setattr(stage, axis, replace(getattr(stage, axis), number=number))
        forward = compiled_with_parameters(stage, gradients, None if apart_again else reads, make)
        stage.forward = forward if apart_again else _with_changed_graphs(forward, stage.context)


def _with_changed_graphs(forward: Callable[..., Any], context: RunContext) -> Callable[..., Any]:
    batches: set[int] = set()

    def run(**arguments: Any) -> Any:
        if len(batches) < 2:
            batches.add(context.passes)
            if len(batches) == 2:  # the first one made the graphs, in a pipeline that of backward after several calls
                give_back_freed_memory()
        change_joint_graphs((recompute_regions, gather_again))
        with regions_in_graphs():
            return forward(**arguments)

    return run


def _recomputes_apart(stage: Stage) -> bool:
    """Return whether the stage's text recomputes regions, and has what a graph ends at: torch has no effects in an
    order in the regions that it can end a graph inside of."""
    names = {name for code in codes_of(stage) for name in code.co_names}
    return "recompute" in names and bool(names & {"ring_attention", "append"})


def stages_of(module: ModuleType, rank: int) -> list[type[Stage]]:
    """Return the stage classes of a role module, by index. Raises ProgramError when the module is not for this rank."""
    ranks = getattr(module, "RANKS", ())
    if rank not in ranks:
        raise ProgramError(f"rank {rank} does not run {module.__name__}, which is for ranks {ranks}")
    return sorted(module.STAGES, key=lambda stage: stage.index)
