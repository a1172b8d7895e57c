"""`nnscaler checkpoint`: say what a checkpoint holds, convert it for others, and check that it can be read."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from nnscaler.cli.options import add_verbosity, positive
from nnscaler.cli.output.exit_codes import ExitCode

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console

NAME = "checkpoint"
HELP = "tell what a checkpoint holds, convert it, read it through"
DESCRIPTION = "Look at checkpoints, and write them for others."
EPILOG = """examples:
  nnscaler checkpoint info runs/a                                        the newest checkpoint of a run
  nnscaler checkpoint convert runs/a/best out/ --config config.json      for from_pretrained of transformers
  nnscaler checkpoint convert runs/a weights.pt --format torch           a state dict of the model
  nnscaler checkpoint verify runs/a                                      read all of it
  nnscaler checkpoint verify runs/a/step_000100 runs/b/step_000100       compare two, bit by bit

A checkpoint is unpickled when it is read: read those that you trust.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="tell what a checkpoint holds", allow_abbrev=False)
    info.add_argument("path", metavar="CHECKPOINT", help="a step_... folder, or the folder of a run: its newest one")
    info.add_argument("--json", action="store_true", help="all of it, for machines")
    convert = actions.add_parser("convert", help="write the model for others", allow_abbrev=False)
    convert.add_argument("path", metavar="CHECKPOINT", help="a step_... folder, or the folder of a run: its newest one")
    convert.add_argument("out", metavar="OUT", help="a folder; a file for --format torch")
    convert.add_argument(
        "--format",
        choices=("safetensors", "transformers", "torch"),
        help="default safetensors; with --config transformers",
    )
    convert.add_argument("--config", metavar="PATH", help="the config.json of the model, copied beside the weights")
    convert.add_argument(
        "--prefix", default="", metavar="TEXT", help='taken off the names: "model." of a wrapper that has self.model'
    )
    convert.add_argument(
        "--dtype", choices=("float64", "float32", "bfloat16", "float16"), help="of floating tensors (default: as saved)"
    )
    convert.add_argument(
        "--file-bytes", type=positive, metavar="N", help="size of a file at most (default 5 GiB; safetensors)"
    )
    verify = actions.add_parser("verify", help="read all of a checkpoint, or compare two", allow_abbrev=False)
    verify.add_argument("path", metavar="CHECKPOINT", help="a step_... folder, or the folder of a run: its newest one")
    verify.add_argument("other", nargs="?", metavar="OTHER", help="a checkpoint that must be equal, bit by bit")
    for action, command in ((info, run_info), (convert, run_convert), (verify, run_verify)):
        add_verbosity(action.add_argument_group("output"))
        action.set_defaults(command=command)


def run_info(options: argparse.Namespace) -> int:
    """Print what a checkpoint holds."""
    from nnscaler.training.saving.export import open_checkpoint, summarise

    console: Console = options.console
    summary = summarise(open_checkpoint(options.path))
    if options.json:
        console.result(json.dumps(asdict(summary), indent=2))
        return ExitCode.VERIFIED
    run = summary.run
    console.result(f"{summary.path}")
    console.result(f"step       {run.step} ({run.passes} batches)")
    console.result(f"written    by {run.ranks} ranks, torch {run.torch}" + (f", {run.model}" if run.model else ""))
    if run.metric is not None:
        console.result(f"score      {run.metric:g}")
    count = len(summary.tensors)
    console.result(f"model      {count} tensors; {summary.bytes} bytes with the optimizer's state")
    console.result(f"optimizer  {summary.optimizer or 'not saved'}")
    console.result(f"besides    {', '.join(summary.objects) or 'nothing'}")
    for name, (shape, dtype) in summary.tensors.items():
        console.detail(f"  {name}  {dtype}{list(shape)}")
    return ExitCode.VERIFIED


def run_convert(options: argparse.Namespace) -> int:
    """Write the model of a checkpoint for others."""
    from nnscaler.training.saving.export import FILE_BYTES, Export, export, open_checkpoint

    form = options.format or ("transformers" if options.config else "safetensors")
    size = options.file_bytes or FILE_BYTES
    how = Export(form, options.prefix, options.dtype or "", options.config, size)
    for file in export(open_checkpoint(options.path), options.out, how):
        options.console.result(f"{file}")
    return ExitCode.VERIFIED


def run_verify(options: argparse.Namespace) -> int:
    """Read all of a checkpoint; exit code 1 where something is wrong with it."""
    from nnscaler.training.saving.export import compare, open_checkpoint

    console: Console = options.console
    folder = open_checkpoint(options.path)
    other = None if options.other is None else open_checkpoint(options.other)
    count, wrong = compare(folder, other)
    for line in wrong:
        console.result(line)
    console.result(f"{folder.path}: {count} entries read, {len(wrong)} wrong")
    return ExitCode.REFUTED if wrong else ExitCode.VERIFIED
