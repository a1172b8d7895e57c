"""The options of a search as a request: the plan that is to be searched."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError
from nnscaler.planning.auto import AutoPlan, parse_auto

if TYPE_CHECKING:
    from nnscaler.compile import PlanSource

SEARCH = ("cluster", "memory", "constraints", "profile")


def plan_source(options: argparse.Namespace) -> PlanSource:
    """Return the plan that --plan names, or the request for one.

    Raises NnscalerError as `asked_search` and `read_plan`.
    """
    from nnscaler.cli.plan_source import read_plan

    return asked_search(options) or read_plan(options.plan)


def asked_search(options: argparse.Namespace) -> AutoPlan | None:
    """Return the request of a plan that is to be searched; None where a plan is named.

    Raises NnscalerError: `plan_illegal`; `usage` where a plan is named and options of a search are given as well.
    """
    given = [f"--{name}" for name in SEARCH if getattr(options, name, None) is not None]
    if getattr(options, "program", None) is not None:
        if given:
            raise NnscalerError("usage", f"{given[0]} is for the search of a plan, and --program has a plan already")
        return None
    spec: str | None = getattr(options, "plan", None)
    named = AutoPlan() if spec is None else parse_auto(spec)
    if named is None:
        if given:
            help = "leave --plan away to search one, or the option to take the plan that is named"
            message = f"{given[0]} is for the search of a plan, and --plan {spec} names one"
            raise NnscalerError("usage", message, help=help)
        return None
    wanted = AutoPlan(options.cluster, memory_of(options.memory), options.constraints, options.profile)
    if named.cluster is not None and wanted.cluster is not None:
        raise NnscalerError("usage", f"--plan {spec} and --cluster {wanted.cluster} both name a cluster")
    return replace(wanted, cluster=wanted.cluster or named.cluster)


def memory_of(text: str | None) -> float | None:
    """Return the bytes that --memory says. Raises NnscalerError("plan_illegal")."""
    from nnscaler.planning.cluster.units import quantity

    if text is None:
        return None
    try:
        return quantity(text, "bytes")
    except ValueError as error:
        raise NnscalerError("plan_illegal", f"--memory {text}: {error}", help="for example --memory 80GB") from None
