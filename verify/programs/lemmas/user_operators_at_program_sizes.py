"""Hold the claims on a user's operator against the sizes that a program has, and run it there.

A lemma is looked at on small calls. Of an operator that does something else from some size on, these say nothing: what
is proved of it takes for granted conditions on sizes. Here they are held against the program's own sizes, those of the
whole and of each shard; and what is not proved for all sizes is run there. Where that takes too much memory, the sizes
that a condition names are the program's, and all others small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, Split
from verify.programs.lemmas.check_claims import Evidence, test_choices
from verify.programs.lemmas.operator_claims_without_sizes import Claim, RunsWhole, claims_of
from verify.programs.lemmas.result import Lemma
from verify.programs.lemmas.small_call import Representative, call_of_sizes
from verify.programs.lemmas.stand_in_calls_and_tensors import Unrepresented
from verify.programs.typing import Obligation
from verify.results.verdict import Condition, Verdict


def lemmas_at_sizes(
    obligation: Obligation, small: Representative | None, known: Mapping[Claim, Evidence], seed: int
) -> Iterator[Lemma]:
    """Yield a lemma where the operator is wrong at the program's sizes, or where what is known of it does not reach
    them.

    small  the call that was looked at
    known  what is known of its form
    """
    signature = obligation.signature
    claims = (*claims_of(obligation), *(c for c in known if isinstance(c, RunsWhole)))
    relied_on = [known[c] for c in dict.fromkeys(claims) if c in known]
    weaker = [e for e in relied_on if e.verdict.passes and e.verdict is not Verdict.PROVED_ALL_SIZES]
    splits, others = _choices_of(obligation)
    if small is None or not weaker or not (splits or others) or signature.bound is None:
        return
    sizes = signature.bound.sizes
    unmet = dict.fromkeys(c for e in weaker for c in e.conditions if not _holds(c, sizes, splits))
    ran: list[Mapping[str, int]] = []
    reasons: dict[str, None] = {}
    for table in _tables(signature, small, unmet, splits):
        try:
            evidence = test_choices(call_of_sizes(signature, table, seed), splits, others)
        except Unrepresented as error:
            evidence = Evidence(Verdict.INCONCLUSIVE, str(error))
        if evidence.verdict is Verdict.REFUTED:
            yield _lemma(obligation, table, splits, evidence)
            return
        if evidence.verdict.passes:
            ran.append(table)
        else:
            reasons[evidence.blocker] = None
        if table == sizes and evidence.verdict.passes:
            break
    open_ = [c for c in unmet if not any(_same(c.names, table, sizes) for table in ran)]
    shown = ", ".join(dict.fromkeys(f"`{c}`" for c in open_ or unmet))
    if open_:
        reason = "; ".join((f"what is known of it takes {shown} for granted, which does not hold", *reasons))
        yield _lemma(obligation, sizes, splits, Evidence(Verdict.INCONCLUSIVE, reason))
    elif unmet:
        yield _lemma(obligation, sizes, splits, Evidence(Verdict.TESTED_EXACT, f"its proof ends at {shown}", len(ran)))


def _choices_of(obligation: Obligation) -> tuple[dict[str, int], list[Choice]]:
    """Return into how many shards each identifier is split over all axes, and the choices that split nothing.

    What goes around an axis, or is a slice with what is before it, is run as it is anyway.
    """
    splits: dict[str, int] = {}
    others: dict[Choice, None] = {}
    for choice, (_, count) in zip(obligation.choices, obligation.axes, strict=True):
        if count == 1:
            continue
        if not isinstance(choice, Split):
            others[choice] = None
        elif not choice.circulating and not choice.prefix:
            splits[choice.identifier] = splits.get(choice.identifier, 1) * count
    return splits, list(others)


def _holds(condition: Condition, sizes: Mapping[str, int], splits: Mapping[str, int]) -> bool:
    """Return whether a condition holds of the whole and of every shard, of one axis or of several."""
    names = [name for name in condition.names if name in splits]
    each = [{sizes[n], sizes[n] // splits[n], -(-sizes[n] // splits[n])} for n in names]
    return all(condition.holds({**sizes, **dict(zip(names, local, strict=True))}) for local in product(*each))


def _tables(
    signature: Signature, small: Representative, unmet: Iterable[Condition], splits: Mapping[str, int]
) -> Iterator[Mapping[str, int]]:
    """Yield the sizes to run at: the program's; then those of them that a condition names, and each alone, beside
    small ones."""
    bound, known = signature.bound, small.signature.bound
    assert bound is not None and known is not None
    yield bound.sizes
    seen = [dict(bound.sizes)]
    for names in (*(c.names for c in unmet), *({name} for name in bound.sizes)):
        together = {n for name in names for n in bound.tied.get(name, (name,))}
        together |= {along for name, along in bound.rows.items() if name in together}
        table = {
            n: size if n in together else _small(size, known.sizes[n], splits.get(n, 1))
            for n, size in bound.sizes.items()
        }
        table.update({name: table[along] for name, along in bound.rows.items() if along in table})
        if table not in seen:
            seen.append(table)
            yield table


def _small(size: int, small: int, parts: int) -> int:
    """Return a small size that divides by the number of parts where the program's does, and does not where it does
    not."""
    even = parts * -(-small // parts)
    return min(size, even if size % parts == 0 else even + 1)


def _same(names: frozenset[str], table: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    return all(table.get(name) == sizes.get(name) for name in names)


def _lemma(obligation: Obligation, sizes: Mapping[str, int], splits: Mapping[str, int], evidence: Evidence) -> Lemma:
    call, spec, bound = obligation.signature.call, obligation.signature.spec, obligation.signature.bound
    assert spec is not None and bound is not None
    shown = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    shards = " and ".join(f"{count} shards of `{name}`" for name, count in splits.items())
    does = f"makes {shards}" if shards else "runs whole"
    where = f"at the program's sizes ({shown})" if sizes == bound.sizes else f"at {shown}"
    return Lemma(
        f"`{call.operator}` (`{bound.text}`) {does} {where}",
        call.operator,
        f"{call.operator} at {shown}",
        evidence.verdict,
        evidence.blocker,
        obligation.uses,
        obligation.example,
        evidence.count,
        evidence.finding,
        spec.where,
    )
