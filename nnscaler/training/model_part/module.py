"""A part of a model on many ranks, as a module of an eager model.

    part = nnscaler.parallelize_part(Blocks(), sample, plan="dp=2,tp=2")
    loss = head(part(stem(rows))).mean()  # of this data part's rows
    loss.backward()

A call runs the program forward. Its backward runs it once more, forward and backward, from the state that the call saw:
parameters, buffers, and the numbers that dropout draws.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.join_process_group import ProcessPlace, torchrun_place
from nnscaler.runtime.output_structure import restore
from nnscaler.training.engine import Engine, connected
from nnscaler.training.model_part.compile_submodule_as_program import compile_part
from nnscaler.training.model_part.engine import PartCall, PartEngine
from nnscaler.training.program_on_rank import EngineSettings, joined

_Self = TypeVar("_Self", bound=nn.Module)


def parallelize_part(
    module: nn.Module,
    sample_inputs: Mapping[str, Any] | Sequence[Any],
    *,
    ranks: int | None = None,
    plan: Any = None,
    input_gradients: Collection[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    place: ProcessPlace | None = None,
    **options: Any,
) -> Part:
    """Compile a part of a model, and start it on this rank as a module to be used in an eager one.

    `sample_inputs`: arguments of its forward for one global batch. `ranks`: as many as run, where left out.
    `input_gradients`: names of the inputs that get a gradient; None: all floating ones. `settings`: fields of
    EngineSettings. `place`: as in `start`. `options` and `plan`: of `parallelize`. Every rank calls this.
    Raises NnscalerError as `parallelize`, `compile_part` and `start`.
    """
    chosen = EngineSettings(**(settings or {}))
    place = place or torchrun_place()
    if place is not None:
        joined(place, chosen.device)
    count = ranks or (1 if place is None else place.world_size)
    made = compile_part(module, sample_inputs, ranks=count, plan=plan, input_gradients=input_gradients, **options)
    return Part(PartEngine(made, *connected(made.program, place, chosen)))


class Part(nn.Module):
    """A part of a model. Its forward takes this data part's rows, and returns as the module that it was made of.

    Its parameters are this rank's tensors between steps, by their names in the module. It stays on its device and in
    its dtype whatever `.to` says.

    engine  has the optimizer, the checkpoints and the whole state
    """

    def __init__(self, engine: PartEngine) -> None:
        super().__init__()
        self._engine = engine
        self._tensors = tuple(engine.parameters.values())
        for name, parameter in engine.parameters.items():
            *path, last = name.split(".")
            home: nn.Module = self
            for step in path:
                home = home._modules.setdefault(step, nn.Module()) or home
            home._parameters[last] = parameter  # whatever its name: `engine`, say
        self.train(engine.part.training)

    @property
    def engine(self) -> Engine:
        """The engine of the part's program."""
        return self._engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns: of outputs whose dim 0 is the batch this data part's rows, others whole.

        Gradients go through it unless torch.no_grad says otherwise. Every rank calls it, in the same order, and so the
        backward of each call or of none. Raises NnscalerError: inputs_differ, batch_differs, no_input_gradient.
        """
        part = self._engine.part
        inputs = part.inputs.named(args, kwargs)
        wrong = next((n for n, t in inputs.items() if t.requires_grad and n not in part.gradients), None)
        if wrong is not None and torch.is_grad_enabled():
            message = f"the input {wrong!r} of the part requires a gradient, and the part gives those of "
            help_text = f"name it in input_gradients=..., or call the part with {wrong}.detach()"
            raise NnscalerError("no_input_gradient", f"{message}{list(part.gradients)}", help=help_text)
        wanted = part.trainable or any(tensor.requires_grad for tensor in inputs.values())
        if not (wanted and torch.is_grad_enabled()):
            call = self._engine.forward(inputs, self.training)
            return restore(call.structure, call.outputs)
        calls: list[PartCall] = []
        # a rank that holds no parameter takes part in backward as well
        anchor = torch.zeros((), device=self._engine.device, requires_grad=True)
        given = (anchor, *inputs.values(), *self._tensors)
        apply: Callable[..., tuple[Tensor, ...]] = _PartFunction.apply
        found = apply(self._engine, tuple(inputs), self.training, calls.append, *given)
        return restore(calls[0].structure, dict(zip(calls[0].outputs, found, strict=True)))

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        return self

    def __deepcopy__(self, memo: object) -> Part:
        """Raise NnscalerError("usage"): what it runs on is there once."""
        message = "a part cannot be copied: every rank has one of it, with its shards and its connections"
        raise NnscalerError(
            "usage", message, help="an average of its parameters is kept by an optimizer (docs/train.md)"
        )

    def extra_repr(self) -> str:
        """Return the plan, in words."""
        return self._engine.program.plan.describe()


class _PartFunction(torch.autograd.Function):
    """A call of the part as one node of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: PartEngine,
        names: tuple[str, ...],
        training: bool,
        told: Callable[[PartCall], None],
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(True)
        ctx.engine, ctx.names = engine, names
        ctx.save_for_backward(*given)
        call = engine.forward(dict(zip(names, given[1:], strict=False)), training)
        told(call)
        ctx.call, ctx.outputs = call.without_outputs(), tuple(call.outputs)
        fixed = [output for name, output in call.outputs.items() if name not in engine.part.cotangents]
        ctx.mark_non_differentiable(*fixed)
        return tuple(call.outputs.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        engine: PartEngine = ctx.engine
        given = _saved(ctx)
        count = len(ctx.names)
        inputs = dict(zip(ctx.names, given[1 : 1 + count], strict=True))
        cotangents = dict(zip(ctx.outputs, gradients, strict=True))
        of_inputs, of_parameters = engine.backward(ctx.call, inputs, cotangents)
        found: list[Tensor | None] = [None] * 5  # engine, names, mode, told and the anchor
        for position, (name, tensor) in enumerate(inputs.items(), 5):
            gradient = of_inputs.get(name) if ctx.needs_input_grad[position] else None
            found.append(None if gradient is None else gradient.to(tensor.device, tensor.dtype))
        return (*found, *of_parameters)


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    """Return what a call was given. Raises NnscalerError("part_changed") where it has other values by now."""
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        help_text = (
            "call backward before the optimizer's step, and once; or with retain_graph=True all but the last time"
        )
        message = f"backward of a part computes it again, and what it was called with is gone: {error}"
        raise NnscalerError("part_changed", message.split(". ")[0], help=help_text) from None
    return saved
