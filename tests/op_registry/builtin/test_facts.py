"""The facts of built-in operators against torch, on every sample call: no fact is right because a record says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from op_registry.bind_and_localise_call import bind_call, linear_sets
from op_registry.builtin import SPECS
from op_registry.call import Call
from op_registry.infer_torch_schema import has_default_dtype, is_factory, may_draw, overload_of, schema_of
from op_registry.registry import UNANNOTATED, default_registry, facts_of
from op_registry.samples import SAMPLES
from op_registry.spec import OperatorSpec

from tests.op_registry.builtin.oracle import Whole, has_derivative, run, whole

OF_TORCH = {spec.name for spec in SPECS if spec.name.startswith("aten.")}
MOVING = [spec for spec in SPECS if spec.moves is not None]
# Their results are aliases although torch's schema does not say so, and a copy may take their place.
SAID_BY_NOBODY = {
    "aten.broadcast_tensors.default",
    "aten.lift.default",
    "aten.meshgrid.indexing",
    "aten.unsafe_chunk.default",
    "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
    "aten._unsafe_view.default",
}


def wholes(names: set[str]) -> Iterator[Whole]:
    """The run of every sample of these operators."""
    for number, sample in enumerate(SAMPLES):
        if sample.operator in names:
            yield whole(number)


def results(w: Whole) -> list[Tensor]:
    return [output.detach() for output in w.outputs if output is not None]


def is_among(made: Tensor, given: Tensor) -> bool:
    """Return whether every element of one tensor is an element of the other."""
    return bool(torch.isin(torch.view_as_real(made.cfloat()), torch.view_as_real(given.cfloat())).all())


@pytest.mark.parametrize("spec", MOVING, ids=lambda spec: spec.name)
def test_what_moves_elements_makes_no_new_ones(spec: OperatorSpec) -> None:
    for w in wholes({spec.name}):
        given, made = w.inputs[0].detach(), results(w)
        match spec.moves:
            case "value":
                assert torch.equal(made[0], given)
            case "cast":
                assert torch.equal(made[0], given.to(made[0].dtype))
            case "reshape" | "unit dims":
                assert torch.equal(made[0].flatten(), given.flatten())
                assert spec.moves == "reshape" or [s for s in made[0].shape if s > 1] == [
                    s for s in given.shape if s > 1
                ]
            case "transpose":
                (again,) = run(w.call, made, {})
                assert again is not None and torch.equal(again, given)
            case "permute":
                assert sorted(made[0].shape) == sorted(given.shape)
                assert torch.equal(made[0].flatten().sort().values, given.flatten().sort().values)
            case "expand" | "part":
                assert all(is_among(piece, given) for piece in made)
            case "pad":
                number = w.call.get(2, "value", None) if "nd" in spec.name else w.call.get(3, "value", None)
                assert is_among(made[0], torch.cat([given.flatten(), torch.tensor([float(number or 0)])]))


def test_views_lie_in_the_memory_of_their_operand() -> None:
    """Kernels do on contiguous tensors what torch's schema says of aliases; a view costs nothing."""
    apart: set[str] = set()
    for w in wholes(OF_TORCH):
        memory = [t.untyped_storage().data_ptr() for t in w.inputs]
        shared = bool(memory) and all(r.untyped_storage().data_ptr() in memory for r in results(w))
        if w.spec.view:
            assert shared, w.call
        if not shared:
            apart.add(w.spec.name)
    unsaid = {name for name in OF_TORCH - apart if not facts_of(name).view and facts_of(name).moves != "cast"}
    assert unsaid == SAID_BY_NOBODY
    assert not any(facts_of(name).view for name in ("aten.to.dtype", "aten.add_.Tensor", "aten.relu.default", "my_op"))
    assert facts_of("aten.diagonal.default").view and facts_of("aten.squeeze.dims").view


def test_torch_connects_what_is_not_detached() -> None:
    unknown: set[str] = set()
    for w in wholes({spec.name for spec in SPECS if not spec.random}):
        if any(t.requires_grad for t in w.inputs):
            floats = [(i, o) for i, o in enumerate(w.outputs) if o is not None and o.is_floating_point()]
            of_floats = any(t.is_floating_point() or t.is_complex() for t in w.inputs[:1])
            for index, output in floats if of_floats else ():
                assert output.requires_grad != w.spec.is_detached(index), (w.call, index)
                if not has_derivative(output):
                    unknown.add(w.spec.name)
    assert unknown == ({"aten.aminmax.default"} if torch.__version__ < "2.12" else set())


def test_what_keeps_nothing_saves_no_tensor() -> None:
    """But for the last part of the cross entropy: it saves what is as long as the batch, and that is next to nothing
    beside the logits."""
    for w in wholes({spec.name for spec in SPECS if spec.keeps_nothing}):
        saved: list[Tensor] = []

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run(w.call, w.inputs, {})
        assert w.spec.name == "nnscaler.ce_tail" or all(tensor.ndim == 0 for tensor in saved), w.call


def made_from_nothing(call: Call) -> bool:
    """Return whether a result of the call lies elsewhere than its tensors. One that asks for their values is none."""
    inputs = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in call.tensors()]
    try:
        outputs = run(call, inputs, {})
    except RuntimeError:
        return False
    return any(output is not None and output.device.type == "cpu" for output in outputs)


@pytest.mark.long
def test_factories_are_what_makes_tensors_from_nothing() -> None:
    """A program gives these, and no others, the device of its rank. Where the numbers are tensors, torch's kernels and
    its meta kernels differ in what they take for the device, which is why it is told."""
    runs = list(wholes(OF_TORCH))
    numbers = {w.spec.name for w in runs if is_factory(w.spec.name) and w.inputs}
    assert {name.split(".")[1] for name in numbers} == {"linspace", "logspace"}
    found = {w.spec.name for w in runs if made_from_nothing(w.call)}
    assert found == {name for name in OF_TORCH if is_factory(name)} - numbers
    assert {"aten.bartlett_window.default", "aten.kaiser_window.beta", "aten.range.step"} <= found


def test_factories_that_ask_the_process_for_a_dtype() -> None:
    """Their dtype stands in the graph: on a rank the default may be another one."""
    runs = [w for w in wholes(OF_TORCH) if is_factory(w.spec.name)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if before == torch.float32 else torch.float32)
    try:
        now = [run(w.call, w.inputs, {})[0] for w in runs]
    finally:
        torch.set_default_dtype(before)
    asked = {
        w.spec.name for w, made in zip(runs, now, strict=True) if made is None or made.dtype != results(w)[0].dtype
    }
    assert asked and asked <= {w.spec.name for w in runs if has_default_dtype(w.spec.name)}
    assert not has_default_dtype("aten.triu_indices.default") and not has_default_dtype("aten.zeros_like.default")


def test_what_draws_if_it_is_told_to_is_told_by_a_probability_or_a_switch() -> None:
    """torch says which operators may draw; those that take part in it by an argument say which."""
    sometimes = {spec.name: spec.draws_if for spec in SPECS if spec.draws_if}
    assert set(sometimes) == {name for name in OF_TORCH if may_draw(name)}
    for name, places in sometimes.items():
        schema = schema_of(name)
        assert schema is not None
        told = {schema.arguments[place].name for place in places}
        assert told in ({"dropout", "train"}, {"dropout_p"}, {"training"}), name


def test_facts_without_an_annotation() -> None:
    """They are of operators of torch that the registry does not have."""
    assert all(overload_of(spec.name) is not None for spec in UNANNOTATED)
    assert not {spec.name for spec in UNANNOTATED} & set(default_registry().names())
    assert facts_of("aten.to.prim_dtype").moves == "cast"
    assert default_registry().lookup("aten.to.prim_dtype") is None


def test_an_operator_without_a_record_has_the_default_facts() -> None:
    assert facts_of("my_op") == OperatorSpec("my_op", "")
    assert facts_of("aten.linear.default") is default_registry().lookup("aten.linear.default")


def test_an_output_that_nothing_reads_changes_nothing_else() -> None:
    """A graph does not know its shape."""
    several = {n for n in OF_TORCH if (overload := overload_of(n)) is not None and len(overload._schema.returns) > 1}
    asked = 0
    for w in wholes(several):
        read = {i for i, output in enumerate(w.call.outputs) if output is not None}
        for unread in [*({i} for i in read), *(read - {i} for i in read)]:
            outputs = tuple(None if i in unread else output for i, output in enumerate(w.call.outputs))
            call = replace(w.call, outputs=outputs)
            bound = bind_call(w.spec, call)
            assert (bound.inputs, bound.marks, bound.tied) == (w.bound.inputs, w.bound.marks, w.bound.tied), call
            assert all(bound.outputs[i] == w.bound.outputs[i] for i in read - unread), call
            assert linear_sets(w.spec, call) == linear_sets(w.spec, w.call), call
            asked += 1
    assert asked >= 300
