"""Run a script in this process, as torchrun starts it, and watch it."""

from __future__ import annotations

import gc
import linecache
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from nnscaler.global_random_generators import seed_all
from verify.external.comparison.reference_in_parts_and_noise import PARTS
from verify.external.ranks.attention_and_float64_of_torch import register_attention
from verify.external.ranks.torch_private import FileStore, checked_messages
from verify.external.torchrun.cuda_on_cpu import Change, cpu_changes, replaced
from verify.external.torchrun.feed_data_of_all_ranks import RanksFeed
from verify.external.torchrun.watch_models_losses_optimizers import ScriptWatch
from verify.external.torchrun.watched_script_record import ScriptRecord, Start, Stopped
from verify.programs.low_precision.reassociation_mode import Reassociated


def torchrun_environment(start: Start) -> Mapping[str, str]:
    """Return the variables that torchrun sets, and one by which a library knows that the CPU is meant."""
    rank, size = str(start.rank), str(start.ranks)
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
        **dict.fromkeys(("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",  # else accelerate takes ranks without GPUs for processes by themselves
    }


class ScriptExit(Exception):
    """The script ended its process with an exit code that says that something went wrong."""


def run_script(start: Start, save: Callable[[ScriptRecord], None], feed: RanksFeed | None = None) -> None:
    """Run the script until it has made its steps, or ends. `save` gets the record.

    Changes this process: its arguments, environment, import path, torch, and what is garbage collected. Raises what the
    script raises, ScriptExit, and Unmatched.
    """
    gc.freeze()  # what is there holds no model of the script, and `outermost` need not look at it
    os.environ.update(torchrun_environment(start))
    register_attention()
    _seed(start.rank)

    def saved(record: ScriptRecord) -> None:
        _check_accelerate()
        save(record)

    watch = ScriptWatch(start, saved, feed)
    module, words = start.words[0] == "-m", start.words[start.words[0] == "-m" :]
    sys.argv = list(words)
    sys.path.insert(0, str(Path.cwd()) if module else str(Path(words[0]).resolve().parent))
    store = None if start.store is None else FileStore(str(start.store), start.ranks)
    changes = cpu_changes(start.ranks, start.rank, store, watch.tell, watch.groups, start.devices or start.ranks)
    changes.append((torch.cuda, "is_available", _available_where_asserted(watch.tell)))
    changes += [*checked_messages(), *_undeferred()] if start.ranks == 1 else []
    with replaced(changes), watch.open(), _sums_of(start):
        try:
            if module:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except Stopped:
            return
        except SystemExit as stop:
            if stop.code not in (None, 0):
                error = ScriptExit(f"the script ended itself: sys.exit({stop.code!r})")
                raise error.with_traceback(stop.__traceback__) from None
    if not watch.stopped:
        saved(watch.record())


def _available_where_asserted(tell: Callable[[str], None]) -> Callable[[], bool]:
    """Return what says that there is a GPU to a line that asserts it alone: a script that does has no branch for the
    CPU, on which what it asks of GPUs runs; one that only looks takes its branch for the CPU."""
    ask = torch.cuda.is_available

    def is_available() -> bool:
        caller = sys._getframe(1)
        if linecache.getline(caller.f_code.co_filename, caller.f_lineno).lstrip().startswith("assert "):
            tell("the script asserts that there is a GPU: it was told that there is one")
            return True
        return ask()

    return is_available


def _undeferred() -> list[Change]:
    """Return what stands for FSDP2's ways to reduce gradients later: one rank has nothing to wait for, and adds to
    `.grad` in each backward pass. Else a step that lacks what is deferred would lack it on one rank as well."""

    def at_once(set_requires: Callable[..., None]) -> Callable[..., None]:
        def called(module: FSDPModule, required: bool, **named: Any) -> None:
            by_torch = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")  # its schedules do
            set_requires(module, required or not by_torch, **named)

        return called

    names = ("set_requires_gradient_sync", "set_requires_all_reduce")
    return [(FSDPModule, name, at_once(getattr(FSDPModule, name))) for name in names]


def _sums_of(start: Start) -> AbstractContextManager[object]:
    if start.reordered is None:
        return nullcontext()
    return Reassociated(torch.Generator().manual_seed(start.reordered), PARTS)


def _check_accelerate() -> None:
    """Check that accelerate has not put DDP in the place of what the script asks for, as it does on a CPU."""
    states = sys.modules.get("accelerate.state")
    taken = None if states is None else states.AcceleratorState._shared_state.get("distributed_type")
    if taken is None or taken.value != "MULTI_CPU":
        return
    for variable, asked in _ASKED_OF_ACCELERATE.items():
        if os.environ.get(variable, "").lower() == "true":
            raise RuntimeError(
                f"the script asks accelerate for {asked}, and on a CPU accelerate takes DDP in its place, which says "
                f"nothing about {asked}: verify the calls that it makes, such as fully_shard, in a check file"
            )


_ASKED_OF_ACCELERATE = {  # by its plugins, or by `accelerate launch`
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
_UNSEEDED = 67280421310721  # of torch's generator in a fresh process


def _seed(rank: int) -> None:
    """Give torch's generator the state of a fresh process; Python's and numpy's are others on every rank."""
    seed_all(rank)
    torch.manual_seed(_UNSEEDED)
