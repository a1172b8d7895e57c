"""From choices to layouts and back, against tables written by hand."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from op_registry.annotation.bind_sizes import BoundAnnotation, BoundDim, BoundOperand, Factor
from op_registry.call import Call, TensorArgument
from op_registry.registry import default_registry

from nnscaler.ir.derive_operand_layouts import (
    explain_illegal_choice,
    input_states,
    operand_state,
    output_states,
    resolve,
)
from nnscaler.ir.operation_annotations import Signature, signature_of
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.layout import INVARIANT, PARTIAL, REPLICATED, Partial, Sharded, State

Shapes = list[tuple[int, ...]]


def signature(operator: str, inputs: Shapes, outputs: Shapes, *others: object, **kwargs: object) -> Signature:
    """Of a call whose tensors come first."""
    tensors = [TensorArgument(i, shape, "float32") for i, shape in enumerate(inputs)]
    made = tuple(TensorArgument(i, shape, "float32") for i, shape in enumerate(outputs))
    return signature_of(Call(operator, (*tensors, *others), kwargs, made), default_registry())


def linear() -> Signature:
    return signature("aten.linear.default", [(4, 5, 12), (18, 12), (18,)], [(4, 5, 18)])


S = Sharded
TABLE: list[tuple[Signature, Choice, tuple[State, ...], tuple[State, ...]]] = [
    (linear(), RunInvariant(), (INVARIANT,) * 3, (INVARIANT,)),
    (linear(), RunReplicated(), (REPLICATED,) * 3, (REPLICATED,)),
    (linear(), Split("n"), (REPLICATED, S(0), S(0)), (S(2),)),
    (linear(), Split("n", 3), (REPLICATED, S(0, 3), S(0, 3)), (S(2, 3),)),
    (linear(), Split("k"), (S(2), S(1), PARTIAL), (PARTIAL,)),
    (linear(), Split("*0"), (S(0), REPLICATED, REPLICATED), (S(0),)),
    (linear(), RunPartial(frozenset({0, 2})), (PARTIAL, REPLICATED, PARTIAL), (PARTIAL,)),
    (linear(), Split("n", sections=(12, 6)), (REPLICATED, S(0, 1, (12, 6)), S(0, 1, (12, 6))), (S(2, 1, (12, 6)),)),
    (signature("aten.add.Tensor", [(4, 6), (6,)], [(4, 6)]), Split("a"), (S(0), REPLICATED), (S(0),)),
    (signature("nnscaler.ce_max", [(6, 10)], [(6,)]), Split("c"), (S(1),), (Partial("max"),)),
]


@pytest.mark.parametrize(
    ("of", "choice", "inputs", "outputs"), TABLE, ids=[f"{t[0].call.operator}-{t[1]}" for t in TABLE]
)
def test_states(of: Signature, choice: Choice, inputs: tuple[State, ...], outputs: tuple[State, ...]) -> None:
    names = tuple(of.bound.sizes) if of.bound else ()
    if isinstance(choice, Split) and choice.identifier not in names:
        choice = Split(names[0], choice.outer, choice.sections)  # whatever the annotation calls its first dim
    assert input_states(of, choice) == inputs
    assert output_states(of, choice, len(outputs)) == outputs


def test_a_view_carries_heads_to_a_strided_split() -> None:
    """The heads are the outer factor of the last dim: a split of the inner one is strided."""
    view = signature("aten.view.default", [(4, 5, 36)], [(4, 5, 6, 6)], (4, 5, 6, 6))
    assert view.bound is not None
    heads, inner = (view.bound.outputs[0].dims[d].factors[0].identifier for d in (2, 3))  # type: ignore[union-attr]
    assert heads is not None and inner is not None
    assert (input_states(view, Split(heads)), output_states(view, Split(heads), 1)) == ((S(2),), (S(2),))
    assert (input_states(view, Split(inner)), output_states(view, Split(inner), 1)) == ((S(2, 6),), (S(3),))


@pytest.mark.parametrize(
    ("choice", "parts", "reason"),
    [
        (Split("q"), 2, "has no identifier 'q'"),
        (Split("n"), 4, "18"),
        (Split("n", 5), 2, "18"),
        (Split("n", sections=(10, 6)), 2, "sections (10, 6) do not divide by 2"),
        (Split("n", sections=(13, 5)), 2, "sections (13, 5) do not divide by 2"),
        (RunPartial(frozenset({0, 1})), 2, "not linear in operands [0, 1]"),
    ],
)
def test_illegal_choices_say_why(choice: Choice, parts: int, reason: str) -> None:
    assert reason in (explain_illegal_choice(linear(), choice, parts) or "legal")


def test_an_operator_without_annotation_runs_whole() -> None:
    unknown = signature("vendor.mystery.default", [(4,)], [(4,)])
    assert explain_illegal_choice(unknown, RunInvariant(), 2) is None
    assert explain_illegal_choice(unknown, RunReplicated(), 2) is None
    assert explain_illegal_choice(unknown, Split("a"), 2) == "vendor.mystery.default has no annotation"


@st.composite
def operands(draw: st.DrawFn) -> BoundOperand:
    """Dims made of factors, some of which are literals; no identifier twice."""
    names = iter("abcdefghij")
    dims = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=3))
        factors = tuple(Factor(next(names) if draw(st.booleans()) else None, size) for size in sizes)
        dims.append(BoundDim(factors, False))
    return BoundOperand(tuple(dims), False)


def bound_to(operand: BoundOperand, *together: str) -> BoundAnnotation:
    """An annotation of one operand, whose identifiers `together` are split together."""
    sizes = {f.identifier: f.size for dim in operand.dims for f in dim.factors if f.identifier}
    tied = {name: together if name in together else (name,) for name in sizes}
    return BoundAnnotation("drawn", (operand,), (operand,), sizes, dict.fromkeys(sizes, ""), {}, tied)


@pytest.mark.long
@given(operands(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([2, 3]))
def test_resolve_is_the_inverse_of_operand_state(operand: BoundOperand, outer: int, parts: int) -> None:
    factors = [f for dim in operand.dims for f in dim.factors if f.size % (outer * parts) == 0]
    names = [f.identifier for f in factors if f.identifier is not None]
    assume(names)
    for name in names:
        split = Split(name, outer)
        state = operand_state(bound_to(operand), operand, split)
        assert resolve(operand, state, parts) == split  # type: ignore[arg-type]


@pytest.mark.long
@given(operands(), st.sampled_from([2, 3]))
def test_operand_state_is_the_inverse_of_resolve(operand: BoundOperand, parts: int) -> None:
    states = [Sharded(dim, outer) for dim in range(3) for outer in (1, 2, 3, 4, 6, 8, 12)]
    found = [(state, split) for state in states if (split := resolve(operand, state, parts)) is not None]
    assume(found)
    for state, split in found:
        assert operand_state(bound_to(operand), operand, split) == state


def test_concatenated_dims_resolve_to_their_sections() -> None:
    packed = BoundOperand((BoundDim((Factor("q", 12), Factor("k", 6)), True),), False)
    assert operand_state(bound_to(packed, "q", "k"), packed, Split("q")) == Sharded(0, 1, (12, 6))
    assert resolve(packed, Sharded(0, 1, (12, 6)), 2) == Split("q")
    assert resolve(packed, Sharded(0, 1, (6, 12)), 2) is None
    assert resolve(packed, Sharded(0), 2) is None


@pytest.mark.parametrize("sections", [(12, 6), (6, 12)])
def test_sections_of_a_part_of_a_dim_are_no_state(sections: tuple[int, ...]) -> None:
    """A dim that becomes a factor, or a part, of another one: none of its operands may be read as lacking it."""
    view = signature("aten.view.default", [(4, 18)], [(72,)], (72,))
    inner = view.bound.inputs[0].dims[1].factors[0].identifier  # type: ignore[union-attr]
    choice = Split(inner or "", sections=sections)
    assert explain_illegal_choice(view, choice, 2) == f"{inner!r} is not a whole dim"
    with pytest.raises(ValueError, match="no shard of"):
        output_states(view, choice, 1)


def test_a_block_with_an_offset_is_not_cut_by_sections() -> None:
    """The call of a shard of the vocabulary names the first row of one block."""
    lookup = signature("aten.embedding.default", [(16, 4), (3,)], [(3, 4)])
    reason = "'v' can only be split into contiguous blocks"
    assert explain_illegal_choice(lookup, Split("v"), 2) is None
    assert explain_illegal_choice(lookup, Split("v", sections=(8, 8)), 2) == reason
    assert explain_illegal_choice(lookup, Split("v", 2), 2) == reason
