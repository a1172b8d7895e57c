"""Every choice that L0 may explain a line by, against torch: shards are cut by lists of positions, run, and compared
with the whole, values and gradients.

The choices are those that L0 finds when an operand lies in any of many states, sections and unequal sizes among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.bind_and_localise_call import localise
from op_registry.call import AxisArgument, TensorArgument
from op_registry.samples import SAMPLES
from op_registry.spec import Refusal

from nnscaler.ir.conversion_table_and_paths import explain_illegal, shape_of_rank
from nnscaler.ir.derive_operand_layouts import explain_illegal_choices, input_states, output_states, shards_of
from nnscaler.ir.graph import Graph, LogicalTensor, Operation, Slot
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from nnscaler.layout import INVARIANT, Partial, Sharded, State
from tests.layouts import gradient_of, positions
from tests.op_registry.builtin.oracle import Whole, as_leaf, close, gradients, random_parts, run, whole
from verify.programs.typing.lines.choices_fitting_operands import FreeSplits, legal_choices
from verify.programs.typing.lines.uniform_value_dims import Dims, uniform_outputs

AXIS = "r"


def graph_of(w: Whole) -> Graph:
    """The call as the only operation."""
    made = [f"o{i}" if o is not None else None for i, o in enumerate(w.outputs)]
    tensors = [
        LogicalTensor(f"i{i}", tuple(t.shape), str(t.dtype).removeprefix("torch."), "input", t.requires_grad)
        for i, t in enumerate(w.inputs)
    ]
    tensors += [
        LogicalTensor(name, tuple(o.shape), str(o.dtype).removeprefix("torch."), "activation", o.requires_grad)
        for name, o in zip(made, w.outputs, strict=True)
        if name is not None and o is not None
    ]

    def slots(value: Any) -> Any:
        if isinstance(value, TensorArgument):
            return Slot(value.index)
        return type(value)(map(slots, value)) if isinstance(value, list | tuple) else value

    inputs = tuple(f"i{i}" for i in range(len(w.inputs)))
    kwargs = tuple((k, slots(v)) for k, v in w.call.kwargs.items())
    op = Operation("op", w.call.operator, inputs, slots(w.call.args), kwargs, tuple(made))
    return Graph("one", {t.name: t for t in tensors}, (op,), made[0] or "")


def states_of(shape: Sequence[int], parts: int) -> Iterator[Sharded]:
    """Cuts of a tensor: contiguous, strided, by two sections, unequal."""
    for dim, size in enumerate(shape):
        yield from (Sharded(dim, outer) for outer in range(1, size + 1) if size % outer == 0)
        for first in (parts, 2 * parts):
            yield Sharded(dim, 1, (first, size - first))
        yield Sharded(dim, 1, (), (size - parts + 1, *[1] * (parts - 1)))
        half = size // 2
        yield Sharded(dim, 2, (), (half - parts + 1, *[1] * (parts - 1)))


def choices_of(graph: Graph, signature: Signature, parts: int) -> list[Choice]:
    """Return the choices that L0 can find, whatever the operands hold."""
    found: dict[Choice, None] = {}
    told = FreeSplits((1, 2, 3))
    shapes = [graph.tensors[name].shape for name in graph.operations[0].inputs]
    for slot, shape in enumerate(shapes):
        for state in states_of(shape, parts):
            if min((*state.sections, *state.sizes, 1)) >= 1 and explain_illegal((state,), (parts,), shape) is None:
                states: list[State] = [INVARIANT] * len(shapes)
                states[slot] = state
                found.update(dict.fromkeys(legal_choices(signature, states, parts, told)))
    found.update(dict.fromkeys(legal_choices(signature, [INVARIANT] * len(shapes), parts, told)))
    op = graph.operations[0]
    split = [c for c in found if isinstance(c, Split | RunPartial)]  # to run it whole is no claim about the operator
    return [c for c in split if explain_illegal_choices(graph, op, signature, (c,), ((AXIS, parts),)) is None]


def spread(t: Tensor, state: State, parts: int) -> list[Tensor]:
    """Return each rank's piece of a tensor in this state."""
    if isinstance(state, Sharded):
        cuts = [torch.from_numpy(positions(t.shape[state.dim], [(state, parts, r)])) for r in range(parts)]
        return [t.index_select(state.dim, cut) for cut in cuts]
    return random_parts(t, parts) if isinstance(state, Partial) else [t] * parts


def agree(what: str, pieces: Sequence[Tensor], whole_: Tensor, state: State, parts: int) -> None:
    """Raises AssertionError where the ranks do not have the tensor in this state."""
    if isinstance(state, Partial):
        stacked = torch.stack(list(pieces))
        merged = stacked.amax(0) if state.reduction == "max" else stacked.sum(0).to(pieces[0].dtype)
        assert close(merged, whole_, whole_), (what, state)
        return
    for rank, (piece, wanted) in enumerate(zip(pieces, spread(whole_, state, parts), strict=True)):
        assert close(piece, wanted, whole_), (what, state, rank, tuple(piece.shape), tuple(wanted.shape))


def check(w: Whole, signature: Signature, choice: Choice, parts: int) -> bool:
    """Runs the call on shards that lie as the choice says, unless its hook refuses. Raises AssertionError."""
    axes = ((AXIS, parts),)
    ins, outs = input_states(signature, choice), output_states(signature, choice, len(w.outputs))
    shapes = [
        None if o is None else shape_of_rank((s,), axes, tuple(o.shape)) for o, s in zip(w.outputs, outs, strict=True)
    ]
    try:
        call = localise(w.spec, w.call, shards_of(signature, (choice,), axes), shapes)
    except Refusal:
        return False
    if any(isinstance(value, AxisArgument) for value in (*call.args, *call.kwargs.values())):
        return False  # its ranks wait for each other: verify-op runs them together
    given = [spread(t.detach(), s, parts) for t, s in zip(w.inputs, ins, strict=True)]
    cotangents = [
        [None] * parts if c is None else spread(c, gradient_of(s), parts)
        for c, s in zip(w.cotangents, outs, strict=True)
    ]
    results, found = [], []
    for rank in range(parts):
        leaves = [as_leaf(g[rank], t.requires_grad) for g, t in zip(given, w.inputs, strict=True)]
        results.append(run(call, leaves, {AXIS: rank}))
        if not any(isinstance(s, Partial) and s.reduction == "max" for s in outs):
            found.append(gradients(results[-1], leaves, [c[rank] for c in cotangents]))
    for i, (value, state) in enumerate(zip(w.outputs, outs, strict=True)):
        if value is not None:
            agree(f"output {i}", [r[i].detach() for r in results], value.detach(), state, parts)  # type: ignore[union-attr]
    for i, (gradient, state) in enumerate(zip(w.gradients, ins, strict=True)):
        if gradient is not None and found:
            pieces = [g[i] for g in found]
            agree(f"gradient {i}", pieces, gradient, gradient_of(state), parts)  # type: ignore[arg-type]
    return True


def compare(numbers: Sequence[int], every_parts: Sequence[int]) -> tuple[int, list[str]]:
    """How many choices were run, and which are wrong."""
    count, wrong = 0, []
    for number in numbers:
        w = whole(number)
        if not w.compare or w.spec.random:
            continue
        graph = graph_of(w)
        signature = signatures(graph)["op"]
        for parts in every_parts:
            for choice in choices_of(graph, signature, parts):
                try:
                    count += check(w, signature, choice, parts)
                except (AssertionError, RuntimeError, IndexError, ValueError) as error:
                    wrong.append(f"{SAMPLES[number]}, {choice} over {parts}: {type(error).__name__} {error}"[:300])
    return count, wrong


@pytest.mark.long
def test_what_reading_assumes_is_what_torch_finds() -> None:
    count, wrong = compare(range(0, len(SAMPLES), 29), (2, 3))
    assert not wrong, "\n".join(wrong)
    assert count > 300


@pytest.mark.long
@pytest.mark.parametrize("offset", range(8))
def test_what_reading_assumes_of_every_sample(offset: int) -> None:
    count, wrong = compare(range(offset, len(SAMPLES), 8), (2, 3, 4))
    assert not wrong, "\n".join(wrong)
    assert count > 2000


def flattened(t: Tensor, dims: Dims) -> Tensor:
    """The tensor with its first entry along these dims everywhere."""
    for dim in dims if t.numel() else ():
        t = t.narrow(dim, 0, 1).expand_as(t)
    return t.contiguous()


def is_flat(t: Tensor, dim: int) -> bool:
    return close(t, t.narrow(dim, 0, 1).expand_as(t), t)


def claims(numbers: Sequence[int]) -> tuple[int, int, list[str]]:
    """Claims that a dim of an output is uniform, those of them that need the operator to pass it on, and wrong ones."""
    count, passed, wrong = 0, 0, []
    for number in numbers:
        w = whole(number)
        if not w.compare or w.spec.random:
            continue
        signature = signatures(graph_of(w))["op"]
        dims = [(i, d) for i, t in enumerate(w.inputs) for d in range(t.ndim)][:6]
        drawn = [c for n in range(len(dims) + 1) for c in combinations(dims, n)][:40]
        for chosen in [*drawn, tuple((i, d) for i, t in enumerate(w.inputs) for d in range(t.ndim))]:
            given = tuple(Dims(d for j, d in chosen if j == i) for i in range(len(w.inputs)))
            said = [(i, d) for i, dims_ in enumerate(uniform_outputs(signature, given)) for d in dims_]
            if not said:
                continue
            values = [flattened(t.detach(), dims_) for t, dims_ in zip(w.inputs, given, strict=True)]
            try:
                outputs = run(w.call, values, {})
            except RuntimeError:
                continue  # numbers that the operator does not take
            for i, d in said:
                output = outputs[i]
                if output is not None and output.numel() and output.shape[d] > 1:
                    count += 1
                    passed += bool(chosen)
                    if not is_flat(output, d):
                        wrong.append(f"{SAMPLES[number]}: output {i} is not uniform along dim {d} for {given}")
    return count, passed, wrong


def test_dims_that_are_called_uniform_are() -> None:
    count, passed, wrong = claims(range(0, len(SAMPLES), 13))
    assert not wrong, "\n".join(wrong)
    assert count > 500
    assert passed > 400


@pytest.mark.long
def test_dims_that_are_called_uniform_are_in_every_sample() -> None:
    count, _, wrong = claims(range(len(SAMPLES)))
    assert not wrong, "\n".join(wrong)
    assert count > 5000
