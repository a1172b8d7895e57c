"""`nnscaler compile`: compile a model with a plan, and write the program of every rank."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from nnscaler.cli.options import (
    MODEL_HELP,
    add_plan_options,
    add_search_options,
    add_verbosity,
    request_of,
    seed_number,
)
from nnscaler.cli.output.communication_profile import add_option, known_profile, memory_lines, show_profile, total_lines
from nnscaler.plan_source import CompileRequest

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from nnscaler.codegen.compiled_program import Program

NAME = "compile"
HELP = "write the program that every rank runs"
DESCRIPTION = "Compile a model into a folder of readable Python: one file per role, a manifest, and the state."
EPILOG = """examples:
  nnscaler compile gpt.py --ranks 4 --plan dp=2,tp=2 --out build/
  torchrun --nproc-per-node 4 -m nnscaler.runtime.launch build/ --steps 3      train it
  nnscaler verify-plan gpt.py --program build/                                  check it
  nnscaler compile gpt.py --ranks 8 --cluster h100x8 --memory 40GB --out build/        search the plan
  nnscaler compile gpt.py --ranks 8 --out build/ --comm-profile json=profile.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_plan_options(parser)
    add_search_options(parser)
    parser.add_argument(
        "--out", dest="out_folder", type=Path, required=True, metavar="DIR", help="folder for the program"
    )
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="S", help="of parameters and sample batch (default: 0)"
    )
    output = parser.add_argument_group("output")
    add_option(output)
    add_verbosity(output)


def run(options: argparse.Namespace) -> int:
    """Compiles, writes, and says what was written."""
    from nnscaler.model_file import check_targets, load_model_file
    from nnscaler.plan_source import check_plan, plan_source, ranks_asked, schedule_of_request

    console: Console = options.console
    request = request_of(CompileRequest, options)
    check_targets(options.model, request.loss_fn)
    check_plan(request)
    plan = plan_source(request)
    ranks = ranks_asked(request) or 2
    model = load_model_file(options.model, request.seed, request.loss_fn)
    from nnscaler.compile import parallelize
    from verify.programs.opened_program import open_program

    program = parallelize(
        model.build(),
        model.inputs,
        ranks=ranks,
        plan=plan,
        schedule=schedule_of_request(request),
        micro_batches=request.micro_batches,
        replicate=request.replicate,
        specialise=request.specialise,
        precision=request.precision,
        optimizer_bytes=request.optimizer_bytes,
        model={**model.description(), **_loss(request.loss_fn)},
        progress=console.phase,
    )
    path, manifest = program.save(options.out_folder), program.manifest
    _warn(program, options.model, console)
    if options.comm_profile is None and console.verbosity >= 1:
        for line in (*total_lines(known_profile(manifest.communication_profile)), *memory_lines(manifest.memory)):
            console.result(line)
    show_profile(manifest.communication_profile, options.comm_profile, console)
    if console.verbosity >= 2:
        for line in open_program(path).details:
            console.result(line)
    files = manifest.role_files
    console.result(f"wrote {path}: {manifest.plan}, {len(files)} role{'s' * (len(files) != 1)} ({', '.join(files)})")
    if any(tensor.is_meta for tensor in program.state.values()):
        console.result("the model has no data (meta device): the program has no state.pt, and cannot run without one")
    else:
        console.result(f"run it: torchrun --nproc-per-node {ranks} -m nnscaler.runtime.launch {quote(str(path))}")
    return 0


def _loss(target: str | None) -> dict[str, str]:
    """Describe the loss function outside of the model, if there is one, for the program's record."""
    if target is None:
        return {}
    from nnscaler.model_file import load_loss_function
    from nnscaler.tracing.models_with_added_loss import origin_of_loss

    return {"loss": origin_of_loss(load_loss_function(target))}


def _warn(program: Program, model: str, console: Console) -> None:
    names = program.manifest.unannotated
    if names:
        cure = f"`nnscaler list ops --missing {quote(model)}` writes annotations to paste"
        console.warning(f"without annotation, so run whole on every rank: {', '.join(names)}; {cure}")
