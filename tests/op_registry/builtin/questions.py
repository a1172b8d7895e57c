"""The questions that an annotation answers on a sample call of its operator: is all true that it says, and all said?

A question yields what is to be checked, each with words that name it; it may have nothing to ask of a sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations

import pytest

from op_registry.annotation.bind_sizes import BoundAnnotation, bind
from op_registry.annotation.splits import splittable
from op_registry.annotation.syntax_tree import UNSPLIT
from op_registry.bind_and_localise_call import linear_sets
from op_registry.call import AxisShard
from op_registry.errors import AnnotationError
from op_registry.samples import Sample
from op_registry.spec import Refusal, Shards

from tests.op_registry.builtin.oracle import Mismatch, Whole, check_partial, check_split, differentiable, whole_run

Check = tuple[str, Callable[[], None]]
Question = Callable[[Sample, Whole], Iterator[Check]]

FURTHER_DRAWS = (100_001, 100_002, 100_003)  # seeds

# Frozen although a split gives the right result on this data: it depends on values, or is not worth a hook.
FROZEN_ANYWAY = "all all.dim all.dims one_hot histc new_zeros new_ones new_empty repeat embedding".split()

# Not called linear although it is: casts, what has no gradient, a `dtype=`, and what nobody gives partial sums.
LINEAR_ANYWAY = """
    isfinite isinf isnan logical_not nan_to_num xlogy.Tensor to.dtype to.device _to_copy type_as view_as
    reshape_as expand_as mean mean.dim layer_norm group_norm batch_norm embedding scatter.value new_zeros
    new_ones new_full new_empty ones_like full_like fill.Scalar fill.Tensor cross_entropy_loss nll_loss_nd
    dropout feature_dropout alpha_dropout feature_alpha_dropout scatter_reduce.two index_reduce
    isneginf isposinf isreal nansum nanmean xlogy.Scalar_Other special_xlogy special_xlogy.other_scalar
    special_xlog1py special_xlog1py.other_scalar nll_loss nll_loss2d instance_norm native_batch_norm
    _native_batch_norm_legit_no_training ormqr _weight_norm
""".split()


def what_may_be_split(sample: Sample, w: Whole) -> Iterator[Check]:
    """Exactly the identifiers that the sample names."""

    def check() -> None:
        assert {name for name in w.bound.sizes if splittable(w.bound, name, 2) is None} == sample.splits

    yield "in 2", check


def splits(sample: Sample, w: Whole) -> Iterator[Check]:
    """Every split in 2 and 3, of the dim and of its inner part, makes the whole, or is refused by its hook."""
    for name in _leaders(w.bound):
        for parts in (2, 3):
            for outer in (1, 2, 3):
                if splittable(w.bound, name, parts, outer) is None:
                    check = _refused if outer > 1 and name in w.spec.contiguous else check_split
                    yield f"{name} = {outer} x {parts}", partial(check, w, {name: (AxisShard("x", parts, outer),)})


def two_axes(sample: Sample, w: Whole) -> Iterator[Check]:
    """Two identifiers on an axis each, and one identifier on two axes."""
    names = [name for name in _leaders(w.bound) if splittable(w.bound, name, 6) is None]
    for first, second in combinations(names, 2):
        shards = {first: (AxisShard("x", 2),), second: (AxisShard("y", 3),)}
        yield f"{first} on x, {second} on y", partial(check_split, w, shards)
    for name in names:
        nested = {name: (AxisShard("x", 3, outer=2), AxisShard("y", 2))}
        if name in w.spec.contiguous:
            yield f"{name} on x and y", partial(_refused, w, nested)
        elif len(w.bound.tied[name]) == 1:
            yield f"{name} on x and y", partial(check_split, w, nested)


def partial_sums(sample: Sample, w: Whole) -> Iterator[Check]:
    """Partial sums of each linear set of inputs give partial sums of the outputs."""
    for slots in linear_sets(w.spec, w.call):

        def check(slots: frozenset[int] = slots) -> None:
            assert slots <= set(range(len(w.inputs)))
            check_partial(w, slots, 3)

        yield f"inputs {sorted(slots)}", check


def frozen_dims(sample: Sample, w: Whole) -> Iterator[Check]:
    """A dim is frozen for a reason: where the annotation lets it be split, the shards do not make the whole.

    One draw may hide that (the places of two maxima may add up to that of the whole), so that several are tried.
    """
    if not w.compare or short_name(sample.operator) in FROZEN_ANYWAY:
        return
    for name, mark in w.bound.marks.items():
        if mark not in UNSPLIT or name.startswith("*") or w.bound.sizes[name] % 2 or w.bound.sizes[name] == 2:
            continue
        for wrong in (name, f"{name}+"):
            text = re.sub(rf"\b{name}(\^|<\w*)", wrong, w.bound.text)
            try:
                mutant = _cut_as_others(with_text(w, text), name)
            except AnnotationError:
                continue
            shards = {name: (AxisShard("x", 2),)}
            checks = [partial(check_split, mutant, shards)]
            checks += [partial(_split_again, sample, seed, text, shards) for seed in FURTHER_DRAWS]
            yield f"{name}^ as {wrong}", partial(_refuted, (Mismatch, RuntimeError, IndexError), checks)


def other_linear_sets(sample: Sample, w: Whole) -> Iterator[Check]:
    """Linear sets miss nothing: partial sums in any other set of inputs give a wrong result."""
    if not w.compare or short_name(sample.operator) in LINEAR_ANYWAY:
        return
    known = linear_sets(w.spec, w.call)
    floats = [i for i, t in enumerate(w.inputs) if differentiable(t) and t.requires_grad]
    for slots in map(frozenset, chain.from_iterable(combinations(floats, r) for r in range(1, len(floats) + 1))):
        if not any(slots <= found for found in known):
            yield (
                f"inputs {sorted(slots)}",
                partial(_refuted, (Mismatch, RuntimeError), [partial(check_partial, w, slots, 3)]),
            )


QUESTIONS: tuple[Question, ...] = (
    what_may_be_split,
    splits,
    two_axes,
    partial_sums,
    frozen_dims,
    other_linear_sets,
)


def short_name(operator: str) -> str:
    return re.sub(r"^(aten|nnscaler)\.|\.default$", "", operator)


def with_text(w: Whole, text: str) -> Whole:
    """The run under another annotation. Raises `AnnotationError` where that does not fit."""
    outputs = [None if o is None else o.shape for o in w.outputs]
    return replace(w, bound=bind(text, [t.shape for t in w.inputs], outputs, w.bound.sizes))


def _leaders(bound: BoundAnnotation) -> Iterator[str]:
    """One identifier of each set that is split together."""
    return (name for name in bound.sizes if bound.tied[name][0] == name)


def _refused(w: Whole, shards: Shards) -> None:
    with pytest.raises(Refusal, match="contiguous"):
        check_split(w, shards)


def _split_again(sample: Sample, seed: int, text: str, shards: Shards) -> None:
    (name,) = shards
    check_split(_cut_as_others(with_text(whole_run(sample, seed), text), name), shards)


def _cut_as_others(w: Whole, name: str) -> Whole:
    """The run without a hook for what goes around an axis: it would refuse a cut of that dim alone."""
    return replace(w, spec=replace(w.spec, localize=None)) if name in dict(w.spec.circulates).values() else w


def _refuted(errors: tuple[type[Exception], ...], checks: Sequence[Callable[[], None]]) -> None:
    """One of the checks of a false claim fails."""
    for check in checks:
        try:
            check()
        except errors:
            return
    pytest.fail(f"DID NOT RAISE any of {errors}")
