"""A request to compile, as plain values: what the command line, settings and tokens say of a model and its plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompileRequest:
    """Name a model and a plan by paths and values. Nothing is loaded; `dataclasses.asdict` gives what JSON can hold.

    model          `file.py`, `file.py::factory` or `package.module:factory`; None: Python hands over a module
    loss_fn        such a target of a loss function, for a model that returns no loss
    seed           of the parameters and the sample batch
    specialise     take the sample batch's branch where the model branches on data
    ranks          None: as many as the plan says
    plan           mesh axes, `auto`, `auto:CLUSTER`, a saved plan's file, or `policy.py::function`; None: search one
    plan_document  the text of a saved plan, instead of `plan`
    schedule       its name; None: the plan's
    micro_batches  None: as many as the plan says
    replicate      patterns of modules that stay whole
    cluster, memory, constraints, profile
                   what a plan is searched for, as the command line says it: `h100x8`, `40GB`, two files
    """

    model: str | None = None
    loss_fn: str | None = None
    seed: int = 0
    specialise: bool = False
    ranks: int | None = None
    plan: str | None = None
    plan_document: str | None = None
    schedule: str | None = None
    micro_batches: int | None = None
    replicate: tuple[str, ...] = ()
    cluster: str | None = None
    memory: str | None = None
    constraints: str | None = None
    profile: str | None = None
