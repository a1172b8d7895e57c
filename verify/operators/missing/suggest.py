"""The widest annotation that holds for every call of an operator that has none.

Nothing is suggested that was not tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError, NnscalerError
from verify.evidence.inputs.concrete_call import function_of
from verify.operators.missing.calls import Form
from verify.operators.suggest.infer import Suggestion, infer_annotation
from verify.operators.suggest.probe_call import make_question
from verify.operators.suggest.tested import report_on, with_annotation
from verify.results.verdict import Verdict, merge

Gradient = Literal["derivative", "custom"]


@dataclass(frozen=True)
class Advice:
    """The suggestion for one operator.

    texts     the annotation of each form of its calls, None where nothing of it can be split; empty: see `reason`
    verdict   on the texts together
    own       whether all were tested on the model's own shapes
    gradient  "custom": they hold, but the operator's own backward is not the derivative of its forward
    reason    why there is no annotation
    """

    texts: tuple[str | None, ...] = ()
    verdict: Verdict = Verdict.INCONCLUSIVE
    own: bool = False
    gradient: Gradient = "derivative"
    reason: str = ""

    @property
    def found(self) -> bool:
        return any(text is not None for text in self.texts)

    @property
    def text(self) -> str | None:
        """The one annotation of all calls; None where they differ."""
        return self.texts[0] if len(set(self.texts)) == 1 else None


def advise(spec: OperatorSpec, forms: Sequence[Form]) -> Advice:
    """Infer an annotation and test it. Never raises for what the operator does."""
    if _is_random(spec):
        return Advice(reason="it draws random numbers, which no annotation makes the same on every rank")
    advice = _advise(spec, forms)
    if advice.found or not isinstance(getattr(spec.target, "__self__", None), type):
        return advice
    custom = _advise(replace(spec, gradient="custom"), forms)  # its backward may be none of its forward
    return replace(custom, gradient="custom") if custom.found else advice


def _advise(spec: OperatorSpec, forms: Sequence[Form]) -> Advice:
    found: list[list[Suggestion]] = []
    raised = ""
    for form in forms:
        try:
            found.append(infer_annotation(spec, form.call))
        except NnscalerError as error:
            found.append([])
            raised = error.message.partition("\n")[0]
        except Exception as error:  # noqa: BLE001 - the operator may raise anything on inputs of our choice
            found.append([])
            raised = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    own = all(form.own for form in forms)
    common = _common(spec, forms, found)
    if common is not None:
        return Advice((common.text,) * len(forms), common.report.verdict, own)
    texts = tuple(s[0].text if s else None for s in found)
    verdict = merge(s[0].report.verdict for s in found if s)
    reason = "" if any(found) else raised or "no annotation was found under which anything of it could be split"
    return Advice(texts, verdict, own, reason=reason)


def _common(spec: OperatorSpec, forms: Sequence[Form], found: Sequence[Sequence[Suggestion]]) -> Suggestion | None:
    """Return the widest annotation that was found for every form, tested on all of them at once; None where they
    differ."""
    if not found or not all(found):
        return None
    if len(found) == 1:
        return found[0][0]
    for candidate in found[0]:
        if not all(candidate.text in {s.text for s in others} for others in found[1:]):
            continue
        function = function_of(spec.name, spec)
        try:
            questions = [make_question(spec, function, form.call) for form in forms]
            report = report_on(with_annotation(spec, candidate.text, questions))
        except AnnotationError:
            continue
        if report.verdict.passes:
            return Suggestion(candidate.text, report)
    return None


def _is_random(spec: OperatorSpec) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(spec.target, "tags", ())
