"""Keep a program for each size of a batch: compiled when a batch of that size comes, on rank 0, and sent to the
others."""

from __future__ import annotations

import pickle
import tempfile
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from op_registry.call import dtype_name

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import for_batch
from nnscaler.errors import NnscalerError
from nnscaler.manifest import InputRecord, Manifest
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.training.autocast_on_any_device import dtype_named, in_precision
from nnscaler.runtime.training.cut_batch import DataPart
from nnscaler.tracing.models_with_added_loss import with_loss
from nnscaler.tracing.sample_inputs import SAME_ARGUMENTS, BatchConstants, named_tensors, signature_of
from nnscaler.tracing.set_and_restore_modes import modes_of
from nnscaler.training.check_replicas import row_checksum
from nnscaler.training.user_loop.tell_unfollowed_module_changes import ModuleWatch

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of a global batch, by input
Vouch = Callable[[Program], None]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class SizeClass:
    """The batches that one program serves. `training`: the model is in the mode of the program that was started."""

    shapes: Shapes
    training: bool


@dataclass(frozen=True, slots=True)
class SentProgram:
    """A program for another size, as it is sent to a rank.

    sources    file name -> text of a role
    manifest   describes the program
    constants  tensors that the model's code made for this size
    data_axes  over which the batch is cut; empty: every rank computes all of it
    """

    sources: Mapping[str, str]
    manifest: Manifest
    constants: Mapping[str, Tensor]
    data_axes: tuple[str, ...]


def shapes_of(manifest: Manifest) -> Shapes:
    return tuple((entry.name, entry.shape) for entry in manifest.inputs)


def carried_inputs(program: Program) -> frozenset[str]:
    """Return the inputs whose dim 0 is the batch: that of the first input that has dims."""
    inputs = [entry for entry in program.manifest.inputs if entry.shape]
    return frozenset(entry.name for entry in inputs if entry.shape[0] == inputs[0].shape[0])


def constants_of(program: Program) -> BatchConstants:
    """Return the constants that the sample batch of a program had; none where it is not known."""
    origin = program.origin
    if origin is None:
        return BatchConstants((), {})
    takes = origin.module if origin.loss_fn is None else with_loss(origin.module, origin.loss_fn)
    return BatchConstants(*origin.rebuild(program.inputs), signature_of(takes))


def as_inputs(batch: Any, inputs: Sequence[InputRecord], precision: str | None) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names of a program's inputs, as a run of this precision takes them.

    Raises NnscalerError("batch_differs") where there are others, or of another number of dims; or of another dtype, on
    which the model's code may branch, and for which it may have casts that the program has no lines for. Floating
    numbers are given the program's dtype where that can hold them all.
    """
    names = [entry.name for entry in inputs]
    named = named_tensors(batch, names)
    if named is None:
        given = sorted(batch) if isinstance(batch, Mapping) else f"{len(batch)} tensors"
        message = f"the batch has {given}, and the model takes {names}"
        raise NnscalerError("batch_differs", message, help=SAME_ARGUMENTS)
    for entry in inputs:
        tensor = named[entry.name]
        found, wanted = in_precision(tensor.dtype, precision), dtype_named(entry.dtype, precision)
        if tensor.dim() != len(entry.shape):
            message = f"input {entry.name!r} has {tensor.dim()} dims, and the model was compiled for {len(entry.shape)}"
            raise NnscalerError("batch_differs", message)
        if found == wanted:
            continue
        if not found.is_floating_point or torch.promote_types(found, wanted) != wanted or wanted.is_complex:
            told = f"input {entry.name!r} is {dtype_name(tensor.dtype)}, and the model was compiled for {entry.dtype}"
            raise NnscalerError("batch_differs", told, help=f"let all batches have one: .to(torch.{entry.dtype})")
        named[entry.name] = tensor.to(wanted)
    return named


def has_modes(program: Program) -> bool:
    """Return whether evaluation is another program: whether any part of the model is in training mode."""
    return program.origin is not None and any((program.origin.modes or modes_of(program.origin.module)).values())


def sent(program: Program) -> SentProgram:
    """Return what other ranks need of a program."""
    named = {name for entry in program.manifest.parameters for name in entry.fqns}
    named |= {name for entry in program.manifest.buffers for name in entry.fqns}
    constants = {name: tensor.detach() for name, tensor in program.state.items() if name not in named}
    return SentProgram(program.sources, program.manifest, constants, program.plan.data_axes)


def unsaved_buffers(program: Program) -> frozenset[str]:
    """Return the buffers that the module's own `state_dict` leaves out, where the module is known."""
    parts = () if program.origin is None else program.origin.module.named_modules()
    return frozenset(f"{path}.{name}".lstrip(".") for path, part in parts for name in part._non_persistent_buffers_set)


def valueless(program: Program) -> Callable[[], Program]:
    """Return what gives a program that has been started, without the values of its model: the engine has them now, and
    a model that nobody else holds is freed. `state` has tensors on the meta device.

    The module, which is compiled for other sizes, is the user's own while somebody holds it; then a copy, whose
    parameters have memory that is never touched. What compiling may read values of stays whole: a model that is
    specialised to data, or is fitted to each batch.
    """
    origin = program.origin
    if origin is not None and (origin.specialise or origin.resize is not None):
        return lambda: program
    state = {name: tensor.detach().to("meta") for name, tensor in program.state.items()}
    if origin is None:
        without = replace(program, state=state)
        return lambda: without
    held, kept = weakref.ref(origin.module), replace(origin, module=_skeleton(origin.module))
    copied = replace(program, state=state, origin=kept)

    def current() -> Program:
        module = held()
        return copied if module is None else replace(copied, origin=replace(kept, module=module))

    return current


def _skeleton(module: nn.Module) -> nn.Module:
    """Return a copy of a module and its submodules, wherever they stand in it, whose parameters have other memory. All
    else that it refers to is shared: a dataset is not copied. The module itself where parameters are views of one
    another, which the trace sees."""
    parameters = [p for p in module.parameters() if type(p) is nn.Parameter and p.device.type == "cpu"]
    if len({p.untyped_storage().data_ptr() for p in parameters}) < len(parameters):
        return module
    made: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p), p.requires_grad) for p in parameters}

    def copied(value: Any) -> Any:  # of dicts as they are now: simulated ranks, which are threads, add hooks to them
        if id(value) in made:
            return made[id(value)]
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            made[id(value)] = new = type(value).__new__(type(value))
            new.__dict__ = {name: copied(item) for name, item in tuple(vars(value).items())}
            return new
        if type(value) in (list, tuple):
            return type(value)(copied(item) for item in value)
        if type(value) in (dict, OrderedDict):
            return type(value)((name, copied(item)) for name, item in tuple(value.items()))
        if isinstance(value, MethodType):
            return MethodType(value.__func__, copied(value.__self__))
        return value

    found = copied(module)
    assert isinstance(found, nn.Module)
    return found


def compile_size(
    program: Program,
    size: SizeClass,
    batch: Mapping[str, Tensor],
    communicator: Communicator,
    vouch: Vouch | None = None,
    watch: ModuleWatch | None = None,
) -> SentProgram:
    """Compile the program for another size on rank 0, and return it on every rank; all of them call this.

    `batch`: rows of this rank, of which a sample is made. `vouch` raises where the new text is not the model's; `watch`
    knows how the module has changed since the program was started. Raises on every rank what it raises on rank 0.
    """

    def compiled() -> SentProgram:
        for change in () if watch is None else watch.check():
            warnings.warn(f"{change}, and so has the program for {described(size)} alone", stacklevel=7)
        made = for_batch(program, sample_of(size.shapes, batch, program.inputs), training=size.training)
        if vouch is not None:
            vouch(made)
        return sent(made)

    return from_rank_0(compiled, communicator, f"compiling for {described(size)}")


def from_rank_0(make: Callable[[], Made], communicator: Communicator, what: str) -> Made:
    """Return on every rank what `make` returns on rank 0, where alone it is called; all of them call this.

    Raises on every rank what it raises there: NnscalerError("size_not_compiled") for what is not one.
    """
    answer: Made | NnscalerError | None = None
    if communicator.rank == 0:
        try:
            answer = make()
        except NnscalerError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - others wait for an answer
            answer = NnscalerError("size_not_compiled", f"{what}: {error}")
    answer = cast(Made | NnscalerError, broadcast_object(answer, communicator))
    if isinstance(answer, NnscalerError):
        raise answer
    return answer


def described(size: SizeClass) -> str:
    """Return the size in words."""
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in size.shapes)
    return shapes if size.training else f"{shapes}, for evaluation"


def sample_of(shapes: Shapes, batch: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a global batch of these shapes: rows that are there, over and over."""
    sample: dict[str, Tensor] = {}
    for name, shape in shapes:
        found = batch[name].detach().cpu().to(known[name].dtype)  # the engine may run in another precision
        if tuple(found.shape) != shape:
            if not found.numel():
                found = known[name].new_zeros(shape)
            found = found[torch.arange(shape[0]) % max(found.shape[0], 1)]
        sample[name] = found
    return sample


def broadcast_object(value: object, communicator: Communicator) -> object:
    """Return rank 0's value on every rank."""
    if communicator.world_size == 1:
        return value
    everyone = tuple(range(communicator.world_size))
    data = pickle.dumps(value) if communicator.rank == 0 else b""
    length = communicator.broadcast(torch.tensor([len(data)]), 0, everyone)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(length), dtype=torch.uint8)
    return pickle.loads(communicator.broadcast(text, 0, everyone).numpy().tobytes())


def folder_of(sources: Mapping[str, str], cache: Path | None) -> Path:
    """Write role files where they are not yet, and return their folder: it is named after what is in them.

    `cache`: the folder of all programs; one that cannot be written is replaced by a temporary one.
    """
    name = sha256("\\0".join(f"{n}\\0{t}" for n, t in sorted(sources.items())).encode()).hexdigest()[:16]
    home = cache or Path(tempfile.gettempdir()) / "nnscaler-programs"
    try:
        return _written(home / name, sources)
    except OSError:
        return _written(Path(tempfile.mkdtemp(prefix="nnscaler-")) / name, sources)


def _written(folder: Path, sources: Mapping[str, str]) -> Path:
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        for name, text in sources.items():
            (temporary / name).write_text(text, encoding="utf-8")
        try:
            temporary.rename(folder)
        except OSError:  # another rank was faster
            for file in temporary.iterdir():
                file.unlink()
            temporary.rmdir()
    return folder


def agreed(
    inputs: Mapping[str, Tensor], communicator: Communicator, carried: frozenset[str], part: DataPart, look: bool
) -> tuple[Shapes, tuple[int, ...]]:
    """Return the shapes of the global batch, and the rows of each data part. Every rank calls it.

    `inputs`: this rank's rows; `carried`: inputs whose dim 0 is the batch; `part`: this rank's data part. The other
    inputs every part has whole. `look`: warn of parts that were given the same rows. Raises
    NnscalerError("batch_differs") where ranks of one part have other rows, or other inputs other shapes or values.
    """
    local = [(name, tuple(tensor.shape)) for name, tensor in inputs.items()]
    copied = communicator.world_size > part.count
    compared = [name for name in inputs if communicator.world_size > 1 and (copied or look or name not in carried)]
    numbers = [part.index, *(size for _, shape in local for size in shape)]
    found = [tuple(numbers)]
    if communicator.world_size > 1:
        own = torch.cat([torch.tensor(numbers), *(row_checksum(inputs[name]) for name in compared)])
        gathered = communicator.all_gather(own, tuple(range(communicator.world_size)))
        found = [tuple(row) for row in torch.stack(gathered).tolist()]
    parts: dict[int, int] = {}  # data part -> rows
    shapes: list[tuple[str, tuple[int, ...]]] = []
    position = 1
    for name, shape in local:
        each = [row[position : position + len(shape)] for row in found]
        position += len(shape)
        if name in carried:
            for rank, (row, seen) in enumerate(zip(found, each, strict=True)):
                if parts.setdefault(row[0], seen[0]) != seen[0]:
                    raise _differ(name, rank, seen, f"data part {row[0]} has {parts[row[0]]} rows elsewhere")
            shape, each = (sum(parts.values()), *shape[1:]), [seen[1:] for seen in each]
        other = next((rank for rank, seen in enumerate(each) if seen != each[0]), None)
        if other is not None:
            raise _differ(name, other, each[other], f"on rank 0 {list(each[0])}: pad to one length on all ranks")
        shapes.append((name, tuple(shape)))
    repeated = look and len(parts) > 1
    for name in compared:
        first: dict[int, int] = {}  # data part -> a rank of it
        for rank, row in enumerate(found):
            one = first.setdefault(row[0] if name in carried else 0, rank)
            if row[position] != found[one][position]:
                raise _other_values(name, one, rank, name in carried)
        if repeated and name in carried:
            given = [found[rank][position] for index, rank in first.items() if parts[index]]
            repeated = len(set(given)) < len(given)
        position += 1
    if repeated and communicator.rank == 0:
        warnings.warn(_REPEATED, stacklevel=2)
    return tuple(shapes), tuple(parts[index] for index in sorted(parts))


_REPEATED = (
    "data parts were given the same rows, each of which then counts several times: give each part its own, as "
    "`engine.loader` does; `engine.data_part` says which they are"
)


def whole_batch(rows: Tensor, communicator: Communicator, part: DataPart) -> Tensor:
    """Return the global batch of an input, put together from the rows of all data parts. Every rank calls it."""
    everyone = tuple(range(communicator.world_size))
    head = torch.tensor([part.index, rows.shape[0]])
    heads = torch.stack(communicator.all_gather(head, everyone)).tolist()
    shapes = [(count, *rows.shape[1:]) for _, count in heads]
    pieces = communicator.all_gather(rows, everyone, shapes)
    parts = {number: piece for (number, _), piece in reversed(list(zip(heads, pieces, strict=True)))}
    return torch.cat([parts[index] for index in sorted(parts)])


def _other_values(name: str, one: int, other: int, rows: bool) -> NnscalerError:
    message = f"input {name!r} has other values on rank {other} than on rank {one}"
    if rows:
        message += ", and both have one data part between them"
        help = "both must read the same rows: let random numbers of a dataset come from a generator of the sample's "
        help += "number and the epoch, and give a stream no part of its data by rank"
    else:
        message += ", and its dim 0 is not the batch"
        help = "give every rank the same, or make it rows of the batch: as many as the first input has"
    return NnscalerError("batch_differs", message, help=help)


def _differ(name: str, rank: int, shape: Sequence[int], why: str) -> NnscalerError:
    message = f"input {name!r} is {list(shape)} on rank {rank}, and {why}"
    help = "give every rank the rows of its data part: engine.loader does, and engine.data_part says which they are"
    return NnscalerError("batch_differs", message, help=help)
