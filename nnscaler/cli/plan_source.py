"""Read the argument of `--plan`: mesh axes, a plan file, or a policy function of the user's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError
from nnscaler.planning.auto import parse_auto
from nnscaler.planning.policies import parse_axes, parse_spec, ranks_in
from nnscaler.scheduling.registry import get_schedule

if TYPE_CHECKING:
    from nnscaler.compile import PlanSource
    from nnscaler.ir.graph import Graph
    from nnscaler.transform.plan import Plan

FORMS = "dp=2,tp=2 (mesh axes), auto or auto:h100x8 (searched), plan.json (a saved plan), or policy.py::function"


def read_plan(spec: str | None) -> PlanSource:
    """Read --plan: a plan, its axes as text, or a policy function. Raises NnscalerError `plan_illegal`."""
    if spec is None or is_words(spec):
        return spec
    if "::" in spec:
        return _policy(spec)
    return _saved(spec)


def is_words(spec: str) -> bool:
    """Return whether a specification says itself what the plan is (axes, auto), and is no file and no function."""
    return "::" not in spec and ("=" in spec or parse_auto(spec) is not None)


def is_axes(spec: str | None) -> bool:
    """Return whether a specification names mesh axes."""
    return spec is not None and is_words(spec) and parse_auto(spec) is None


def ranks_asked(options: argparse.Namespace) -> int | None:
    """Return the number of ranks that --ranks, --program or --plan say; None where none of them does.

    Raises NnscalerError.
    """
    if options.ranks is not None:
        return int(options.ranks)
    if getattr(options, "program", None) is not None:
        from verify.program_directory import open_program

        return open_program(options.program).ranks
    spec: str | None = options.plan
    if spec is None or parse_auto(spec) is not None or "::" in spec:
        return None
    return ranks_in(parse_axes(spec)) if is_axes(spec) else _saved(spec).ranks


def _saved(spec: str) -> Plan:
    from nnscaler.transform.plan import Plan

    path = Path(spec)
    if path.is_dir() and (path / "plan.json").is_file():
        path = path / "plan.json"
    if not path.is_file():
        raise NnscalerError("plan_illegal", f"{spec!r} is neither mesh axes nor a file", help=FORMS)
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise NnscalerError("plan_illegal", f"{path} cannot be read: {error}", help=FORMS) from None


def check_plan(spec: str, ranks: int | None) -> None:
    """Check what --plan names, as far as that goes without the model: `ranks` None where nothing says how many.

    Raises NnscalerError.
    """
    if "::" in spec:
        _policy_file(spec)
    elif not is_axes(spec):
        plan = _saved(spec)
        get_schedule(plan.schedule)
        plan.for_ranks(plan.ranks if ranks is None else ranks)
    elif ranks is not None:
        parse_spec(spec, ranks)


def _policy_file(spec: str) -> Path:
    file = Path(spec.partition("::")[0])
    if not file.is_file():
        raise NnscalerError("plan_illegal", f"there is no file {str(file)!r}", help=FORMS)
    return file


def _policy(spec: str) -> Callable[[Graph, int], Plan]:
    from nnscaler.cli.model_file import import_user_file

    file, _, name = spec.partition("::")
    policy: Callable[[Graph, int], Plan] | None = getattr(import_user_file(_policy_file(spec)), name, None)
    if not callable(policy):
        raise NnscalerError(
            "plan_illegal",
            f"{file} has no function {name}",
            help=f"def {name}(graph, ranks): return nnscaler.Plan(...)",
        )
    return _guarded(policy, file, name)


def _guarded(policy: Callable[[Graph, int], Plan], file: str, name: str) -> Callable[[Graph, int], Plan]:
    """Wrap the policy so that its exceptions are reported as the user's, not ours."""
    from nnscaler.cli.model_file import user_frame

    def guarded(graph: Graph, ranks: int) -> Plan:
        try:
            return policy(graph, ranks)
        except NnscalerError:
            raise
        except Exception as error:
            place = user_frame(error, Path(file).resolve().parent)
            message = f"the policy {name} of {file} raises {type(error).__name__}: {error}"
            raise NnscalerError("policy_raised", message, place, f"def {name}(graph, ranks): ...") from error

    guarded.__name__ = name
    return guarded
