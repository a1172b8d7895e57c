"""Express the call that a `localize` hook makes for a shard as a call of the whole, with sizes that shrink with shards.

A hook that divides sizes (the pieces of a `split`, the groups of a convolution) is run for several numbers of parts: a
number that shrinks with them is a size of the identifier, one that does not is the whole's. The call that results
is proved instead of the model's, where the two are one and the same on the whole. Numbers that depend on a
rank's place are beyond this proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from op_registry.call import AxisShard, Call, leaves
from op_registry.rank_expression import Expression
from op_registry.spec import OperatorSpec, Refusal

from nnscaler.ir.operation_annotations import Signature
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of, outputs_of, with_tensors

Path = tuple[int | str, ...]

# On the whole, the second does what the first does: pieces of the same sizes, the dims of size 1, all of a dim, and
# sums divided by the number of their terms.
_SAME_ON_THE_WHOLE = frozenset(
    {
        ("aten.split.Tensor", "aten.split_with_sizes.default"),
        ("aten.split.sizes", "aten.split_with_sizes.default"),
        ("aten.split_with_sizes.default", "aten.split_with_sizes.default"),
        ("aten.chunk.default", "aten.split_with_sizes.default"),
        ("aten.squeeze.default", "aten.squeeze.dims"),
        ("aten.squeeze.dim", "aten.squeeze.dims"),
        ("aten.squeeze.dims", "aten.squeeze.dims"),
        ("aten.slice.Tensor", "aten.slice.Tensor"),
        ("aten.slice_scatter.default", "aten.slice_scatter.default"),
        ("aten.repeat_interleave.self_int", "aten.repeat_interleave.self_int"),
        ("aten.unflatten.int", "aten.unflatten.int"),
        *(
            (f"aten.{name}", "aten.split_with_sizes.default")
            for name in (
                "tensor_split.sections",
                "tensor_split.indices",
                "unsafe_split.Tensor",
                "unsafe_split_with_sizes.default",
                "unsafe_chunk.default",
            )
        ),
        *((f"aten.adaptive_avg_pool{n}d.default", "nnscaler.mean_over") for n in (1, 2, 3)),
        ("aten.mean.default", "nnscaler.mean_over"),
        ("aten.mean.dim", "nnscaler.mean_over"),
    }
)
_MEANS = "nnscaler.mean_of"  # of any loss


@dataclass(frozen=True, slots=True)
class Follows:
    """A number of a call that is `times` the product of the identifiers' sizes."""

    times: int
    identifiers: tuple[str, ...]


class NoProof(Exception):
    """The hook does what this proof cannot follow; the message says what."""


def shard_calls(spec: OperatorSpec, signature: Signature, identifier: str, parts: int = 0) -> dict[int, Call]:
    """Return the calls that the hook makes for a shard, by the number of parts (that one, or all that divide the
    sample's size). Raises NoProof."""
    bound = signature.bound
    if spec.localize is None or bound is None:
        return {}
    size = bound.sizes[identifier]
    together = bound.tied.get(identifier, (identifier,))
    try:
        return {
            p: spec.localize(signature.call, {name: (AxisShard("axis", p),) for name in together})
            for p in ([parts] if parts else range(2, size + 1))
            if parts or all(bound.sizes[name] % p == 0 for name in together)
        }
    except Refusal as refusal:
        raise NoProof(f"its hook refuses: {refusal}") from None


def whole_call(spec: OperatorSpec, concrete: ConcreteCall, signature: Signature, identifier: str) -> Call | None:
    """Return the call of the whole whose shards are what the hook makes, with `Follows` for sizes; None where it leaves
    the call as it is. Raises NoProof."""
    calls = shard_calls(spec, signature, identifier)
    base = signature.call
    if all(content(call) == content(base) for call in calls.values()):
        if not calls and spec.localize is not None:
            raise NoProof("no number of parts divides the sample, to run its hook for")
        return None
    if len(calls) < 2:  # one number of parts tells no size from a number: look whether any depends on it
        calls |= shard_calls(
            spec, signature, identifier, 3 * signature.bound.sizes[identifier] if signature.bound else 0
        )
        if len({repr(content(call)) for call in calls.values()}) > 1:
            raise NoProof("its call is rewritten for shards, and one number of parts does not tell how")
    followed = _followed(signature, identifier, calls)
    if not _same_on_the_whole(spec, concrete, base, followed, signature):
        raise NoProof(f"its call is rewritten for shards ({followed.operator})")
    return followed


def content(call: Call) -> tuple[Any, ...]:
    """Return what of a call a hook may change."""
    return call.operator, call.args, dict(call.kwargs)


def _followed(signature: Signature, identifier: str, calls: Mapping[int, Call]) -> Call:
    found = {p: dict(leaves_of_call(call)) for p, call in calls.items()}
    first = next(iter(calls.values()))
    if any(call.operator != first.operator for call in calls.values()):
        raise NoProof("its call is rewritten for shards, by the number of parts")
    if any(own.keys() != found[min(found)].keys() for own in found.values()):
        raise NoProof("its call is rewritten for shards, by the number of parts")
    changes: dict[Path, Any] = {}
    for path in found[min(found)]:
        column = {p: own[path] for p, own in found.items()}
        if any(isinstance(v, Expression) for v in column.values()):
            raise NoProof("its call is rewritten for shards, by the rank's place")
        if len(set(map(repr, column.values()))) > 1:
            changes[path] = _size(signature, identifier, path, column)
    return _replace_leaves(first, changes)


def _size(signature: Signature, identifier: str, path: Path, column: Mapping[int, Any]) -> Follows:
    """Return the size that shrinks as the number of parts grows."""
    bound = signature.bound
    assert bound is not None
    wholes = {v * p for p, v in column.items()} if all(isinstance(v, int) for v in column.values()) else set()
    if len(wholes) != 1:
        raise NoProof("its call is rewritten for shards, by the number of parts")
    (whole,) = wholes
    together = bound.tied.get(identifier, (identifier,))
    place = path[-1]
    if len(together) > 1:
        own = [name for name in together if bound.sizes[name] == whole]
        at = together[place] if isinstance(place, int) and place < len(together) else None
        if at in own:
            return Follows(1, (at,))
        raise NoProof("its call is rewritten for shards, by sizes of a concatenation")
    if whole % bound.sizes[identifier]:
        raise NoProof("its call is rewritten for shards, by what is no multiple of the size")
    return Follows(whole // bound.sizes[identifier], (identifier,))


def leaves_of_call(call: Call) -> Iterator[tuple[Path, Any]]:
    """Yield the arguments of a call that are no lists, with their places."""
    return leaves({"args": call.args, **call.kwargs})


def _replace_leaves(call: Call, changes: Mapping[Path, Any]) -> Call:
    def rebuild(value: Any, path: Path) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(rebuild(item, (*path, i)) for i, item in enumerate(value))
        return changes.get(path, value)

    args = rebuild(tuple(call.args), ("args",))
    return replace(call, args=args, kwargs={name: rebuild(v, (name,)) for name, v in call.kwargs.items()})


def resolved(call: Call, size: Callable[[str], Any]) -> Call:
    """Return the call with a number (or symbol) for every `Follows`; `size` gives those of identifiers."""
    found = {path: leaf for path, leaf in leaves_of_call(call) if isinstance(leaf, Follows)}
    return _replace_leaves(call, {path: leaf.times * prod(map(size, leaf.identifiers)) for path, leaf in found.items()})


def followed_in(call: Call, followed: Call) -> Call:
    """Return the call with `Follows` where `followed` has them."""
    return _replace_leaves(call, {path: leaf for path, leaf in leaves_of_call(followed) if isinstance(leaf, Follows)})


def _same_on_the_whole(
    spec: OperatorSpec, concrete: ConcreteCall, base: Call, followed: Call, signature: Signature
) -> bool:
    """Return whether the call with the whole's sizes equals the model's.

    It does if it is the same call, or one that is known to be equivalent and gives the same result on the sample.
    """
    assert signature.bound is not None
    whole = resolved(followed, signature.bound.sizes.__getitem__)
    if content(whole) == content(base):
        return True
    if (base.operator, whole.operator) not in _SAME_ON_THE_WHOLE and whole.operator != _MEANS:
        return False
    return _equal(_run(spec, base, concrete), _run(spec, whole, concrete))


def _run(spec: OperatorSpec, call: Call, concrete: ConcreteCall) -> Sequence[Any]:
    args, kwargs = with_tensors(call, list(concrete.tensors), {})
    with torch.no_grad():
        return outputs_of(function_of(call.operator, spec)(*args, **kwargs))


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        x is not None and y is not None and x.shape == y.shape and torch.allclose(x, y, rtol=1e-12, atol=0)
        for x, y in zip(a, b, strict=True)
    )
