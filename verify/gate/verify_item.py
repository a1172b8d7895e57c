"""Verify one item of the gate, in a child process. The gate's own process never imports a user's file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from op_registry.registry import default_registry
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from nnscaler.is_user_file import is_users
from nnscaler.tracing import trace
from verify.evidence.inputs.find_operator import matching, registered_in
from verify.evidence.inputs.import_user_code import import_module
from verify.evidence.verify_op_options import OpOptions
from verify.external.verify_request import verify_external_request
from verify.gate.items import ExternalItem, Item, OpItem, OpSource, PlanItem
from verify.gate.outcome import ItemResult
from verify.gate.run_order import Phase
from verify.operators.run.cache import Cache
from verify.operators.run.job import address_of, make_job
from verify.operators.run.targets import registered_by
from verify.operators.run.verify_many import PoolSettings, run_many
from verify.programs.loaded_model_and_plan import RunContext, load_subject
from verify.programs.verify_request import verify_request
from verify.results.report import Report
from verify.results.typed_attachments import Attachments

Note = Callable[[str], None]


def perform_item(folder: Path, cache: Cache | None, user: OpSource | None) -> Callable[[Item, Phase, Note], ItemResult]:
    """Return what verifies an item, in a child process.

    `folder`: of the settings. `user`: the source that asks for the operators of the models; None where nothing does.
    """

    def perform(item: Item, phase: Phase, note: Note) -> ItemResult:
        if isinstance(item, OpItem):
            report, cached = verify_operator(item, folder, cache, note)
            return ItemResult(item.name, report, cached=cached)
        context = _context(note, cache is not None)
        if isinstance(item, ExternalItem):
            return ItemResult(item.name, verify_external_item(item, context))
        report = verify_plan_item(item, phase, context)
        found = [] if user is None else _annotated(_of_the_user())
        operators = [replace(_item(spec, user, folder, ()), plan=item.request) for spec in found if user is not None]
        return ItemResult(item.name, report, operators=tuple(operators))

    return perform


def verify_plan_item(item: PlanItem, phase: Phase, context: RunContext) -> Report:
    """Verify a plan. Raises NnscalerError for one that cannot be run at all."""
    context.say(f"loading {item.request.model}")
    return verify_request(replace(item.request, level=phase), context=context)


def verify_external_item(item: ExternalItem, context: RunContext) -> Report:
    """Verify the programs of an item; what is said of several is one report. Raises NnscalerError as above."""
    context.say(f"loading {item.request.name}")
    reports = verify_external_request(item.request, context)
    if len(reports) == 1:
        return reports[0]
    return replace(
        reports[0],
        subject=item.name,
        setting=f"{len(reports)} programs",
        checks=tuple(replace(c, name=f"{r.subject} {r.setting}: {c.name}") for r in reports for c in r.checks),
        findings=tuple(finding for report in reports for finding in report.findings),
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        attachments=Attachments(),
    )


def _context(note: Note, cached: bool) -> RunContext:
    return RunContext(
        progress=lambda name, seconds, text: note(_words(f"{name} {seconds:.1f} s {text}")),
        say=lambda text: note(_words(text)),
        command=("nnscaler", *sys.argv[1:]),
        cached=cached,
    )


def _words(text: str) -> str:
    return " ".join(text.split())


def list_operators(source: OpSource, folder: Path) -> tuple[OpItem, ...]:
    """Return the operators of a source. `folder`: of the settings; items are named relative to it.

    Raises NnscalerError where a file or module cannot be imported, or there is no operator; for "user" there may be
    none yet, for code that runs later registers some too.
    """
    _search(folder)
    modules = (source.text,) if source.kind == "module" else ()
    if source.kind == "module":
        specs = registered_by(source.text)
    elif source.kind == "file":
        specs = matching(source.text) if "::" in source.text else registered_in(source.text)
    elif source.kind == "user":
        for file in source.files:
            registered_in(file, empty=True)
        specs = _of_the_user()
    else:
        specs = matching(source.text)
    return tuple(_item(spec, source, folder, modules) for spec in _annotated(specs))


def verify_operator(item: OpItem, folder: Path, cache: Cache | None, note: Note) -> tuple[Report, bool]:
    """Return the report on an operator, and whether it is an earlier one. The operator runs in a process of its own.

    Raises NnscalerError for one that cannot be run at all.
    """
    _search(folder)
    for module in item.modules:
        import_module(module)
    note(f"verifying {item.address}")
    specs = _named(item, note)
    if len(specs) != 1:
        raise NnscalerError("several_operators", f"{item.address!r} names {len(specs)} operators")
    job = make_job(specs[0])
    settings = PoolSettings(workers=1, cache=cache, modules=item.modules)
    (result,) = run_many([job], OpOptions(seed=item.seed, timeout=item.timeout), settings)
    return result.report, result.cached


def _named(item: OpItem, note: Note) -> list[OperatorSpec]:
    """Return what the item names. The model of its plan is traced where the operator is not there without."""
    if item.plan is not None:
        with suppress(NnscalerError):
            found = _annotated(matching(item.address))
            if any(spec.annotation != "" for spec in found):
                return found
        note(f"tracing {item.plan.model}, which registers {item.address}")
        subject = load_subject(item.plan, note)
        model = subject.module_or_factory
        trace(
            model if isinstance(model, nn.Module) else model(), subject.sample_inputs, specialise=item.plan.specialise
        )
    return _annotated(matching(item.address))


def _search(folder: Path) -> None:
    """Add the project's folder to the end of the import path, so that its modules are found."""
    for path in (folder, folder / "src"):
        if path.is_dir() and str(path) not in sys.path:
            sys.path.append(str(path))


def _annotated(specs: Iterable[OperatorSpec]) -> list[OperatorSpec]:
    """Leave out overloads without annotation beside one that has one, as verify-op does."""
    found = list({spec.name: spec for spec in specs}.values())
    return [spec for spec in found if spec.annotation != ""] or found


def _of_the_user() -> list[OperatorSpec]:
    """Return the operators that the user's code has registered in this process so far."""
    registry = default_registry()
    specs = [spec for name in registry.names() if (spec := registry.lookup(name)) is not None]
    return [s for s in specs if s.where is not None and any(map(is_users, (s.where.file, *s.callers)))]


def _item(spec: OperatorSpec, source: OpSource, folder: Path, modules: tuple[str, ...]) -> OpItem:
    address = address_of(spec)
    if address is None:
        raise NnscalerError("unknown_operator", f"no text names the operator `{spec.name}`", spec.where)
    file, separator, rest = address.partition("::")
    name = address
    if separator and file.endswith(".py"):
        name = f"{Path(os.path.relpath(file, folder)).as_posix()}::{rest}"
    needed = () if ":" in address or spec.target is None else modules
    return OpItem(name, address, needed, source.seed, source.timeout)


def without_repeats(items: Iterable[OpItem]) -> list[OpItem]:
    """Return each operator once, where it is named first."""
    found: dict[str, OpItem] = {}
    for item in items:
        found.setdefault(item.name, item)
    return list(found.values())
