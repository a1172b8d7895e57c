"""From the options of `verify-plan` to a token, and back: `nnscaler reproduce nns2:...`."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.plan_cost import SEARCH
from nnscaler.cli.plan_source import is_words
from nnscaler.errors import NnscalerError
from nnscaler.targets import find_target

if TYPE_CHECKING:
    from nnscaler.cli.console import Console
    from nnscaler.transform.plan import Plan
    from verify.plan_token import Option, PlanToken

# What says where the run is shown, not what is run; and what the token holds in a field of its own.
_SHOWING = frozenset(
    ("command", "console", "output_format", "quiet", "verbose", "color", "comm_profile", "emit_test", "certificate")
)
_APART = frozenset(("model", "plan", "program", *SEARCH))  # a plan that was searched is in the token itself


def reproduce_line(options: argparse.Namespace, ranks: int, backend: str, found: Plan | None = None) -> str:
    """Return the line that runs the same again; this command line where a token would be too long for one.

    `found`: the plan where one was searched.
    """
    from verify.plan_token import encode

    word = encode(make_token(options, ranks, backend, found))
    return shlex.join(["nnscaler", *sys.argv[1:]] if word is None else ["nnscaler", "reproduce", word])


def make_token(options: argparse.Namespace, ranks: int, backend: str, found: Plan | None = None) -> PlanToken:
    """Return the token of a run of verify-plan with these options on `ranks` ranks.

    `found`: the plan where one was searched, which another machine might not find again.
    """
    from verify.environment import environment
    from verify.plan_token import PlanToken, Source

    file, factory = find_target(options.model)
    plan: str | None = options.plan
    document, policy = None, None
    if found is not None:
        document, plan = found.to_json(), None
    elif plan is not None and "::" in plan:
        policy = Source.of(plan.partition("::")[0])
    elif plan is not None and not is_words(plan):
        document, plan = _plan_text(Path(plan)), None
    here = environment()
    return PlanToken(
        Source.of(file),
        factory or "build_model",
        plan,
        policy,
        document,
        None if options.program is None else Source.of(options.program),
        {**_kept(options), "ranks": ranks, "backend": backend},
        here["nnscaler"],
        here["torch"],
    )


def _plan_text(path: Path) -> str:
    return (path / "plan.json" if path.is_dir() else path).read_text(encoding="utf-8")


def _kept(options: argparse.Namespace) -> dict[str, Option]:
    kept = {name: value for name, value in vars(options).items() if name not in _SHOWING | _APART}
    return {name: [str(v) for v in value] if isinstance(value, list | tuple) else value for name, value in kept.items()}


def replay_plan(word: str, asked: argparse.Namespace) -> int:
    """Verify the run that the token describes, show it as `asked`, and return the exit code of the verdict.

    Raises NnscalerError `bad_token`, and `no_such_file` where a file of the token is gone. A file that was changed, and
    another torch, are warned of: the question may be whether a correction helped.
    """
    from nnscaler.cli import verify_plan
    from verify.plan_token import decode

    console: Console = asked.console
    token = decode(word)
    for change in token.changes():
        console.warning(change)
    with tempfile.TemporaryDirectory(prefix="nnscaler-plan-") as folder:
        options = _options(token, Path(folder), asked)
        return verify_plan.run(options)


def _options(token: PlanToken, folder: Path, asked: argparse.Namespace) -> argparse.Namespace:
    from nnscaler.cli.main import build_parser

    model = token.model.path if token.factory == "build_model" else f"{token.model.path}::{token.factory}"
    options = build_parser().parse_args(["verify-plan", model])
    unknown = sorted(set(token.options) - set(vars(options)))
    if unknown:
        raise NnscalerError("bad_token", f"the token has options that this nnscaler lacks: {', '.join(unknown)}")
    for name, value in token.options.items():
        setattr(options, name, value)
    options.plan = token.plan
    if token.policy is not None and token.plan is not None:
        options.plan = f"{token.policy.path}::{token.plan.partition('::')[2]}"
    if token.document is not None:
        file = folder / "plan.json"
        file.write_text(token.document, encoding="utf-8")
        options.plan = str(file)
    options.program = None if token.program is None else Path(token.program.path)
    for name in ("console", "output_format", "quiet", "verbose", "color"):
        setattr(options, name, getattr(asked, name))
    if asked.timeout is not None:
        options.timeout = asked.timeout
    return options
