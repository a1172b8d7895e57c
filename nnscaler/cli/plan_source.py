"""What `--plan` may say: mesh axes, a plan file, or a policy function of the user's."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError
from nnscaler.planning.auto import parse_auto

if TYPE_CHECKING:
    from nnscaler.compile import PlanSource
    from nnscaler.ir.graph import Graph
    from nnscaler.transform.plan import Plan

FORMS = "dp=2,tp=2 (mesh axes), auto or auto:h100x8 (searched), plan.json (a saved plan), or policy.py::function"
_AXES = re.compile(r"^\s*\w+\s*=\s*\d+\s*(,\s*\w+\s*=\s*\d+\s*)*$")


def read_plan(spec: str | None) -> PlanSource:
    """The plan, its axes as text, or the policy function. Raises NnscalerError `plan_illegal`."""
    if spec is None or is_words(spec):
        return spec
    if "::" in spec:
        return _policy(spec)
    path = Path(spec)
    if path.is_dir() and (path / "plan.json").is_file():
        path = path / "plan.json"
    if not path.is_file():
        raise NnscalerError("plan_illegal", f"{spec!r} is neither mesh axes nor a file", help=FORMS)
    from nnscaler.transform.plan import Plan

    return Plan.from_json(path.read_text(encoding="utf-8"), str(path))


def is_words(spec: str) -> bool:
    """Whether it says itself what the plan is (axes, auto), and is no file and no function."""
    return "::" not in spec and ("=" in spec or parse_auto(spec) is not None)


def ranks_of(spec: str | None) -> int | None:
    """How many ranks a specification of axes means; None for anything else."""
    if spec is None or not _AXES.match(spec):
        return None
    return prod(int(entry.partition("=")[2]) for entry in spec.split(","))


def _policy(spec: str) -> Callable[[Graph, int], Plan]:
    from nnscaler.cli.model_file import import_user_file

    file, _, name = spec.partition("::")
    if not Path(file).is_file():
        raise NnscalerError("plan_illegal", f"there is no file {file!r}", help=FORMS)
    policy: Callable[[Graph, int], Plan] | None = getattr(import_user_file(Path(file)), name, None)
    if not callable(policy):
        raise NnscalerError(
            "plan_illegal",
            f"{file} has no function {name}",
            help=f"def {name}(graph, ranks): return nnscaler.Plan(...)",
        )
    return _guarded(policy, file, name)


def _guarded(policy: Callable[[Graph, int], Plan], file: str, name: str) -> Callable[[Graph, int], Plan]:
    """The policy, whose exceptions are the user's and not ours."""
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
