"""The engine of a part of a model: forward by itself, and backward from the state in which that forward ran."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from op_registry.registry import facts_of

from nnscaler.layout import Sharded, States
from nnscaler.manifest import ResultRecord
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT, Stage
from nnscaler.runtime.training.autocast_on_any_device import dtype_named
from nnscaler.runtime.training.cut_batch import in_rows
from nnscaler.runtime.training.model_outputs import joined, sendable
from nnscaler.training.engine import Batch, Engine
from nnscaler.training.model_part.compile_submodule_as_program import Kinds, PartProgram
from nnscaler.training.program_on_rank import EngineSettings, Running, named_buffers
from nnscaler.training.programs_by_batch_size import Shapes, agreed, from_rank_0, sample_of
from nnscaler.training.user_loop.refuse_torch_calls_on_shards import watched


@dataclass(frozen=True)
class PartCall:
    """A call of a part, with all that a backward of it needs besides its inputs.

    training   the mode that it was in
    passes     batches that were run before it, by which random numbers are drawn
    buffers    of the model, before it
    rows       of each data part
    structure  how the module returns its outputs
    outputs    by name
    """

    training: bool
    passes: int
    buffers: Mapping[str, Tensor]
    rows: tuple[int, ...]
    structure: str
    outputs: Mapping[str, Tensor] = field(default_factory=dict)

    def without_outputs(self) -> PartCall:
        """Return what backward needs: autograd has the outputs."""
        return replace(self, outputs={})


class PartEngine(Engine):
    """A part of a model on one rank.

    part   what was compiled
    """

    def __init__(
        self, part: PartProgram, communicator: Communicator | None = None, settings: EngineSettings | None = None
    ) -> None:
        super().__init__(part.program, communicator, settings)
        self.part = part
        self._drawn = {op.name for op in part.program.graph.operations if facts_of(op.operator).random}
        self._tell_of_equal_draws()
        self._counts = False
        self._everyone = tuple(range(self.world_size))
        told = self.communicator.all_gather(torch.tensor([self.data_part.index], device=self.device), self._everyone)
        self._part_of = [int(index) for index in told]  # by rank
        self._first_of = [self._part_of.index(index) for index in range(self.data_part.count)]
        kinds = {
            e.name: (e.shape, part.program.inputs[e.name].dtype)
            for e in self.manifest.inputs
            if self._is_cotangent(e.name)
        }
        self._kinds: dict[Shapes, Kinds] = {
            tuple((n, s) for n, s in self._first_size.shapes if not self._is_cotangent(n)): kinds
        }

    def _tell_of_equal_draws(self) -> None:
        """Warn of another part of this rank that draws the same numbers: they are a function of seed and operation."""
        for other in watched() if self._drawn and self.rank == 0 else ():
            if not isinstance(other, PartEngine) or other is self or other.rank != self.rank:
                continue
            equal = sorted(self._drawn & other._drawn)
            if equal and other.settings.seed == self.settings.seed:
                message = (
                    f"two parts draw the same random numbers, as in `{equal[0]}`: both have seed {other.settings.seed}"
                )
                warnings.warn(f"{message}; give one of them another, as settings={{'seed': 1}}", stacklevel=4)
                return

    def optimizer(
        self,
        cls: type[Any],
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        only: Callable[[str, tuple[int, ...]], bool] | None = None,
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """Return an optimizer as `Engine.optimizer`. Its steps, or those of the first of several, are counted as those
        of the run: a call of the part is none."""
        made = super().optimizer(cls, groups, only=only, **defaults)
        if not self._counts:
            made.register_step_post_hook(self._count)
            self._counts = True
        return made

    def _count(self, *_: object) -> None:
        self.context.step += 1

    # -- forward and backward -------------------------------------------------------------------------------------

    def forward(self, inputs: Mapping[str, Tensor], training: bool) -> PartCall:
        """Run forward of this data part's rows. Every rank calls it. Raises as `Engine.step`."""
        shapes, rows = agreed(inputs, self.communicator, self._carried, self.data_part, self.context.passes < 2)
        zeros = {name: self._zeros(name, kind, rows) for name, kind in self._kinds_for(shapes, inputs).items()}
        before = dict(self._buffers)
        running, given = self._prepared(self._cast({**inputs, **zeros}), training=training)
        with self._by_itself():
            running.executor.forward_only(given, keep=None, update=training)
        call = PartCall(training, self.context.passes, before, rows, running.program.manifest.returns.structure)
        if training:
            self._buffers.update(named_buffers(running.executor))
            self.context.passes += 1
        return replace(call, outputs=self._outputs(running, rows))

    def backward(
        self, call: PartCall, inputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Run a call once more, and backward from gradients of its outputs. Every rank calls it.

        Returns gradients of the inputs by name, and of `parameters` in their order; the engine is left as it was.
        Those of parameters, and of inputs that all data parts have whole, are means over the data parts, as those of
        the losses of the parts are.
        """
        parts = self.data_part.count
        given = {name: self._cotangent(name, gradients[output]) for output, name in self.part.cotangents.items()}
        running, batch = self._prepared(self._cast({**inputs, **given}), training=call.training)
        executor, tensors = running.executor, self._at_rest(running)
        kept, passes = [tensor.grad for tensor in tensors], self.context.passes
        executor.take_buffers(call.buffers)
        try:
            for tensor in tensors:
                tensor.grad = None
            self.context.passes = call.passes
            with self._by_itself():
                executor.step(batch, last=False)
            of_inputs = {name: self._of_input(running, name, call.rows) for name in self.part.gradients}
            own = [tensor.grad for tensor in self.parameters.values()]
        finally:
            for tensor, gradient in zip(tensors, kept, strict=True):
                tensor.grad = gradient
            self.context.passes = passes
            executor.take_buffers(self._buffers)
        if parts > 1:
            own = [None if gradient is None else gradient / parts for gradient in own]
            of_inputs = {n: g if n in self._carried else g / parts for n, g in of_inputs.items()}
        return of_inputs, own

    def _prepared(self, batch: Batch, *, training: bool) -> tuple[Running, dict[str, Tensor]]:
        with self._by_itself():
            return super()._prepared(batch, training=training)

    def _by_itself(self) -> AbstractContextManager[object]:
        """Autocast around a call does not reach in: backward would not see it."""
        return torch.autocast(self.device.type, enabled=False)

    def _cast(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return floating tensors in the dtypes of the program: what is around the part may be in another precision."""
        known = self.part.program.inputs
        if self.settings.dtype is not None:
            return dict(batch)  # the executor casts to that
        return {n: t.to(known[n].dtype) if t.is_floating_point() else t for n, t in batch.items()}

    # -- sizes ----------------------------------------------------------------------------------------------------

    def _is_cotangent(self, name: str) -> bool:
        return name in self.part.cotangents.values()

    def _kinds_for(self, shapes: Shapes, inputs: Mapping[str, Tensor]) -> Kinds:
        """Return shape and dtype of the global cotangents for inputs of these shapes."""
        if shapes not in self._kinds:
            known = self.part.program.inputs

            def asked() -> Kinds:
                with self._by_itself():
                    return self.part.kinds(sample_of(shapes, inputs, known))

            self._kinds[shapes] = from_rank_0(asked, self.communicator, f"tracing the part for {dict(shapes)}")
        return self._kinds[shapes]

    def _zeros(self, name: str, kind: tuple[tuple[int, ...], torch.dtype], rows: Sequence[int]) -> Tensor:
        shape, dtype = kind
        if name in self._carried:
            shape = (rows[self.data_part.index], *shape[1:])
        return torch.zeros((), dtype=dtype, device=self.device).expand(shape)

    def _cotangent(self, name: str, gradient: Tensor) -> Tensor:
        """Return the gradient of an output as the program takes it: rows of this data part, or the sum over the parts
        of that of an output which all of them have whole."""
        gradient = gradient.to(self.device)
        if name in self._carried or self.data_part.count == 1:
            return gradient
        first = self._first_of[self.data_part.index] == self.rank
        return self.communicator.all_reduce(gradient if first else torch.zeros_like(gradient), self._everyone)

    # -- what comes back ------------------------------------------------------------------------------------------

    def _outputs(self, running: Running, rows: Sequence[int]) -> dict[str, Tensor]:
        executor = running.executor
        held = executor.results
        executor.forget_results()
        found: dict[str, Tensor] = {}
        for record in running.program.manifest.returns.results[1:]:  # the first is the loss
            stage = next((s for s in executor.stages.values() if record.name in s.results), None)
            states = {} if stage is None else stage.results[record.name].states
            by_row = self._has_rows(record)
            piece = held.get(record.name)
            found[record.name] = self._here(running, record, stage, states, piece, rows if by_row else ())
        return found

    def _has_rows(self, record: ResultRecord) -> bool:
        """Return whether dim 0 of an output is the batch: as it is in the sample batch."""
        name = self.part.cotangents.get(record.name)
        if name is not None:
            return name in self._carried
        first = next((r for r in self.manifest.returns.results if r.name == record.name), record)
        batch = next((entry.shape[0] for entry in self.manifest.inputs if entry.shape), None)
        return bool(first.shape) and first.shape[0] == batch

    def _of_input(self, running: Running, name: str, rows: Sequence[int]) -> Tensor:
        fqn = INPUT_GRADIENT + name
        held = ((s, a, d) for s in running.stages for a, d in s.parameters.items() if d.fqn == fqn)
        declared, attribute, description = next(held)
        dtype = description.master or description.dtype
        record = ResultRecord(name, description.shape, dtype, tuple(declared.ranks))
        stage = running.executor.stages.get(declared.index) if self.rank in record.ranks else None
        piece: Tensor | None = None
        states: States = {}
        if stage is not None:
            rest = stage.at_rest[attribute]
            piece, states = torch.zeros_like(rest) if rest.grad is None else rest.grad, description.at_rest
        return self._here(running, record, stage, states, piece, rows if name in self._carried else ())

    def _here(
        self,
        running: Running,
        record: ResultRecord,
        stage: Stage | None,
        states: States,
        piece: Tensor | None,
        rows: Sequence[int],
    ) -> Tensor:
        """Return a tensor that one stage has, on every rank: whole, or this data part's rows of it.

        `stage`, `states`, `piece`: of this rank, where it holds some of it. `rows`: of each data part, for a tensor
        whose dim 0 is the batch; else empty.
        """
        value = None
        if stage is not None and piece is not None:
            left = running.program.data_axes if rows else ()
            left = left if _are_parts(stage, states, left, rows) else ()
            value = joined(stage, states, piece, self.communicator, without=left)
            if rows and not left:
                value = self._own(value, rows)
        if set(record.ranks) >= set(self._everyone):
            assert value is not None
            return value
        dtype = dtype_named(record.dtype, self.settings.dtype)
        mine = value
        for index in range(len(rows) or 1):
            shape = (rows[index], *record.shape[1:]) if rows else record.shape
            source = next(rank for rank in record.ranks if not rows or self._part_of[rank] == index)
            sent = (
                torch.empty(shape, dtype=dtype, device=self.device) if self.rank != source or value is None else value
            )
            got = self.communicator.broadcast(sendable(sent.contiguous()), source, self._everyone).to(dtype)
            if mine is None and (not rows or index == self.data_part.index):
                mine = got
        assert mine is not None
        return mine

    def _own(self, whole: Tensor, rows: Sequence[int]) -> Tensor:
        start = [0, *accumulate(rows)][self.data_part.index]
        return whole[start : start + rows[self.data_part.index]].contiguous()

    @staticmethod
    def _at_rest(running: Running) -> list[torch.nn.Parameter]:
        """Return every tensor whose gradient a step sets, those that stand for inputs included."""
        stages = running.executor.stages.values()
        return list({id(t): t for s in stages for t in (s.at_rest[name] for name in s.parameters)}.values())


def _are_parts(stage: Stage, states: States, axes: Sequence[str], rows: Sequence[int]) -> bool:
    """Return whether the data axes cut a tensor into the rows of the data parts."""
    cut = [states.get(axis) for axis, size in stage.axes.items() if axis in axes and size > 1]
    unequal = {state.sizes for state in cut if isinstance(state, Sharded) and state.sizes}
    return bool(cut) and in_rows(states, stage.axes, axes) and unequal <= {tuple(rows)}  # else all is on its owner
