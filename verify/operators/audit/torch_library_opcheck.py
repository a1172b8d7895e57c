"""torch's own check of how an operator of torch.library is registered: four tests, each a check of the report."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from op_registry.spec import OperatorSpec

from verify.evidence.inputs.concrete_call import ConcreteCall, with_tensors
from verify.evidence.oracle.run_whole_operator import as_leaves
from verify.operators.audit.watch_effects_on_tensors import Probed, shapes_of
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

TESTS = MappingProxyType(
    {
        "test_schema": (
            "its schema says what it changes and what shares memory",
            "correct `mutates_args` or the schema",
        ),
        "test_autograd_registration": (
            "its backward is registered where autograd looks",
            "register it with `torch.library.register_autograd`",
        ),
        "test_faketensor": (
            "its fake kernel gives the shapes, strides and dtypes that the real one gives",
            "correct or add its `register_fake`",
        ),
        "test_aot_dispatch_dynamic": (
            "traced with symbolic shapes, it computes the same outputs and gradients",
            "correct its fake kernel, and write the backward with torch operators that can be traced",
        ),
    }
)
OWN_NAMESPACES = ("aten", "prims", "prim", "nnscaler")
MOST = 300  # characters of torch's message


def library_overload(spec: OperatorSpec) -> torch._ops.OpOverload | None:
    """Return the overload that somebody has registered with torch.library; None for any other operator."""
    found: Any = getattr(spec.target, "_opoverload", spec.target)
    if isinstance(found, torch._ops.OpOverloadPacket) and len(found.overloads()) == 1:
        found = getattr(found, found.overloads()[0])
    if not isinstance(found, torch._ops.OpOverload) or found.namespace in OWN_NAMESPACES:
        return None
    return found


def opcheck(
    spec: OperatorSpec, concrete: ConcreteCall, *, check: Callable[..., dict[str, Any]] | None = None
) -> Probed:
    """Run `torch.library.opcheck` on float32 copies of the inputs, those with gradients asking for them.

    Nothing for operators that are not of torch.library. `check`: what to run instead of torch's.
    """
    overload = library_overload(spec)
    if overload is None:
        return Probed()
    leaves = as_leaves(concrete.tensors, torch.float32, concrete.constants)
    args, kwargs = with_tensors(concrete.call, leaves, {}, torch.float32)
    checks: list[Check] = []
    findings: list[Finding] = []
    notes: list[str] = []
    for test, (meaning, help) in TESTS.items():
        if test == "test_autograd_registration" and not any(t.requires_grad for t in leaves):
            notes.append(f"torch's `{test}` was not run: no input of `{spec.name}` has a gradient")
            continue
        started = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = check or torch.library.opcheck
                outcome = run(overload, tuple(args), kwargs, test_utils=test, raise_exception=False)[test]
        except Exception as error:  # noqa: BLE001 - the tests are torch's; what they raise is their answer
            outcome = error
        seconds = time.perf_counter() - started
        if outcome == "SUCCESS":
            checks.append(Check(test, Verdict.TESTED_EXACT, 1, 0, seconds, meaning, supporting=True))
            continue
        checks.append(Check(test, Verdict.REFUTED, 1, 1, seconds, supporting=True))
        facts = {"test": test, "shapes": shapes_of(concrete.tensors), "dtype": "float32"}
        message = f"`{spec.name}` fails torch's `{test}`: {shortened(str(outcome))}"
        findings.append(Finding("opcheck_failed", message, spec.where, facts, f"{test}: {meaning}: no", help))
    return Probed(tuple(checks), tuple(findings), tuple(notes))


def shortened(text: str) -> str:
    """Return the first sentence of torch's message, without where it says to look further."""
    text = re.sub(r"\(scroll up[^)]*\)", "", text)
    line = " ".join(text.split())
    line = re.sub(r"^opcheck\(op, \.\.\.\): \w+ failed with ", "", line)
    line = re.sub(r"\S+ \(with implementation in [^)]*\): ", "", line)
    sentence = re.split(r"(?<=[a-z0-9)`'\"])(?<!e\.g)(?<!i\.e)[.:;]\s+(?=[A-Z])", line, maxsplit=1)[0].rstrip(".:")
    return sentence[:MOST] or "it gives no reason"
