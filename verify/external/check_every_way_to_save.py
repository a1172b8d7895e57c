"""Check each way to save a program: what is saved is loaded into the plain model and on another mesh, and compared."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nnscaler.errors import few
from nnscaler.runtime.tensor_bits_and_differences import FILL, FLOAT64_BOUND, difference, family_scale
from nnscaler.tracing.export.independent_module_copies import copied_with_hooks
from nnscaler.tracing.float64_run import convert_floats
from verify.external.differential_run import ExternalCase
from verify.external.observe_rank_run import modules_of
from verify.external.parameter_mapping import StateMap, clean_name, give, taken
from verify.external.program import ExternalProgram
from verify.external.ranks.run_ranks_here_or_in_child import RanksFailed
from verify.external.save_then_load import (
    CheckpointForm,
    HeldValues,
    LoadedTensor,
    compare_plain,
    held_values,
    load_on_rank,
    other_mesh,
    save_after_steps,
)
from verify.programs.module_tensors_by_every_name import state_of
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

# torch.distributed.checkpoint


def _state(made: Any) -> dict[str, Any]:
    """Return the tensors of all modules of this rank, by name."""
    state: dict[str, Any] = {}
    for module in modules_of(made):
        state.update({n: v for n, v in get_model_state_dict(module).items() if isinstance(v, Tensor)})
    return state


def _save(_program: ExternalProgram, made: Any, folder: Path) -> None:
    save(_state(made), checkpoint_id=str(folder))


def _load_plain(program: ExternalProgram, _model: nn.Module, space: StateMap, folder: Path) -> dict[str, Tensor]:
    metadata: Mapping[str, Any] = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    wanted = {program.names.get(name, clean_name(name)): name for name in metadata}
    state = {
        wanted[name]: torch.zeros(space.shapes[name], dtype=metadata[wanted[name]].properties.dtype)
        for name in space.shapes
        if name in wanted and space.kinds[name] == "parameter" and metadata[wanted[name]].size == space.shapes[name]
    }
    load(state, checkpoint_id=str(folder), no_dist=True)
    return {program.names.get(name, clean_name(name)): value for name, value in state.items()}


def _load(_program: ExternalProgram, made: Any, _model: nn.Module, folder: Path) -> Any:
    state = _state(made)
    load(state, checkpoint_id=str(folder))
    for module in modules_of(made):
        own = set(get_model_state_dict(module))
        set_model_state_dict(module, {name: value for name, value in state.items() if name in own})
    return made


_DISTRIBUTED = CheckpointForm("checkpoint", lambda made: True, _save, _load_plain, _load)


# `save_pretrained` and `from_pretrained`


def _has_pretrained(model: nn.Module) -> bool:
    """Return whether a plain model saves and loads itself."""
    return callable(getattr(model, "save_pretrained", None)) and callable(getattr(model, "from_pretrained", None))


def _saver(made: Any) -> Any:
    """Return the model that saves itself, out of its wrapper; None where there is none."""
    modules = modules_of(made)
    if len(modules) != 1:
        return None
    wrapped = getattr(modules[0], "module", modules[0])
    return wrapped if callable(getattr(wrapped, "save_pretrained", None)) else None


def _save_pretrained(program: ExternalProgram, made: Any, folder: Path) -> None:
    """Save by the program's own way, or as trainers do: gathered by torch, and written by the first rank."""
    model = _saver(made)
    if program.pretrained is not None:
        program.pretrained.save(model, folder)
        return
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    model.save_pretrained(str(folder), is_main_process=dist.get_rank() == 0, state_dict=gathered)


def _save_shards(program: ExternalProgram, made: Any, folder: Path) -> None:
    assert program.pretrained is not None and program.pretrained.save_shards is not None, "`forms_of` looks"
    program.pretrained.save_shards(_saver(made), folder)


def _pretrained_plain(_program: ExternalProgram, model: nn.Module, _space: StateMap, folder: Path) -> dict[str, Tensor]:
    kind: Any = type(model)
    loaded = kind.from_pretrained(str(folder))
    stored = loaded.state_dict()
    return {n: t.detach() for n, t, k in state_of(loaded) if k == "parameter" or n in stored}


def _load_pretrained(program: ExternalProgram, made: Any, model: nn.Module, folder: Path) -> Any:
    """Load by the program's own way, or the plain model on every rank, which is made parallel then."""
    if program.pretrained is not None:
        return program.pretrained.load(folder)
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", tuple(size for _, size in program.mesh), mesh_dim_names=tuple(axis for axis, _ in program.mesh)
    )
    kind: Any = type(model)
    loaded = kind.from_pretrained(str(folder))
    made = program.parallelize(loaded, mesh)
    return loaded if made is None else made


def _lost_alone(model: nn.Module, folder: Path) -> dict[str, float]:
    kind: Any = type(model)
    mine: Any = copied_with_hooks(model)
    values = {name: tensor.detach().clone() for name, tensor, _ in state_of(mine)}
    mine.save_pretrained(str(folder))
    found = {name: tensor.detach() for name, tensor, _ in state_of(kind.from_pretrained(str(folder)))}
    scale = family_scale(values.values(), FILL)
    return {
        name: difference(found[name], value, scale).relative
        if name in found and found[name].shape == value.shape
        else float("inf")
        for name, value in values.items()
    }


_PRETRAINED = CheckpointForm(
    "save_pretrained",
    lambda made: _saver(made) is not None,
    _save_pretrained,
    _pretrained_plain,
    _load_pretrained,
    cut_by_hand=True,
    lossy=_lost_alone,
)
_SHARDS = replace(_PRETRAINED, name=_DISTRIBUTED.name, save=_save_shards)


def forms_of(program: ExternalProgram, model: nn.Module) -> tuple[CheckpointForm, ...]:
    """Return the ways in which a program can be saved: shards of each rank, and whole where its model can."""
    has_own_way = program.pretrained is not None and program.pretrained.save_shards is not None
    shards = _SHARDS if has_own_way else _DISTRIBUTED
    return (shards, _PRETRAINED) if _has_pretrained(model) else (shards,)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """While open, transformers shows no bars of what it writes and reads, where it is imported."""
    library: Any = sys.modules.get("transformers.utils.logging")
    shows = library is not None and library.is_progress_bar_enabled()
    if shows:
        library.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            library.enable_progress_bar()


# The checks.


_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception): ?")  # the last line of a traceback
_SHOWN = 8  # findings of one check
_LOST = 1e-4  # relative: a tensor that loses more than this without any parallelism cannot be compared
_TIMES = 4.0  # what a tensor may lose, in what it loses without any parallelism


@dataclass(frozen=True)
class SavingChecked:
    """The results of the checks of saving."""

    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Tried:
    """The tensors that were loaded from one form.

    lossy   how far tensors are from themselves after the plain model alone was saved and loaded
    """

    loaded: tuple[LoadedTensor, ...]
    lossy: Mapping[str, float]


def check_saving(case: ExternalCase) -> SavingChecked:
    """Save the program in each way, load it elsewhere, and compare; what cannot be saved or loaded is undecided."""
    found = SavingChecked()
    for form in forms_of(case.program, case.model):
        one = _check(case, form)
        if isinstance(one, RanksFailed) and case.how.executor == "simulator" and one.code == "rank_raises":
            one = _check(replace(case, how=replace(case.how, executor="gloo")), form)  # as for the run itself
        result = _not_tried(case, form, one) if isinstance(one, RanksFailed) else one
        found = SavingChecked(
            (*found.checks, *result.checks), (*found.findings, *result.findings), (*found.notes, *result.notes)
        )
    return found


def _not_tried(case: ExternalCase, form: CheckpointForm, failure: RanksFailed) -> SavingChecked:
    message = f"{_in_short(failure.message)}, in saving or loading by {form.name}"
    finding = Finding("checkpoint_not_tried", message, case.program.where)
    return SavingChecked((Check(form.name, Verdict.INCONCLUSIVE, 0),), (finding,))


def _in_short(message: str) -> str:
    """Return the first line of a failure; of an exception that carries those of all ranks, also what was raised."""
    first, *rest = message.splitlines()
    at = next((number for number, line in enumerate(rest) if _RAISED.match(line)), None)
    if at is None:
        return first
    return f"{first}: {' '.join(line.strip() for line in rest[at : at + 2])[:300].strip()}"


def _check(case: ExternalCase, form: CheckpointForm) -> SavingChecked | RanksFailed:
    with _folder() as folder, without_progress_bars():
        try:
            tried = _tried(case, form, folder)
        except RanksFailed as failure:
            return failure
    if tried is None:
        return SavingChecked(notes=(f"{form.name} was not tried: what `parallelize` returns has none on some rank",))
    return _judged(case, form, tried)


def _tried(case: ExternalCase, form: CheckpointForm, folder: Path) -> _Tried | None:
    """Save on the ranks, and load; None where the program cannot be saved in this form. Raises RanksFailed."""
    program, model, reference, lookup = case.program, case.model, case.reference, case.truth.lookup()
    space = reference.space
    saved, alone = folder / "saved", folder / "alone"
    ran = case.on_ranks(lambda rank: save_after_steps(form, program, model, reference, lookup, rank, saved))
    shards = [result for result in ran.results if result is not None]
    if len(shards) < len(ran.results):
        return None
    held = held_values(space, shards)

    def plain(_rank: int) -> tuple[Sequence[LoadedTensor], Mapping[str, float]]:
        lossy = form.lossy(_holding(model, space, held, reference.dtype), alone)
        return compare_plain(form, program, model, space, held, saved), lossy

    loaded, lossy = case.alone(plain)
    found = list(loaded)
    other = other_mesh(program)
    if other is not None:
        on_mesh = replace(case, program=other).on_ranks(
            lambda rank: load_on_rank(form, other, model, reference, lookup, held, saved)
        )
        found += [one for result in on_mesh.results for one in result]
    return _Tried(tuple(found), lossy)


def _holding(model: nn.Module, space: StateMap, held: HeldValues, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the plain model with what the ranks held: start values may have fewer bits than its dtype."""
    mine = copied_with_hooks(model)
    convert_floats(mine, dtype)
    for name, tensor, _ in state_of(mine):
        whole = space.whole(name)
        if bool(taken(held.low, whole).isfinite().all()):
            give(tensor, held.low, whole)
    return mine


def _judged(case: ExternalCase, form: CheckpointForm, tried: _Tried) -> SavingChecked:
    """Judge what was loaded: a tensor must come back as it was, up to what it loses without any parallelism."""
    lost = sorted({name for name, relative in tried.lossy.items() if relative > _LOST})
    compared = [one for one in tried.loaded if not set(one.name.split("+")) & set(lost)]

    def is_right(one: LoadedTensor) -> bool:
        bound = max((tried.lossy.get(name, 0.0) for name in one.name.split("+")), default=0.0)
        return one.relative <= max(FLOAT64_BOUND, _TIMES * bound)

    bad = [one for one in compared if not is_right(one)]
    found = [_differs(case, form, one) for one in bad[:_SHOWN]]
    verdict = Verdict.REFUTED if bad else Verdict.TESTED_EXACT if compared and not lost else Verdict.INCONCLUSIVE
    if lost:
        message = f"save_pretrained and from_pretrained of the plain model alone do not give back {few(lost)}"
        found.append(Finding("checkpoint_not_tried", message, case.program.where))
    return SavingChecked((Check(form.name, verdict, len(compared), len(bad)),), tuple(found))


def _differs(case: ExternalCase, form: CheckpointForm, one: LoadedTensor) -> Finding:
    if one.relative < float("inf"):
        message = f"{one.name} loaded into {one.how} is not what was saved by {form.name}"
    else:
        message = (
            f"what was saved by {form.name} and loaded into {one.how} lacks {one.name}, or has another shape of it"
        )
    rank = {"rank": str(one.rank)} if one.rank >= 0 else {}
    example = {"relative difference": f"{one.relative:.3g}"} | rank
    return Finding("checkpoint_differs", message, case.program.where, example)


@contextmanager
def _folder() -> Iterator[Path]:
    """Open a folder for one checkpoint."""
    with tempfile.TemporaryDirectory(prefix="nnscaler-external-", ignore_cleanup_errors=True) as name:
        yield Path(name)
