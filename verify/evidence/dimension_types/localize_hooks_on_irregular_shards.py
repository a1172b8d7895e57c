"""Ask a `localize` hook what it makes of the call of irregular shards, of which a proof follows none.

A proof knows the call of an equal contiguous block: the model's, or one in which sizes follow the shard. It is a proof
of every split only where the hook makes that same call of the others: of strided blocks, of sections, of unequal
shards, of more parts, of nested axes, beside a split of another identifier, and of larger tensors. A hook is a function
of descriptions, so that asking it costs nothing but its own time; what it refuses is in no program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import gcd, prod
from typing import Any

from op_registry.bind_and_localise_call import bind_call
from op_registry.call import Call, TensorArgument
from op_registry.errors import AnnotationError
from op_registry.rank_expression import Expression
from op_registry.spec import Refusal

from nnscaler.ir.derive_operand_layouts import explain_illegal_choice, shards_of
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Split
from verify.evidence.dimension_types.localized_call_as_whole_call import (
    NoProof,
    content,
    followed_in,
    leaves_of_call,
    resolved,
)
from verify.evidence.dimension_types.make_call_with_symbolic_sizes import resized
from verify.evidence.smt.smaller_calls import same_kind
from verify.evidence.split_case import uneven_sizes

PARTS = (2, 3, 4, 5, 6, 8, 12, 16)
OUTERS = (2, 3, 4)
NESTED = ((2, 2), (3, 2), (2, 3), (4, 2), (2, 4))
BESIDE = ((2, 2), (3, 2), (8, 2))
PAIRED = (0, 1, 3)  # of the tables of sizes in `_sized`
COMMON = 48  # larger sizes divide by it: 16 parts, and 8 parts of 2 or 3 blocks
FACTORS = (1, 5)  # and are this many times as large

Form = tuple[tuple[Split, ...], tuple[int, ...]]  # one choice for each axis, and the axes' sizes
# The arguments of each rank's call by their place, one where all ranks make the same; None where the hook refuses.
Made = list[dict[Any, Any]] | None


def asked_otherwise(signature: Signature, identifier: str, followed: Call | None, others: Sequence[str]) -> None:
    """Ask the hook of the signature's operator for other shards than equal contiguous blocks.

    `followed`: what `whole_call` says of those; `others`: identifiers of which it says something too. Raises NoProof
    where the hook makes another call, or raises.
    """
    if signature.spec is None or signature.spec.localize is None:
        return
    for number, (asked, whole) in enumerate(_sized(signature, identifier, followed)):
        for form in _forms(asked, identifier):
            made = _made(asked, form)
            if made is not None and not _same(made, _expected(asked, whole, form)):
                raise NoProof(f"its call is rewritten otherwise for other shards ({_said(asked, form)})")
        for form in _beside(asked, identifier, others) if number in PAIRED else ():
            if _axis_by_axis(asked, whole, form) is False:
                raise NoProof(f"its call is not rewritten axis by axis ({_said(asked, form)})")


def left_alone(signature: Signature, identifier: str) -> bool:
    """Return whether the hook keeps the call of unequal shards as it is: False too where it refuses one."""
    if signature.spec is None or signature.spec.localize is None:
        return True
    asked = [form for form in _forms(signature, identifier) if form[0][0].sizes]
    try:
        made = [(_made(signature, form), _expected(signature, signature.call, form)) for form in asked]
    except NoProof:
        return False
    return bool(made) and all(found is not None and _same(found, wanted) for found, wanted in made)


def composes(signature: Signature, first: str, second: str) -> bool:
    """Return whether the hook makes of two splits at once what each makes by itself: False too where it refuses one.

    The same identifier twice is split as by one axis that has as many parts.
    """
    if signature.spec is None or signature.spec.localize is None:
        return True
    try:
        if first != second:
            return _axis_by_axis(signature, signature.call, ((Split(first), Split(second)), (2, 2))) is True
        nested = _made(signature, ((Split(first), Split(first, 2)), (2, 2)))
        flat = _made(signature, ((Split(first),), (4,)))
    except NoProof:
        return False
    return nested is not None and flat is not None and _same(nested, flat)


def _same(made: list[dict[Any, Any]], wanted: list[dict[Any, Any]]) -> bool:
    count = max(len(made), len(wanted))
    return made * (count // len(made)) == wanted * (count // len(wanted))


def _said(signature: Signature, form: Form) -> str:
    assert signature.bound is not None
    return " and ".join(
        f"{choice}, of size {signature.bound.sizes[choice.identifier]}, in {parts} parts"
        for choice, parts in zip(*form, strict=True)
    )


def _sized(signature: Signature, identifier: str, followed: Call | None) -> Iterator[tuple[Signature, Call]]:
    """Yield the sample call with what is followed of it, and the same at larger sizes, where the
    annotation still fits."""
    yield signature, signature.call if followed is None else followed
    bound, call = signature.bound, signature.call
    assert bound is not None and signature.spec is not None
    if followed is not None and content(resolved(followed, bound.sizes.__getitem__)) != content(call):
        return  # it is another operator's, or says the same in other words: which of its numbers are sizes is not known
    together = bound.tied.get(identifier, (identifier,))
    free = [n for n, size in bound.sizes.items() if bound.marks.get(n) != "^" and size > 1]
    if signature.spec.target is None:
        free = []  # many numbers of built-in calls are sizes that their hooks know, and no record declares
    for names, factor in product((together, free) if free else (together,), FACTORS):
        common = COMMON // gcd(COMMON, *(bound.sizes[n] for n in together))
        sizes = {n: size * common * factor if n in names else size for n, size in bound.sizes.items()}
        larger = resized(signature, bound, sizes)
        whole = larger if followed is None else followed_in(larger, followed)
        shapes = [None if o is None else tuple(map(int, o.shape_with(sizes))) for o in bound.outputs]
        outputs = [
            o if o is None or shape is None else TensorArgument(o.index, shape, o.dtype)
            for o, shape in zip(call.outputs, shapes, strict=True)
        ]
        larger = replace(resolved(whole, sizes.__getitem__), outputs=tuple(outputs))
        try:
            fitted = bind_call(signature.spec, larger)
        except AnnotationError:
            continue
        if same_kind(bound, fitted) and dict(fitted.sizes) == sizes:
            yield Signature(larger, signature.spec, fitted, signature.linear), whole


def _forms(signature: Signature, name: str) -> Iterator[Form]:
    """Yield every legal way of splitting one identifier that is asked for."""
    assert signature.bound is not None
    size = signature.bound.sizes[name]
    found: list[Form] = []
    for parts in dict.fromkeys((*PARTS, size) if size < COMMON else PARTS):
        found += [((Split(name, outer),), (parts,)) for outer in (1, *OUTERS)]
        found += [((Split(name, sections=s),), (parts,)) for s in _sections(size, parts)]
        if 1 < parts < size:
            uneven = uneven_sizes(size, parts)
            found += [((Split(name, sizes=s),), (parts,)) for s in (uneven, uneven[::-1])]
        if 1 < parts < size // 2:
            found.append(((Split(name, 2, sizes=uneven_sizes(size // 2, parts)),), (parts,)))
    for first, second in NESTED:
        for outers in ((second, 1), (1, first), (2 * second, 2)):
            found.append(((Split(name, outers[0]), Split(name, outers[1])), (first, second)))
    found.append(((Split(name, 4), Split(name, 2), Split(name)), (2, 2, 2)))
    yield from (form for form in found if _legal(signature, form))


def _sections(size: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield two and three sections, equal and not."""
    yield size // 2, size // 2
    yield parts, size - parts
    yield size // 3, size // 3, size // 3
    yield parts, size - 3 * parts, 2 * parts


def _beside(signature: Signature, name: str, names: Sequence[str]) -> Iterator[Form]:
    """Yield splits of the identifier and of another one at once."""
    bound = signature.bound
    assert bound is not None
    together = bound.tied.get(name, (name,))
    others = [n for n in names if n not in together]
    for other, parts in product(others, BESIDE):
        pairs = list(product(_few(bound.sizes[name], name), _few(bound.sizes[other], other)))
        for first, second in pairs if parts == BESIDE[0] else pairs[:1]:
            form = ((first, second), parts)
            if _legal(signature, form):
                yield form


def _few(size: int, name: str) -> tuple[Split, ...]:
    uneven = Split(name, sizes=uneven_sizes(size, 2)) if size > 2 else Split(name)
    return tuple(dict.fromkeys((Split(name), Split(name, 2), Split(name, sections=(size // 2, size // 2)), uneven)))


def _legal(signature: Signature, form: Form) -> bool:
    choices, parts = form
    assert signature.bound is not None and signature.spec is not None
    if any(explain_illegal_choice(signature, c, p) is not None for c, p in zip(choices, parts, strict=True)):
        return False
    name = choices[0].identifier
    if any(choice.identifier != name for choice in choices) or len(choices) == 1:
        return True
    divides = signature.bound.sizes[name] % prod(parts) == 0
    return divides and not signature.spec.contiguous & set(signature.bound.tied.get(name, (name,)))


def _axes(parts: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"axis {number}", size) for number, size in enumerate(parts)]


def _made(signature: Signature, form: Form) -> Made:
    """Return what the hook makes of the call on every rank; None where it refuses. Raises NoProof where it raises."""
    choices, parts = form
    assert signature.spec is not None and signature.spec.localize is not None
    try:
        call = signature.spec.localize(signature.call, shards_of(signature, choices, _axes(parts)))
    except Refusal:
        return None
    except Exception as error:  # noqa: BLE001 - a hook of a user's may raise anything
        raise NoProof(f"its hook raises {type(error).__name__} ({_said(signature, form)})") from None
    if not any(isinstance(leaf, Expression) for _, leaf in leaves_of_call(call)):
        return [_at(call, {})]
    return [_at(call, place) for place in _places(parts)]


def _expected(signature: Signature, whole: Call, form: Form) -> list[dict[Any, Any]]:
    """Return what a proof of the whole's call says of the same ranks."""
    choices, parts = form
    assert signature.bound is not None
    name = choices[0].identifier
    together = signature.bound.tied.get(name, (name,))
    sizes = choices[0].sizes

    def local(place: Mapping[str, int], member: str) -> int:
        assert signature.bound is not None
        size = signature.bound.sizes[member]
        if member not in together:
            return size
        return sizes[place["axis 0"]] * choices[0].outer if sizes else size // prod(parts)

    if not sizes:
        return [_at(resolved(whole, lambda member: local({}, member)), {})]
    return [_at(resolved(whole, lambda member, at=place: local(at, member)), {}) for place in _places(parts)]  # type: ignore[misc]


def _places(parts: Sequence[int]) -> Iterator[dict[str, int]]:
    for place in product(*map(range, parts)):
        yield {axis: at for (axis, _), at in zip(_axes(parts), place, strict=True)}


def _at(call: Call, place: Mapping[str, int]) -> dict[Any, Any]:
    """Return the call's operator and arguments on the rank at `place`."""
    operator, args, kwargs = content(call)
    found: dict[Any, Any] = {(): (operator, len(args), sorted(kwargs))}
    found |= {path: v.evaluate(place) if isinstance(v, Expression) else v for path, v in leaves_of_call(call)}
    return found


def _axis_by_axis(signature: Signature, whole: Call, form: Form) -> bool | None:
    """Return whether the call of two splits is what each of them by itself makes of the model's, or of `whole`, which
    says the same as the hook does; None where the hook refuses both at once."""
    (one, other), parts = form
    both = _made(signature, form)
    if both is None:
        return None
    first, second = _made(signature, ((one,), parts[:1])), _made(signature, ((other,), parts[1:]))
    if first is None or second is None:
        return False  # together they are not refused
    assert signature.bound is not None
    bases = [_at(call, {}) for call in (signature.call, resolved(whole, signature.bound.sizes.__getitem__))]
    return all(
        any(_composed(base, first[i % len(first)], second[j % len(second)], found) for base in bases)
        for (i, j), found in zip(product(*map(range, parts)), both * (prod(parts) // len(both)), strict=True)
    )


def _composed(base: dict[Any, Any], one: dict[Any, Any], other: dict[Any, Any], both: dict[Any, Any]) -> bool:
    """Return whether both splits together change what each changes, and a number that both change by both factors."""
    if one == base or other == base:
        return both == (other if one == base else one)
    if not one.keys() == other.keys() == both.keys():
        return False
    return all(_composed_leaf(base.get(p), one[p], other[p], both[p]) for p in both)


def _composed_leaf(base: Any, one: Any, other: Any, both: Any) -> bool:
    if one == base or other == base:
        return bool(both == (other if one == base else one))
    if all(type(v) is int for v in (base, one, other, both)):
        return bool(both * base == one * other)
    return bool(one == other == both)
