"""Collect a model's results besides its loss: kept by micro-batch, put together on a rank, and gathered over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nnscaler.layout import IN_STEP, MICRO, SLICE, Invariant, Partial, Sharded, States
from nnscaler.manifest import ResultRecord, Returns
from nnscaler.runtime.communication.communicator import Communicator, ProgramError
from nnscaler.runtime.cut_tensors import join_pieces, nested
from nnscaler.runtime.output_structure import restore
from nnscaler.runtime.shards import Sizes, local_shape
from nnscaler.runtime.stage_base_class import LOSS, Result, Stage
from nnscaler.runtime.training.autocast_on_any_device import dtype_named

Kept = dict[tuple[int, ...], Tensor]  # by place in time: the micro-batch, and its slice if there are some


class Results:
    """The results that one rank keeps of its last run."""

    def __init__(
        self, stages: Mapping[int, Stage], communicator: Communicator, returns: Returns, precision: str | None
    ) -> None:
        self._declared = {name: (stage, r) for stage in stages.values() for name, r in stage.results.items()}
        self._communicator, self._returns, self._precision = communicator, returns, precision
        self._device = next(iter(stages.values())).device
        self._pieces: dict[str, Kept] = {}
        self._wanted: Collection[str] | None = ()

    @property
    def with_loss(self) -> bool:
        """False for a program that is known to have no loss."""
        return not self._returns.results or self._returns.results[0].name == LOSS

    def begin(self, keep: Collection[str] | None) -> None:
        """Forget the last run. `keep`: names of the results to keep of the next one; None: all."""
        self._pieces.clear()
        self._wanted = keep

    def collect(self, stage: Stage, outputs: Mapping[str, Tensor], at: tuple[int, ...]) -> dict[str, Tensor]:
        """Keep the results of a place in time; return the other outputs, so that nothing else holds these.

        Raises ProgramError for one of another shape than is declared.
        """
        for name, declared in stage.results.items():
            if self._wanted is None or name in self._wanted:
                piece = outputs[name].detach()
                wanted = local_shape(declared.shape, declared.states, stage.sizes(), stage.coordinates())
                if tuple(piece.shape) != wanted:
                    raise ProgramError(f"the result {name!r} has shape {tuple(piece.shape)}, and {wanted} is declared")
                self._pieces.setdefault(name, {})[at] = piece
        return {name: value for name, value in outputs.items() if name not in stage.results}

    def local(self) -> dict[str, Tensor]:
        """Put this rank's pieces together over micro-batches, by name."""
        return {name: _over_time(*self._declared[name], pieces) for name, pieces in self._pieces.items()}

    def gathered(self) -> dict[str, Tensor]:
        """Return the logical tensors of all that was kept, on every rank, which all call this."""
        self._check()
        local = self.local()
        found: dict[str, Tensor] = {}
        for record in self._returns.results:
            if record.name == LOSS or (self._wanted is not None and record.name not in self._wanted):
                continue
            value = None
            if record.name in local:
                stage, declared = self._declared[record.name]
                value = joined(stage, declared.states, local[record.name], self._communicator)
            found[record.name] = self._everywhere(record, value)
        return found

    def restored(self, loss: Tensor | None) -> Any:
        """Return what the model returns, on every rank, after a run that kept everything. `loss`: of the run."""
        found = self.gathered()
        for record in self._returns.results:
            if record.name == LOSS:
                found[LOSS] = self._everywhere(record, loss)
        return restore(self._returns.structure, found)

    def _check(self) -> None:
        if self._declared and not self._returns.results:
            raise ProgramError("the executor was not told what the model returns: ExecutorSettings(returns=...)")

    def _everywhere(self, record: ResultRecord, value: Tensor | None) -> Tensor:
        """Give a result that one stage has whole to the ranks of all others."""
        world = range(self._communicator.world_size)
        if set(record.ranks) >= set(world):
            assert value is not None
            return value
        if value is None:
            dtype = dtype_named(record.dtype, self._precision)
            value = torch.empty(record.shape, dtype=dtype, device=self._device)
        sent = sendable(value.contiguous())
        return self._communicator.broadcast(sent, record.ranks[0], tuple(world)).to(value.dtype)


def check_outputs(stage: Stage, outputs: Mapping[str, Tensor]) -> None:
    """Check that a stage returns all that it declares, and that its loss is one number. Raises ProgramError."""
    loss = [LOSS] if stage.loss is not None else []
    missing = sorted({*(send.key for send in stage.sends), *stage.updates, *stage.results, *loss} - set(outputs))
    if missing:
        raise ProgramError(f"forward does not return {missing}")
    if loss and outputs[LOSS].numel() != 1:
        raise ProgramError(f"forward returns a loss of shape {tuple(outputs[LOSS].shape)}, and a loss is one number")


def total_loss(stage: Stage, losses: Kept, communicator: Communicator, precision: str | None = None) -> Tensor:
    """Sum the loss of a step over micro-batches, slices and ranks, on the axes where it is a partial sum, and cast it
    as the model does. `precision`: that of the executor."""
    assert stage.loss is not None
    states = stage.loss.states
    kept = _without_slices(losses, states, lambda values: torch.stack(values).sum(0))
    total = torch.stack(kept).sum(0) if isinstance(states.get(MICRO), Partial) else kept[-1]
    for axis in stage.axes:
        state = states.get(axis, Invariant())
        if isinstance(state, Partial):
            total = communicator.all_reduce(total, getattr(stage, axis).ranks, state.reduction)
        elif not isinstance(state, Invariant):
            raise ProgramError(f"the loss is {state} on axis {axis!r}: only Invariant and Partial are a loss")
    for dtype in stage.loss.casts:
        total = total.to(dtype_named(dtype, precision))
    return total


def joined(
    stage: Stage, states: States, piece: Tensor, communicator: Communicator, without: Collection[str] = ()
) -> Tensor:
    """Gather a tensor over the ranks of its stage, from this rank's piece, which has all micro-batches. `without`: axes
    over which it stays cut. Every rank of the stage calls this."""
    left = {axis: state for axis, state in states.items() if axis not in IN_STEP}
    value = piece.contiguous()
    for axis in stage.axes:
        if axis in without:
            continue
        state, group = left.get(axis), getattr(stage, axis)
        if isinstance(state, Partial):
            value = communicator.all_reduce(value, group.ranks, state.reduction)
        elif isinstance(state, Sharded):
            cut = local_cut(left, stage.axes, axis)
            shapes = [cut.shape_at(value.shape, i) for i in range(group.size)] if cut.sizes else None
            pieces = communicator.all_gather(sendable(value), group.ranks, shapes)
            value = join_pieces([p.to(value.dtype) for p in pieces], cut)
        left.pop(axis, None)
    return value


def _over_time(stage: Stage, declared: Result, kept: Kept) -> Tensor:
    """Put a result together: the slices of each micro-batch, then micro-batches."""

    def together(axis: str, pieces: list[Tensor]) -> Tensor:
        state = declared.states.get(axis)
        if isinstance(state, Partial):
            stacked = torch.stack(pieces)
            return stacked.amax(0) if state.reduction == "max" else stacked.sum(0, dtype=pieces[0].dtype)
        if isinstance(state, Sharded):
            return join_pieces(pieces, local_cut(declared.states, stage.sizes(), axis))
        return pieces[-1]

    return together(MICRO, _without_slices(kept, declared.states, lambda pieces: together(SLICE, pieces)))


def _without_slices(kept: Kept, states: States, join: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """Return what each micro-batch has of all its slices, in order: joined where `states` say that they differ."""
    of: dict[int, list[Tensor]] = {}
    for (micro, *_), piece in sorted(kept.items(), key=lambda entry: entry[0]):
        of.setdefault(micro, []).append(piece)
    return [join(pieces) if SLICE in states else pieces[-1] for _, pieces in sorted(of.items())]


def local_cut(states: States, sizes: Sizes, axis: str) -> Sharded:
    """Return how an axis cuts what all the others of `states` leave of a dim."""
    state = states[axis]
    assert isinstance(state, Sharded)
    along = [(a, s) for a, s in states.items() if isinstance(s, Sharded) and s.dim == state.dim]
    order = nested([(replace(s, dim=0), sizes[a]) for a, s in along])
    return next(replace(cut, dim=state.dim) for position, cut in order if along[position][0] == axis)


def sendable(value: Tensor) -> Tensor:
    """Truth values travel as numbers: not every backend knows them."""
    return value.to(torch.uint8) if value.dtype == torch.bool else value
