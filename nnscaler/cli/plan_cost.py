"""What the options of a search say: the plan that is to be searched."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError
from nnscaler.planning.auto import AutoPlan, parse_auto

if TYPE_CHECKING:
    from nnscaler.compile import PlanSource

SEARCH = ("cluster", "memory", "constraints", "profile")


def auto_plan(options: argparse.Namespace) -> AutoPlan:
    """What --cluster, --memory, --constraints and --profile say. Raises NnscalerError("plan_illegal")."""
    return AutoPlan(options.cluster, memory_of(options.memory), options.constraints, options.profile)


def plan_source(options: argparse.Namespace) -> PlanSource:
    """What --plan names, or what is to be searched. Raises NnscalerError: `plan_illegal`; `usage` where a plan is named
    and options of a search are given as well."""
    from nnscaler.cli.plan_source import read_plan

    given = [f"--{name}" for name in SEARCH if getattr(options, name) is not None]
    if given and getattr(options, "program", None) is not None:
        raise NnscalerError("usage", f"{given[0]} is for the search of a plan, and --program has a plan already")
    spec: str | None = options.plan
    named = AutoPlan() if spec is None else parse_auto(spec)
    if named is None:
        if given:
            help = "leave --plan away to search one, or the option to take the plan that is named"
            message = f"{given[0]} is for the search of a plan, and --plan {spec} names one"
            raise NnscalerError("usage", message, help=help)
        return read_plan(spec)
    wanted = auto_plan(options)
    if named.cluster is not None and wanted.cluster is not None:
        raise NnscalerError("usage", f"--plan {spec} and --cluster {wanted.cluster} both name a cluster")
    return replace(wanted, cluster=wanted.cluster or named.cluster)


def memory_of(text: str | None) -> float | None:
    """Bytes. Raises NnscalerError("plan_illegal")."""
    from nnscaler.planning.cluster.units import quantity

    if text is None:
        return None
    try:
        return quantity(text, "bytes")
    except ValueError as error:
        raise NnscalerError("plan_illegal", f"--memory {text}: {error}", help="for example --memory 80GB") from None
