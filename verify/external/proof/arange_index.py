"""`x[arange(rows), columns]` where ranks divide the rows: each rank counts its own.

A rank's `arange(2)` is no shard of the model's `arange(4)`: the second rank has 0 and 1, and a shard would be 2 and
3. Used as an index into rows that are divided in the same way it is right all the same. Masks of transformers are
made so.
"""

from __future__ import annotations

from collections.abc import Mapping

from verify.evidence.dimension_types.states import SAME, Shard, State
from verify.external.proof.call_normal_form import OperatorForm
from verify.external.proof.extra_transfer_rules import OWN_ROWS
from verify.external.proof.facts import Fact
from verify.external.proof.rank_graph import CallOutput, Form
from verify.external.proof.result_states_of_rank_call import Failure, Lifting, Pair, PairedCall
from verify.external.proof.scalar_factors import tensors_of
from verify.external.proof.terms import UNIT, Terms


def own_rows(
    call: OperatorForm,
    given: Mapping[CallOutput, Fact],
    forms: Mapping[CallOutput, Form],
    terms: Terms,
    lifting: Lifting,
) -> list[Fact]:
    """Return the facts of an `index` whose first index counts the rank's rows of what is indexed; none if it is not
    such a call of the model's."""
    names = tensors_of(call.arguments)
    indices = call.arguments.get("indices", ())
    if str(call.overload) != "aten.index.Tensor" or not indices or not isinstance(indices[0], CallOutput):
        return []
    of, rows = call.arguments["self"], indices[0]
    cuts = [i for i, s in enumerate(given[of].states) if isinstance(s, Shard) and s.dim == 0]
    whole = terms.shape(given[of].term)
    counted = _count(terms, given[rows].term)
    (out, *_) = call.outputs
    if not cuts or whole is None or counted != forms[of].shape[0] or set(given[rows].states) != {SAME} or out is None:
        return []
    wanted = tuple((given[ref].coefficient, given[ref].term) for _, ref in names)
    made: list[Fact] = []
    for operands, known in terms.calls_of("aten.index.Tensor"):
        alike = len(operands) == len(wanted) and operands[0] == wanted[0] and operands[2:] == wanted[2:]
        (result,) = known.outputs
        if not alike or result is None or operands[1][0] != 1 or _count(terms, operands[1][1]) != whole[0]:
            continue
        shape = known.shapes[1]
        local = forms[rows].shape
        dims = [d for d, size in enumerate(shape) if size == whole[0]]
        if len(shape) != len(local) or len(dims) != 1 or local != _with(shape, dims[0], counted):
            continue
        facts = dict(given)
        states: list[State] = [SAME] * len(given[of].states)
        for i in cuts:
            cut = given[of].states[i]
            assert isinstance(cut, Shard)
            states[i] = Shard(dims[0], cut.outer)
        facts[rows] = Fact(UNIT, operands[1][1], tuple(states))
        pairs = {
            ref: (Pair(shape_, forms[ref].shape, forms[ref].dtype), facts[ref].states)
            for shape_, (_, ref) in zip(known.shapes, names, strict=True)
        }
        output = Pair(terms[result].shape, out.shape, out.dtype)
        found = lifting.results(PairedCall(OWN_ROWS, call.arguments, {}, pairs, (output,)))
        if not isinstance(found, Failure) and found[0] is not None:
            ignored = frozenset[int]().union(*(f.ignored for f in given.values()))
            made.append(Fact(UNIT, result, found[0].states, None, ignored))
    return made


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _count(terms: Terms, term: int) -> int | None:
    """Return n for `arange(n)` under any dims; None for anything else."""
    row = terms[term]
    if row.operator == "view":
        row = terms[row.operands[0][1]]
    return row.shape[0] if row.operator == "aten.arange.default" else None
