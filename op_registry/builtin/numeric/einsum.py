"""`einsum` in every spelling: blanks, capitals, `...`, no arrow, one letter twice in a term.

Letters that the result lacks are reductions. A letter twice in one term is a diagonal: no layout splits one, so that
letter is frozen and the others stay free.
"""

from __future__ import annotations

from op_registry.builtin._dims import annotate, linear_in_each
from op_registry.builtin.numeric.matmul import product_flops
from op_registry.call import Call
from op_registry.spec import OperatorSpec

_DOTS = "..."


def _terms(equation: str) -> tuple[list[str], str]:
    """The operands' letters and the result's; without `->` those that occur once, in alphabetical order."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        used = left.replace(",", "").replace(".", "")
        right = (_DOTS if _DOTS in left else "") + "".join(sorted(c for c in set(used) if used.count(c) == 1))
    return left.split(","), right


def _spelled(term: str, common: list[str]) -> list[str]:
    """The names of a term's dims, `...` being those in `common`."""
    head, dots, tail = term.partition(_DOTS)
    return [*head, *(common if dots else ()), *tail]


def _einsum(call: Call) -> str:
    """`einsum("b i k, k j -> b i j", [x, y])`; dims of `...` broadcast, aligned at the right."""
    tensors = call.tensors()
    terms, result = _terms(str(call.get(0, "equation")))
    rests = [t.ndim - len(term.replace(_DOTS, "")) for t, term in zip(tensors, terms, strict=True)]
    common = [f"e{i}" for i in range(max(rests))]
    spelled = [_spelled(term, common[len(common) - rest :]) for term, rest in zip(terms, rests, strict=True)]
    output = _spelled(result, common)
    twice = {name for names in spelled for name in names if names.count(name) > 1}
    sizes: dict[str, int] = {}
    for t, names in zip(tensors, spelled, strict=True):
        for name, size in zip(names, t.shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]

    def dim(name: str, size: int) -> str:
        if size != sizes[name]:
            return "1"  # expanded
        return f"{name}^" if name in twice else name if name in output else f"{name}+"

    inputs = [
        [dim(n, size) for n, size in zip(names, t.shape, strict=True)]
        for t, names in zip(tensors, spelled, strict=True)
    ]
    return annotate(inputs, [[dim(n, sizes[n]) for n in output]])


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.einsum.default", _einsum, linear=linear_in_each, flops=product_flops),
)
