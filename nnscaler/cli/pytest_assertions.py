"""Assertions of verification inside a test: fail with the concise report, unless the verification passes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.model_file import load_model_file
from nnscaler.plan_source import read_plan
from verify import verify_external, verify_op, verify_plan
from verify.gate.accepted_findings_with_owners import KnownFinding, read_baseline
from verify.gate.items import Item, check_names
from verify.gate.outcome import KNOWN, GateOutcome, ItemResult, judge
from verify.gate.run_items_within_budget import Clock, complete, find_operators, preload, registered_later, run_items
from verify.gate.run_order import State
from verify.gate.settings import GateSettings, all_items, read_settings
from verify.gate.verify_item import perform_item
from verify.operators.run.cache import open_cache
from verify.report_formats import FORMATS
from verify.report_formats.finding_text import finding_lines
from verify.results.report import Report
from verify.results.styled_line import last_line

SHOWN = 5  # findings of a report that fails a test


class CheckFailed(Exception):
    """An item of the gate does not pass; the text is its report."""


def check_op(operator: Any, **options: Any) -> Report:
    """Verify an operator: return the report if it passes, else fail the test."""
    __tracebackhide__ = True
    try:
        report = verify_op(operator, **options)
    except NnscalerError as error:
        pytest.fail(f"could not be verified: {error}", pytrace=False)
    return _passing(report)


def check_plan(model: Any, inputs: Any, *, dtype: Any = None, seed: int = 0, **options: Any) -> Report:
    """Verify a model's program: return the report if it passes, else fail the test.

    `model`: a file, or an object that takes `inputs`.
    """
    __tracebackhide__ = True
    try:
        name = None
        if isinstance(model, str | os.PathLike):
            if inputs is not None:
                raise NnscalerError("usage", "a model file has inputs of its own: sample_inputs()")
            loaded = load_model_file(os.fspath(model), seed)
            model, inputs, name = loaded.build, loaded.inputs, loaded.name
        elif inputs is None:
            raise NnscalerError("usage", "a module needs its inputs: (module, {'x': ...})")
        if isinstance(options.get("plan"), str):
            options["plan"] = read_plan(options["plan"])
        if dtype is not None:
            options["dtype"] = dtype
        report = verify_plan(model, inputs, seed=seed, **options)
    except NnscalerError as error:
        pytest.fail(f"could not be verified: {error}", pytrace=False)
    return _passing(report if name is None else replace(report, subject=name))


def check_external(program: Any, **options: Any) -> Report:
    """Verify a parallel program of the project: return the report if it passes, else fail the test.

    `program`: a check file, `hf:TYPE`, or an `ExternalProgram`.
    """
    __tracebackhide__ = True
    try:
        report = verify_external(os.fspath(program) if isinstance(program, os.PathLike) else program, **options)
    except NnscalerError as error:
        pytest.fail(f"could not be verified: {error}", pytrace=False)
    return _passing(report)


def _passing(report: Report) -> Report:
    __tracebackhide__ = True
    if not report.verdict.passes:
        pytest.fail(told(report), pytrace=False)
    return report


def told(report: Report) -> str:
    """Return the verdict, and the first findings with all that is known about them."""
    lines = [last_line([report]).text]
    for finding in report.findings[:SHOWN]:
        lines += ["", *(line.text for line in finding_lines(finding))]
    if len(report.findings) > SHOWN:
        lines += ["", f"{len(report.findings) - SHOWN} more:"]
        lines += [line.text for line in FORMATS["concise"]([replace(report, findings=report.findings[SHOWN:])])[:-1]]
    return "\n".join(lines)


@dataclass(frozen=True)
class Gate:
    """The gate's items by name, and the results of sources that could not be listed. The last name stands for what the
    baseline says of items that are gone, and of dates."""

    settings: GateSettings
    items: Mapping[str, Item]
    failed: Mapping[str, ItemResult]
    entries: Sequence[KnownFinding]

    @property
    def file(self) -> Path:
        return self.settings.file

    @property
    def names(self) -> list[str]:
        return [*self.items, *self.failed, *([_BASELINE] if self.entries else [])]

    def run(self, name: str) -> dict[str, str]:
        """Runs an item; what is to be kept with its test. Raises CheckFailed.

        With a plan run the operators that only its model, built and run, has registered.
        """
        if name == _BASELINE:
            unlisted = self.failed or self.settings.user_operators
            names = set(self.items) | {entry.item for entry in self.entries if unlisted}  # those may be in there
            outcome = judge([], self.entries, names, date.today(), str(self.settings.baseline))
            if outcome.baseline is not None:
                raise CheckFailed(told(outcome.baseline))
            return {"nnscaler": f"{len(self.entries)} known findings"}
        results = [self.failed.get(name) or self._result(self.items[name])]
        results += [self._result(operator) for operator in registered_later(results, self.items.values())]
        names = {result.name for result in results}
        own = [entry for entry in self.entries if entry.item in names and not entry.expired(date.today())]
        outcome = judge(results, own, {*self.items, *names}, date.today(), str(self.settings.baseline))
        if outcome.exit_code:
            raise CheckFailed("\n\n".join(told(report) for report in _failing(outcome)))
        (report,) = (judged.result.report for judged in outcome.judged if judged.result.name == name)
        findings = [finding for judged in outcome.judged for finding in judged.result.report.findings]
        known = "; ".join(f.counter_example[KNOWN] for f in findings if KNOWN in f.counter_example)
        return {"nnscaler": report.verdict.value, **({"known": known} if known else {})}

    def _result(self, item: Item) -> ItemResult:
        cache = open_cache("verify_op", self.settings.folder) if self.settings.get("cache") else None
        perform = perform_item(self.settings.folder, cache, self.settings.user_operators)
        runs = run_items([item], State(), Clock(time.perf_counter(), None), perform)
        (result,) = complete([item], {unit.item.name: result for unit, result in runs}, "budget")
        return result


_BASELINE = "the baseline"


def _failing(outcome: GateOutcome) -> list[Report]:
    found = [judged.result.report for judged in outcome.judged if judged.exit_code]
    return found + ([] if outcome.baseline is None else [outcome.baseline])


def open_gate() -> Gate:
    """Open the gate of the nearest pyproject.toml. Raises pytest.UsageError for settings that are wrong, or missing."""
    try:
        settings = read_settings(None, {}, os.environ)
        file = settings.baseline
        entries = read_baseline(file)
        preload(bool(settings.external))
        operators, failed = find_operators(settings.sources, settings.folder, Clock(time.perf_counter(), None))
        items = all_items(settings, operators)
        check_names(items)
    except NnscalerError as error:
        raise pytest.UsageError(str(error)) from None
    return Gate(settings, {i.name: i for i in items}, {r.name: r for r in failed}, entries)
