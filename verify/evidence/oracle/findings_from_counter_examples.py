"""From a counter-example to a finding: what was split, on what, what came out, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from op_registry.annotation.bind_sizes import BoundAnnotation
from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError
from nnscaler.exception_in_one_line import first_line
from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from verify.evidence.oracle.annotation_claims import Claimed, split_by, target_text
from verify.evidence.oracle.case_runner import CaseResult
from verify.evidence.oracle.check_by_cases import one_way
from verify.evidence.oracle.enumerate_cases import Unusable
from verify.results.finding import Finding

SHOWN = 4  # claims and reasons in a finding


def wrong(spec: OperatorSpec, result: CaseResult) -> Finding:
    """The finding of a counter-example."""
    choice = result.case.choices[0]
    if isinstance(choice, RunPartial) and len(result.case.choices) == 1:
        return wrong_linear(spec, result)
    return wrong_split(spec, result)


def wrong_split(spec: OperatorSpec, result: CaseResult) -> Finding:
    """A split that the annotation allows, and that is wrong."""
    bound = result.signature.bound
    assert bound is not None
    choices = [c for c in result.case.choices if isinstance(c, Split)]
    names = " and ".join(dict.fromkeys(f"`{c.identifier}`" for c in choices)) or "operands that hold partial sums"
    facts = counter_example(result)
    if result.raised is not None:
        message = f"`{spec.name}` raises on a shard of {names}, which `{bound.text}` says may be split"
        return Finding("shard_raises", message, spec.where, facts)
    assert result.compared is not None
    what = result.compared.mismatches[0].what
    how = f"in slices of {names}" if choices and choices[0].prefix else f"when {names} is split"
    message = f"{what} of `{spec.name}` is wrong {how}, as `{bound.text}` allows"
    if len(result.case.choices) > 1:
        message = f"{what} of `{spec.name}` is wrong on a mesh of two axes that split {names}"
    return Finding("annotation_wrong", message, spec.where, facts, _cause(result))


def wrong_linear(spec: OperatorSpec, result: CaseResult) -> Finding:
    """Make the finding on a linear set in which the operator is not linear."""
    choice = result.case.choices[0]
    assert isinstance(choice, RunPartial)
    slots = sorted(choice.slots)
    message = f"`{spec.name}` is declared linear in inputs {slots}, and is not"
    return Finding(
        "linear_set_wrong", message, spec.where, counter_example(result), help="remove the set from `linear`"
    )


def counter_example(result: CaseResult) -> dict[str, str]:
    """Return the facts of a failure, in the order in which they are shown."""
    case, bound = result.case, result.signature.bound
    facts: dict[str, str] = {}
    if bound is not None and any(isinstance(c, Split) for c in case.choices):
        facts["annotation"] = bound.text
    facts["identifier"] = ", ".join(_name(c) for c in case.choices)
    facts["parts"] = " x ".join(map(str, case.parts))
    if any(isinstance(c, Split) and c.outer > 1 for c in case.choices):
        facts["outer"] = ", ".join(str(c.outer) for c in case.choices if isinstance(c, Split))
    if any(isinstance(c, Split) and c.sections for c in case.choices):
        facts["sections"] = ", ".join(str(c.sections) for c in case.choices if isinstance(c, Split))
    if case.uneven:
        facts["shards"] = "of unequal sizes"
    facts["shapes"] = ", ".join(str(t.shape) for t in result.signature.call.tensors())
    if case.inputs.flags:
        facts["not their default"] = ", ".join(f"`{name}`" for name in case.inputs.flags)
    facts["dtype"] = case.inputs.dtype
    facts["values"] = case.inputs.kind
    if case.inputs.factors:
        facts["factors"] = f"{', '.join(f'{f:.6g}' for f in case.inputs.factors)} (the last of the cotangents)"
    if case.inputs.sentinels:
        held = (f"{number:g} in input {index}" for index, number in case.inputs.sentinels)
        facts["ids"] = f"{', '.join(held)}, among others"
    if result.raised is not None:
        shapes = ", ".join(map(str, result.raised.shapes))
        rank = result.raised.rank[0] if len(result.raised.rank) == 1 else result.raised.rank
        facts["shard"] = f"{rank} with shapes {shapes}"
        facts["error"] = first_line(result.raised, 200)
    elif result.compared is not None:
        mismatch = result.compared.mismatches[0]
        facts["tensor"] = mismatch.what
        if mismatch.layout:
            facts["layout"] = mismatch.layout
        if mismatch.values is not None:
            facts["expected"], facts["found"] = mismatch.values
        if mismatch.difference.problem:
            facts["difference"] = mismatch.difference.problem
        else:
            facts["mismatched"] = f"{mismatch.difference.mismatched} of {mismatch.difference.elements}"
            facts["greatest difference"] = f"{mismatch.difference.absolute:.6g} ({mismatch.difference})"
    return facts


def _name(choice: Choice) -> str:
    if isinstance(choice, RunPartial):
        return f"partial sums in inputs {sorted(choice.slots)}"
    return choice.identifier if isinstance(choice, Split) else str(choice)


def _cause(result: CaseResult) -> str | None:
    bound, choice = result.signature.bound, result.case.choices[0]
    if bound is None or not isinstance(choice, Split):
        return None
    name = choice.identifier
    if choice.prefix:
        return _cause_in_slices(bound, name)
    if result.case.inputs.dtype != "float64":
        return f"float64 agrees, {result.case.inputs.dtype} does not: the operator treats dtypes differently on a shard"
    if bound.marks.get(name) == "+":
        return f"`{name}` is marked as a reduction, but shards of it do not add up to the whole"
    return f"`{name}` has no mark, but what a shard computes depends on the other shards"


def _cause_in_slices(bound: BoundAnnotation, name: str) -> str:
    read = [other for other, along in bound.rows.items() if along == name]
    if name in read:
        return f"a slice is given the rows of `{name}` up to its last one, and makes other results of these rows"
    marked = " and ".join(f"`{other}`" for other in read)
    given = f"a slice is given its rows of `{name}`, and those of {marked} up to its last one"
    return f"{given}: its last row of `{name}` has to be read as that of the last row of {marked}"


def refuted_by_proof(spec: OperatorSpec, claim: str, text: str, example: Mapping[str, str]) -> Finding:
    """Make the finding on values that no draw had hit, found by the attempt at a proof."""
    message = f"`{spec.name}` is wrong under `{claim}` for some values, as the attempt to prove `{text}` shows"
    help = "the values are exact: call the operator on them, whole and split"
    return Finding("annotation_wrong", message, spec.where, example, help=help)


def unusable(spec: OperatorSpec, problem: Unusable) -> Finding:
    """Make the finding on an operator that could not be tested, or does not fit its annotation."""
    help = None
    if problem.refuted:
        help = "the operator runs when all sizes are equal: two identifiers of the annotation should be one"
    elif problem.code in ("annotation_does_not_fit", "uninformative", "claim_not_tested"):
        help = "register_op(..., sample_inputs=lambda: dict(...)) gives inputs on which the operator runs"
    return Finding(problem.code, str(problem), spec.where, help=help)


def does_not_fit(spec: OperatorSpec, error: AnnotationError) -> Finding:
    """A call of the operator to which its annotation cannot be bound."""
    first, _, rest = error.message.partition("\n")
    return Finding("annotation_does_not_fit", first, spec.where, cause=rest.strip() or None, help=error.help)


def not_tested(spec: OperatorSpec, claims: Sequence[Claimed], reasons: Sequence[str]) -> Finding:
    """Make the finding on claims that no inputs exercise: a split of a dim whose size does not divide shows nothing."""
    first = claims[0]
    what = ("partial sums in " if isinstance(first.target, frozenset) else "") + target_text(first.target)
    message = f"no inputs of `{spec.name}` test all of what `{first.text}` says of {what}"
    facts: dict[str, list[str]] = {}
    for claim in claims[:SHOWN]:
        facts.setdefault(f"not tested under `{claim.text}`", []).append(str(claim))
    shown = {key: "; ".join(values) for key, values in facts.items()}
    if len(claims) > SHOWN:
        shown["and"] = f"{len(claims) - SHOWN} more"
    help = "register_op(..., sample_inputs=lambda: dict(...)) gives inputs that do"
    name = split_by(first.target)
    if name is not None:
        help = (
            f"give a sample in which `{name}` is 12 (sample_inputs=): it divides by 2, 3 and 4, and into"
            f" strided and unequal shards; or freeze it: `{name}^`"
        )
    return Finding("claim_not_tested", message, spec.where, shown, cause="; ".join(reasons[:SHOWN]) or None, help=help)


def went_one_way(spec: OperatorSpec, places: Sequence[str]) -> Finding:
    """Make the finding on branches on values of which only one side was ever run."""
    message = f"`{spec.name}` decides by values, and one side of that was not seen: {one_way(places)}"
    help = "register_op(..., sample_inputs=lambda: dict(...)) gives inputs that go the other way too"
    return Finding("claim_not_tested", message, spec.where, help=help)


def survived(spec: OperatorSpec, target: str, variants: list[str]) -> Finding:
    """Make the finding on wrong variants that nothing tells from the right result."""
    message = f"on all inputs tried, a wrong result of `{spec.name}` under {target} looks right: {', '.join(variants)}"
    help = "register_op(..., sample_inputs=lambda: dict(...)) gives inputs whose results differ from shard to shard"
    return Finding("mutant_survived", message, spec.where, help=help)
