"""Force right operands into every statement of a run, whatever the statements before it computed.

The idea
--------
In a wrong program, everything after the first wrong line differs as well, and the first difference need not be the
only fault. So the program runs under teacher forcing (Williams and Zipser 1989, where a recurrent network is given the
right previous output instead of its own): each statement's result is recorded, and then replaced by the right shards.
A statement whose result differs is therefore wrong itself. The right shards come from the graph, interpreted in
float64 and cut by the layout that the manifest gives for the variable (`interpret_graph_on_whole_batch`).

Gradients are treated alike. No backward pass goes through the program: each statement runs on detached leaves, and its
own vector-Jacobian product is taken on the spot, with a random cotangent for the result, cut as the layout says. What
lies between statements (messages, accumulation over micro-batches, sums over ranks) is joined by `Boundary`, which
hands the executor right values and right gradients in place of those that the stage computed.

A worked example
----------------
`down(relu(up(x))).square().sum()` under tp=2, with two lines edited:

    relu = aten.gelu(linear)                                   # was aten.relu
    linear_1_v1 = comm.shard(linear_1, self.tp, dim=1)         # was comm.reduce_scatter

A plain run says that the loss is 0.3907767475 instead of 0.5207095327, and that `relu` is the first tensor that
differs. It cannot say whether the second edited line is wrong too: its operand already differs. In the taught run
`relu` differs (0.5897832401 = gelu(0.7597408791) instead of 0.7597408791), is recorded, and is replaced. So
`aten.linear` reads the right `relu` and is right; its result, a partial sum, is replaced by random terms whose sum is
right. From these, `comm.shard` returns 0.2108635066 instead of -0.3525990638. Both lines are named, each with a repair
that was tried on the recorded operands alone:

    cause: it calls `aten.gelu` where the model's line is `aten.relu`; `relu = aten.relu(linear)` repairs it
    cause: a reduce_scatter over tp is missing; `linear_1_v1 = comm.reduce_scatter(linear_1, self.tp, dim=1)` repairs it

The invariant
-------------
Whenever a taught statement starts, each of its operands that is a known tensor is the right piece of its logical
tensor, for this rank and micro-batch. `ForcedStep` then contains, for each statement and rank, the operands, what was
computed, and what was sent back: enough to judge the statement (`judge`), and to run changed versions of it without
running the program again (`replay`). A result that is no tensor of the graph has no right value. It is passed on as it
is, together with its leaves (`_open`), so that the next statement whose result is known is judged for both.

Why not otherwise
-----------------
* Compare the tensors of a plain run, and take the first that differs (`first_divergent`): this finds one fault, and one
  of the backward pass only where all values agree. It is kept for programs that cannot be taught.
* Bisect over the lines, or minimise the program (delta debugging): many runs, one fault at a time, and half of a rank
  program is no program.
* Put zeros on all ranks but one for a partial sum, or use the loss's real gradient as the cotangent: zeros hide
  mistakes. relu's gradient is zero for half of its inputs, and a missing sum over zeros is no mistake that shows. Hence
  random terms and random cotangents, drawn once for all ranks from a seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from nnscaler.layout import Partial, State
from nnscaler.runtime.shards import unravel
from nnscaler.runtime.stage_base_class import Parameter, Stage, is_trained, place_in_time, sizes_in_time
from verify.programs.execution.compare_variables import Pieces, Variable, gradient_states
from verify.programs.localise.instrument_statements import Statement
from verify.programs.localise.interpret_graph_on_whole_batch import Dealer, Logical

At = tuple[int, int]  # rank, micro-batch (-1: `prepare`)


@dataclass(frozen=True)
class Execution:
    """One statement on one rank.

    `sent_back`: operand -> gradient, None for one that gets none; empty where no gradient is due.
    """

    stage: Stage
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    outputs: Mapping[str, Tensor]
    sent_back: Mapping[str, Tensor | None]
    recording: bool = True


@dataclass
class ForcedStep:
    """The observations of one step of a taught run."""

    executions: dict[int, dict[At, Execution]] = field(default_factory=dict)  # by statement
    entered: dict[tuple[int, str, str], Pieces] = field(default_factory=dict)  # (stage, phase, argument)
    without_gradient: set[tuple[int, str]] = field(default_factory=set)  # received, and no gradient is sent back
    came_back: dict[tuple[int, str], Pieces] = field(default_factory=dict)  # (stage, output) -> its gradient
    forwards: dict[int, set[At]] = field(default_factory=dict)
    backwards: dict[int, set[At]] = field(default_factory=dict)
    gradients: dict[tuple[int, str], dict[int, Tensor | None]] = field(default_factory=dict)  # (stage, attribute)
    changed: dict[tuple[int, str], list[int]] = field(default_factory=dict)  # stored tensors that a step changed
    buffers: dict[tuple[int, str], dict[int, Tensor]] = field(default_factory=dict)  # after the step
    losses: dict[int, Tensor] = field(default_factory=dict)  # rank -> the loss of the step


class Boundary(torch.autograd.Function):
    """Joins what a stage returns with what it received and stores, so that backward runs from one to the other."""

    @staticmethod
    def forward(
        ctx: Any, teach: Callable[[Sequence[Tensor | None]], list[Tensor | None]], count: int, *t: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.teach, ctx.count = teach, count
        return tuple(tensor.clone() for tensor in t[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *([None] * ctx.count), *ctx.teach(gradients)


class Teacher:
    """The functions that taught programs call, from the threads of all ranks.

    `begin` sets the right values of the next step.
    """

    def __init__(
        self,
        statements: Mapping[int, Statement],
        variables: Mapping[tuple[int, str], Variable],
        stages: Mapping[int, type[Stage]],
    ) -> None:
        self.statements, self.variables, self.stages = statements, variables, stages
        self._lock = threading.Lock()
        self._received: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        self._open: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}  # results that nobody knows the right values of

    def begin(self, logical: Logical, dealer: Dealer) -> None:
        self.logical, self.dealer, self.seen = logical, dealer, ForcedStep()
        self._received.clear()
        self._open.clear()
        self._names = {fqn: t.name for t in logical.graph.tensors.values() for fqn in t.fqns if t.role != "input"}

    def names(self) -> dict[str, Callable[..., Any]]:
        """Return the names that the module of a taught program needs besides its own."""
        called: Callable[..., Any] = lambda function, *tensors: function(*tensors)  # noqa: E731
        return {"_taught": self.taught, "_entered": self.entered, "_returned": self.returned, "recompute": called}

    # -- what is right --------------------------------------------------------------------------------------------

    def tensor_of(self, stage: int, read: str) -> str | None:
        """Return the logical tensor that an operand (`x`, `self.w`) is."""
        if not read.startswith("self."):
            variable = self.variables.get((stage, read))
            return None if variable is None else self.logical.name_of(variable.tensor)
        stored = self.stored(stage, read.removeprefix("self."))
        return None if stored is None else self._names.get(stored.fqn)

    def stored(self, stage: int, attribute: str) -> Any:
        """Return the declaration of a stored tensor; None for another attribute."""
        declared = self.stages[stage]
        for group in (declared.parameters, declared.frozen, declared.buffers, declared.constants):
            if attribute in group:
                return group[attribute]
        return None

    def target(self, statement: Statement, name: str) -> Variable | None:
        """Return the variable that a result is. What is returned is what its key says."""
        known = self.variables.get((statement.stage, name))
        if known is not None or not statement.key:
            return known
        wanted = dict(self.logical.graph.results).get(name) or name.rpartition("@")[0]
        read = [v for r in statement.reads if (v := self.variables.get((statement.stage, r))) is not None]
        every = [*read, *(v for (stage, _), v in reversed(list(self.variables.items())) if stage == statement.stage)]
        found = next((v for v in every if v.tensor == wanted), None)
        return found or (read[0] if read and name.startswith("new ") else None)

    def right(self, variable: Variable, at: At, *, gradient: bool = False) -> Tensor | None:
        """Return the right piece of a variable, or of its cotangent."""
        name = self.logical.name_of(variable.tensor)
        tensor = (self.logical.cotangents if gradient else self.logical.values).get(name)
        if tensor is None:
            return None
        states = gradient_states(variable.states) if gradient else variable.states
        kind = "cotangent" if gradient else "value"
        key = (kind, variable.stage.index, variable.name, self.logical.step, at[1] < 0)
        return self._deal(key, tensor, states, variable.stage, at)

    def _deal(self, key: Any, tensor: Tensor, states: Mapping[str, State], stage: type[Stage], at: At) -> Tensor | None:
        sizes, coordinates = dict(stage.axes), unravel(stage.ranks.index(at[0]), stage.axes)
        if at[1] >= 0:
            sizes, coordinates = {**sizes, **sizes_in_time(stage)}, {**coordinates, **place_in_time(stage, at[1])}
        here = {axis: state for axis, state in states.items() if axis in sizes}
        try:
            return self.dealer.piece(key, tensor, here, sizes, coordinates)
        except (ValueError, IndexError):
            return None  # the layout does not fit the tensor: whoever compares it says so

    # -- called by taught programs --------------------------------------------------------------------------------

    def taught(self, stage: Stage, number: int, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        statement = self.statements[number]
        at = (stage.rank, -1 if statement.phase == "prepare" else stage.micro.index)
        recording = torch.is_grad_enabled() and not statement.compound
        execution, result, leaves = self.execute(statement, stage, at, function, operands, recording=recording)
        with self._lock:
            self.seen.executions.setdefault(number, {})[at] = execution
        values = _listed(result)
        for i, (name, value) in enumerate(zip(results_of(statement), values, strict=False)):
            if isinstance(value, Tensor):
                values[i] = self._replaced(value, self.target(statement, name), leaves, at)
        return tuple(values) if isinstance(result, tuple | list) else values[0]

    def execute(
        self,
        statement: Statement,
        stage: Stage,
        at: At,
        function: Callable[..., Any],
        operands: tuple[Any, ...],
        *,
        recording: bool,
    ) -> tuple[Execution, Any, dict[str, Tensor]]:
        """Run one statement on one rank; return the record, the result, and the operands that have a gradient."""
        given, leaves = self._operands(statement, operands, recording)
        result = function(*given)
        named = {n: v for n, v in zip(results_of(statement), _listed(result), strict=False) if isinstance(v, Tensor)}
        targets = {name: self.target(statement, name) for name in named}
        sent = self._sent_back(named, targets, leaves, at) if recording else {}
        computed = {name: value.detach().clone() for name, value in named.items()}
        return Execution(stage, function, given, computed, sent, recording), result, leaves

    def entered(self, stage: Stage, phase: str, name: str, value: Any, nested: bool) -> Any:
        """Record an argument of a method, or of a function inside of it, and replace it by its right piece."""
        variable = self.variables.get((stage.index, name))
        if not isinstance(value, Tensor) or nested:
            return value
        at = (stage.rank, -1 if phase == "prepare" else stage.micro.index)
        with self._lock:
            self.seen.entered.setdefault((stage.index, phase, name), {})[at] = value.detach().clone()
            if name in stage.receives:
                self._received.setdefault((stage.rank, stage.index, at[1]), {})[name] = value
        return self._replaced(value, variable, {}, at)

    def returned(self, stage: Stage, phase: str, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Record the outputs of a method; connect those of `forward` with its inputs and parameters by a `Boundary`."""
        if phase == "prepare":
            return outputs
        at = (stage.rank, stage.micro.index)
        leaves = dict(self._received.get((*at[:1], stage.index, at[1]), {}))
        parameters = {name: getattr(stage, name) for name, p in stage.parameters.items() if p.used}
        sources = {
            **{n: t for n, t in leaves.items() if t.requires_grad},
            **{f"self.{n}": p for n, p in parameters.items()},
        }
        keys = [key for key, value in outputs.items() if value.is_floating_point() and not key.startswith("new ")]
        with self._lock:
            self.seen.forwards.setdefault(stage.index, set()).add(at)
            self.seen.without_gradient |= {(stage.index, n) for n, t in leaves.items() if not t.requires_grad}
        if not sources or not keys or not torch.is_grad_enabled():
            return outputs

        def teach(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
            with self._lock:
                self.seen.backwards.setdefault(stage.index, set()).add(at)
                for key, gradient in zip(keys, gradients, strict=True):
                    if gradient is not None:
                        self.seen.came_back.setdefault((stage.index, key), {})[at] = gradient.detach().clone()
            return [self._gradient_of(stage, name, at, tensor) for name, tensor in sources.items()]

        apply = cast(Callable[..., tuple[Tensor, ...]], Boundary.apply)
        found = apply(teach, len(keys), *(outputs[key] for key in keys), *sources.values())
        return {**outputs, **dict(zip(keys, found, strict=True))}

    # -- helpers --------------------------------------------------------------------------------------------------

    def _operands(
        self, statement: Statement, operands: tuple[Any, ...], recording: bool
    ) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        """Return the operands as leaves of a graph of their own, and those leaves that have a gradient."""
        given: list[Any] = []
        leaves: dict[str, Tensor] = {}
        for read, value in zip(statement.reads, operands, strict=True):
            if isinstance(value, Tensor) and id(value) in self._open:
                leaves.update(self._open[id(value)][1])
            elif isinstance(value, Tensor):
                value = value.detach()
                tensor = self.tensor_of(statement.stage, read)
                if recording and tensor in self.logical.cotangents and value.is_floating_point():
                    leaves[read] = value = value.requires_grad_()
            given.append(value)
        return tuple(given), leaves

    def _sent_back(
        self,
        outputs: Mapping[str, Tensor],
        targets: Mapping[str, Variable | None],
        leaves: Mapping[str, Tensor],
        at: At,
    ) -> dict[str, Tensor | None]:
        known = {n: v for n, v in targets.items() if v is not None}
        cotangents = {n: g for n, v in known.items() if (g := self.right(v, at, gradient=True)) is not None}
        if not cotangents or not leaves:
            return {}
        roots = [n for n in cotangents if outputs[n].requires_grad and outputs[n].shape == cotangents[n].shape]
        if not roots:
            return dict.fromkeys(leaves)
        found = torch.autograd.grad(
            [outputs[n] for n in roots],
            list(leaves.values()),
            [cotangents[n].to(outputs[n].dtype) for n in roots],
            retain_graph=True,
            allow_unused=True,
        )
        return {read: None if g is None else g.detach().clone() for read, g in zip(leaves, found, strict=True)}

    def _replaced(self, value: Tensor, variable: Variable | None, leaves: dict[str, Tensor], at: At) -> Tensor:
        right = None if variable is None else self.right(variable, at)
        if right is None:
            with self._lock:
                self._open[id(value)] = (value, dict(leaves))
            return value
        return right.to(value.dtype)

    def _gradient_of(self, stage: Stage, name: str, at: At, tensor: Tensor) -> Tensor | None:
        """Return the right piece of the gradient of something received, or of a parameter."""
        if not name.startswith("self."):
            variable = self.variables.get((stage.index, name))
            return None if variable is None else _like(self.right(variable, at, gradient=True), tensor)
        return _like(self.part_of(stage.index, stage.parameters[name.removeprefix("self.")], at), tensor)

    def part_of(self, stage: int, declared: Parameter, at: At) -> Tensor | None:
        """Return the part of a parameter's gradient that one rank contributes in one micro-batch."""
        part = self.part(declared.fqn, stage)
        if part is None:
            return None
        states = {**declared.states, **dict.fromkeys((*declared.reduce, *sizes_in_time(self.stages[stage])), Partial())}
        key = ("gradient", declared.fqn, stage, self.logical.step)
        return self._deal(key, part, states, self.stages[stage], at)

    def part(self, fqn: str, stage: int) -> Tensor | None:
        """Return the part of a parameter's gradient that comes from one of the stages that hold it."""
        total = self.logical.cotangents.get(self._names.get(fqn, ""))
        holders = [
            i
            for i, s in self.stages.items()
            if is_trained(s) and any(p.fqn == fqn and p.used for p in s.parameters.values())
        ]
        if total is None or stage not in holders:
            return None
        if len(holders) == 1:
            return total
        key, at = ("part", fqn, self.logical.step), {"stage": holders.index(stage)}
        return self.dealer.piece(key, total, {"stage": Partial()}, {"stage": len(holders)}, at)


def results_of(statement: Statement) -> tuple[str, ...]:
    """Return the names of what a statement computes."""
    return statement.names or (statement.key,)


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _like(found: Tensor | None, tensor: Tensor) -> Tensor | None:
    return found.to(tensor.dtype) if found is not None and found.shape == tensor.shape else None
