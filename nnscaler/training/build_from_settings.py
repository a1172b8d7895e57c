"""Build what the settings of a run name: data, program, optimizer, schedule, hooks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from op_registry.call import dtype_name
from op_registry.registry import default_registry
from op_registry.source_location import definition_of

from nnscaler.atomic_writes import machine_error
from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import parallelize
from nnscaler.errors import NnscalerError, SourceLocation
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.ir.mixed_precision_dtypes import Precision
from nnscaler.ir.operation_annotations import signatures
from nnscaler.manifest import Manifest
from nnscaler.model_file import find_target, load_loss_function, user_frame, user_function
from nnscaler.plan_source import plan_source, schedule_of_request
from nnscaler.planning.cluster.detect_this_machine import found_cluster
from nnscaler.runtime.training.cut_batch import DataPart
from nnscaler.scheduling.registry import get_schedule, is_stream
from nnscaler.scheduling.schedule import ScheduleKind
from nnscaler.tracing.export.user_source_locations import location_of_trace
from nnscaler.training.compile_on_first_rank import compile_once
from nnscaler.training.data.pack_and_collate_samples import Collate
from nnscaler.training.data.sample_order_and_loader import Loader, SampleOrder, loader
from nnscaler.training.data.stream_read_ahead import ReadAhead, reading_first
from nnscaler.training.engine import Engine
from nnscaler.training.functional_optimizer import state_bytes
from nnscaler.training.programs_by_batch_size import Vouch
from nnscaler.training.read_settings import compile_request
from nnscaler.training.splittable_optimizers_and_groups import parameter_groups
from nnscaler.training.train_settings import Code, HookSettings, OptimizerSettings, ScheduleSettings, TrainSettings
from nnscaler.transform.plan import Plan

Hook = Callable[[Any], object]  # of the trainer
_MODEL = 'model = "model.py", or "model.py::factory"'
_DATA = '[data] source = "data.py::datasets"'


@dataclass(frozen=True)
class Parts:
    """The objects that the settings name.

    build       makes the model
    described   the model, for the program's manifest
    training    dataset
    validation  dataset; None without one
    collate     makes a batch of rows; None: they are stacked
    hooks       point -> functions
    place       of the function that makes the datasets
    """

    build: Callable[[], nn.Module]
    described: Mapping[str, str]
    training: Any
    validation: Any
    collate: Collate | None
    hooks: Mapping[str, tuple[Hook, ...]]
    place: SourceLocation | None = None


def load_parts(settings: TrainSettings, model: nn.Module | None = None, data: Any = None) -> Parts:
    """Load what the settings name; `model` and `data` take the places of files.

    Raises NnscalerError: as `find_target`, the import of the user's files and what they raise; `bad_settings` for
    what an optimizer or a schedule does not take, before data is read.
    """
    described = {"name": type(model).__name__}
    if model is not None and not isinstance(model, nn.Module):
        help = f"module={getattr(model, '__name__', 'Model')}(...)" if callable(model) else None
        raise NnscalerError("bad_settings", f"`module` is {model!r}, and no nn.Module", help=help)

    def given() -> nn.Module:
        assert model is not None
        return model

    build: Callable[[], nn.Module] = given
    if model is None:
        path, name = find_target(settings.model, _MODEL)
        factory = user_function(settings.model, "build_model", _MODEL)
        described = {"name": path.name, "file": str(path.resolve()), "factory": name or "build_model"}

        def built() -> nn.Module:
            made = factory(seed=settings.seed)
            if not isinstance(made, nn.Module):
                message = f"{described['factory']}() of {path.name} returns a {type(made).__name__}, not a model"
                raise NnscalerError("model_incomplete", message)
            return made

        build = built
    _optimizer_class(settings.optimizer)
    _schedule_class(settings.schedule)
    source = user_function(settings.data.source, "datasets", _DATA) if data is None else None
    found = data if source is None else source(seed=settings.seed)
    training, validation = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if isinstance(training, IterableDataset) and not settings.data.workers and not hasattr(training, "state_dict"):
        training = ReadAhead(training)
    if validation is None and settings.validation.every:
        help = "(training, validation), or validation.every = 0"
        message = f"{settings.data.source or '`datasets`'} has no data for validation"
        raise NnscalerError("bad_data", message, help=help)
    points = {item.name: getattr(settings.hooks, item.name) for item in fields(HookSettings)}
    hooks = {name: tuple(_function(t, name) for t in ts) for name, ts in points.items()}
    collate = _function(settings.data.collate, "collate") if settings.data.collate else None
    return Parts(build, described, training, validation, collate, hooks, definition_of(source))


def first_batch(settings: TrainSettings, parts: Parts, model: nn.Module) -> dict[str, Any] | tuple[Any, ...]:
    """Return the first global batch, by which the model is traced and the program compiled."""
    dataset = parts.training
    before = dataset.state_dict() if hasattr(dataset, "state_dict") else None
    order, packed = training_order(settings, dataset), settings.data.packed or None
    with _reading(settings.data.source, parts.place):
        ahead = min(settings.data.workers, 1) if isinstance(dataset, IterableDataset) else 0  # what it reads is its own
        whole = loader(dataset, order, DataPart(0, 1), collate=parts.collate, packed=packed, workers=ahead)
    with reading_first(dataset):
        batch = next(read_batches(whole, settings), None)
    if before is not None:
        dataset.load_state_dict(before)
    if batch is None:
        raise NnscalerError("bad_data", "the training data has no batch", parts.place)
    if isinstance(batch, Mapping):
        if not settings.data.packed or settings.loss:
            return dict(batch)
        wanted = inspect.signature(model.forward).parameters
        return {name: tensor for name, tensor in batch.items() if name in wanted}
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def read_batches(batches: Loader, settings: TrainSettings, manifest: Manifest | None = None) -> Iterator[Any]:
    """Yield the batches of an epoch; of packed rows what the program of `manifest` takes.

    Raises NnscalerError `data_raised` for what reading them raises, with the user's own line.
    """
    found, end = iter(batches), object()
    names = {entry.name for entry in manifest.inputs} if manifest and settings.data.packed else None
    while True:
        with _reading(settings.data.source):
            batch: Any = next(found, end)
        if batch is end:
            return
        yield batch if names is None else {name: value for name, value in batch.items() if name in names}


@contextmanager
def _reading(source: str, made_at: SourceLocation | None = None) -> Iterator[None]:
    """Turn what the user's dataset raises inside into `data_raised`; tell of what is refused where it is made."""
    try:
        yield
    except NnscalerError as error:
        raise error.at(made_at) from error.__cause__
    except Exception as error:
        if isinstance(error, MemoryError) or machine_error(error) is not None:
            raise
        told, place = in_one_line(error), user_frame(error, Path(source.partition("::")[0]).resolve().parent)
        worker = _OF_WORKER.match(str(error))
        if worker is not None:  # from another process comes the text of an error
            told, place = worker[1], location_of_trace(str(error))
        raise NnscalerError("data_raised", f"reading the data raises {told}", place) from error


_OF_WORKER = re.compile(
    r"Caught \w+ in DataLoader worker .*\n(?:Original )?Traceback [^\n]*\n(?: [^\n]*\n|\n)*([^\n]+)", re.DOTALL
)


def training_order(settings: TrainSettings, dataset: Any) -> SampleOrder:
    """Return the order of the training data; a stream comes in its own."""
    data = settings.data
    stream = isinstance(dataset, IterableDataset)
    return SampleOrder(data.batch_size, data.shuffle and not stream, settings.seed, data.drop_last)


def make_program(
    settings: TrainSettings,
    parts: Parts,
    ranks: int,
    progress: Callable[[str, float, str], None] | None,
    vouch: Vouch | None,
) -> Program:
    """Compile the model, on rank 0 for all. Every rank calls it. `vouch`: as in EngineSettings.

    Raises NnscalerError as `nnscaler.parallelize`, and what `vouch` raises.
    """
    request = compile_request(settings, ranks)
    model = parts.build()
    _check_groups(settings.optimizer, model)
    batch = first_batch(settings, parts, model)
    chosen, loss = settings.precision, settings.loss
    precision = Precision(chosen.param or None, chosen.reduce or None, chosen.output or None, chosen.cast_inputs)
    loss_fn = (load_loss_function(loss) if isinstance(loss, str) else loss) if loss else None

    def compiled() -> Program:
        plan = plan_source(request)
        schedule = None if isinstance(plan, Plan) else schedule_of_request(request)
        _check_steps(plan, schedule, settings.clip)
        program = parallelize(
            model,
            batch,
            ranks=ranks,
            plan=plan,
            schedule=schedule,
            micro_batches=request.micro_batches,
            model=parts.described,
            loss_fn=loss_fn,
            precision=precision if chosen.param or chosen.reduce or chosen.output else None,
            optimizer_bytes=_optimizer_bytes(settings.optimizer),
            progress=progress,
        )
        if not program.graph.loss:
            help = "return the loss from forward, or name a function of the outputs and the batch: `loss` of the run"
            raise NnscalerError("no_loss", "the model returns no scalar loss with a gradient", help=help)
        if vouch is not None:
            vouch(program)
        return program

    return compile_once(compiled, model, batch, loss_fn)


def _check_steps(plan: object, schedule: str | ScheduleKind | None, clip: float) -> None:
    """Check that a run's program makes steps. Raises NnscalerError("bad_settings")."""
    kind = get_schedule(schedule) if isinstance(schedule, str) else schedule
    if isinstance(plan, Plan) and is_stream(plan):
        name = plan.schedule
    elif kind is not None and kind.stream:
        name = kind.name
    else:
        return
    why = f" and clips the norm of all gradients to {clip:g}" if clip else ""
    raise NnscalerError(
        "bad_settings",
        f"pipeline: schedule {name} updates parameters after each batch, and a run makes steps{why}",
        help='pipeline = "1f1b"; or call engine.stream in a loop of your own (docs/asynchronous-pipeline.md)',
    )


def make_optimizer(settings: OptimizerSettings, engine: Engine) -> torch.optim.Optimizer:
    """Return the optimizer over this rank's tensors between steps.

    Raises NnscalerError: bad_settings, no_such_parameter, no_such_setting, update_needs_whole.
    """
    cls = _optimizer_class(settings)
    try:
        return engine.optimizer(cls, settings.groups, **settings.arguments)
    except (TypeError, ValueError) as error:
        raise NnscalerError("bad_settings", f"[optimizer] {cls.__name__}: {error}") from error


def _check_groups(settings: OptimizerSettings, model: torch.nn.Module) -> None:
    """Check the groups before the model is compiled. Raises as `make_optimizer`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    parameter_groups(_optimizer_class(settings), {every[0]: every for every in names.values()}, {}, settings.groups)


def _optimizer_bytes(settings: OptimizerSettings) -> float | None:
    """Return the bytes that the optimizer keeps of an element of a float32 parameter; None where that cannot be tried,
    and making the optimizer will say why."""
    try:
        cls: Any = _class(settings.name, torch.optim, "optimizer.name")
        return state_bytes(cls, settings.arguments)
    except Exception:  # noqa: BLE001 - whatever a class of the user's raises
        return None


def make_schedule(run: TrainSettings, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return the schedule of the learning rate; None where it stays. `steps`: of the run; 0: not known.

    Raises NnscalerError `bad_settings`.
    """
    settings = run.schedule
    if not settings.name:
        return None
    cls, arguments = _schedule_class(settings), dict(settings.arguments)
    for name in ("total_steps", "T_max", "total_iters"):
        asked = inspect.signature(cls).parameters.get(name)
        if steps and asked is not None and name not in arguments and not {"epochs", "steps_per_epoch"} & set(arguments):
            arguments[name] = steps
    try:
        made = cls(optimizer, **arguments)
    except (TypeError, ValueError) as error:
        raise NnscalerError("bad_settings", f"[schedule] {cls.__name__}: {error}") from error
    if isinstance(made, _FOLLOWING) and not run.validation.every:
        message = f"[schedule] {cls.__name__} goes on after each validation, and the run has none"
        raise NnscalerError("bad_settings", message, help="[validation] every = 100")
    return made


def step_schedule(schedule: Any, times: int = 1, validation_loss: float | None = None) -> None:
    """Go on by some steps, where the schedule goes on with steps; or by a validation, of this loss, where it goes on
    with these. Raises NnscalerError("bad_settings") where the schedule has no more."""
    follows = isinstance(schedule, _FOLLOWING)
    try:
        if follows and validation_loss is not None:
            schedule.step(validation_loss)
        elif schedule is not None and not follows and validation_loss is None:
            for _ in range(times):
                schedule.step()
    except ValueError as error:
        message = f"[schedule] {type(schedule).__name__}: {error}"
        help = "a checkpoint has the schedule of the run that saved it: give that run its steps, or another folder"
        raise NnscalerError("bad_settings", message, help=help) from error


_FOLLOWING = torch.optim.lr_scheduler.ReduceLROnPlateau  # the validation loss


def told_of_dtypes(program: Program) -> str | None:
    """Name an input of another floating dtype than the parameters have, or a buffer of another than they are cast to,
    which torch's operators do not mix; None where there is none."""
    param = program.plan.precision.param if program.plan.precision else None
    for entry in program.manifest.buffers if param else ():
        if entry.dtype != param and getattr(torch, entry.dtype).is_floating_point:
            name = entry.fqns[0]
            return f"buffers stay as they are, and `{name}` is {entry.dtype}: cast it in forward, `{name}.to(x.dtype)`"
    floating = {t.dtype for t in program.state.values() if t.is_floating_point()}
    for name, tensor in program.inputs.items():
        if floating and tensor.is_floating_point() and tensor.dtype not in floating:
            has, want = (dtype_name(dtype) for dtype in (tensor.dtype, next(iter(floating))))
            return f"the rows have {name} as {has}, and the model is {want}: let the dataset return tensors of {want}"
    return None


def flops_of_step(program: Program) -> float:
    """Return the floating point operations of forward and backward, of the batch that was compiled for."""
    return 3.0 * sum(s.flops for s in signatures(program.graph, default_registry()).values())


def peak_flops(device: torch.device, ranks: int, dtype: str) -> float | None:
    """Return what `ranks` devices such as this one do a second at best; None where that is not known."""
    if device.type != "cuda":
        return None  # a processor has no figure that its maker states
    return found_cluster(ranks).device.flops(dtype or "float32") * ranks


def _function(code: Code, default: str) -> Callable[..., Any]:
    """Return a function of the user's."""
    return user_function(code, default, f"{default} = ...") if isinstance(code, str) else code


def _optimizer_class(settings: OptimizerSettings) -> Any:
    """Return the class, which takes what is set. Raises NnscalerError `bad_settings`."""
    cls = _class(settings.name, torch.optim, "optimizer.name")
    _check_arguments(cls, settings.arguments, "optimizer")
    return cls


def _schedule_class(settings: ScheduleSettings) -> Any:
    """Return the class, which takes what is set; None where no schedule is. Raises NnscalerError `bad_settings`."""
    if not settings.name:
        return None
    cls = _class(settings.name, torch.optim.lr_scheduler, "schedule.name")
    _check_arguments(cls, settings.arguments, "schedule")
    return cls


def _class(name: Code, home: Any, option: str) -> Callable[..., Any]:
    """Return the class of torch, or what `file.py::name` names."""
    if not isinstance(name, str):
        return name
    if "::" in name or name.endswith(".py"):
        return user_function(name, Path(name).stem, f'{option} = "file.py::name"', is_class=True)
    found: Any = getattr(home, name, None)
    if not callable(found):
        names = [n for n in dir(home) if n[0].isupper()]
        lowered = {n.lower(): n for n in names}
        close = [lowered[n] for n in get_close_matches(name.lower(), lowered, n=2)] or names[:8]
        message = f"`{option}` is {name!r}, and {home.__name__} has no such class"
        raise NnscalerError("bad_settings", message, help=f"one of its classes ({', '.join(close)}), or file.py::name")
    return found  # type: ignore[no-any-return]


def _check_arguments(cls: Callable[..., Any], arguments: Mapping[str, Any], table: str) -> None:
    parameters = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [name for name in parameters if name not in ("params", "optimizer")]
    for key in arguments:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            help = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
            raise NnscalerError("bad_settings", f"{cls.__name__} takes no {key!r}, which [{table}] sets", help=help)
