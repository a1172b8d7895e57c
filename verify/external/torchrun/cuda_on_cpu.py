"""Let a script that was written for GPUs run on the CPU: its devices, its backend and its calls of torch.cuda.

`torch.cuda.is_available()` says no, as it does on this machine, so that a script with a branch for the CPU takes it.
A script without one is served: devices named "cuda" are the CPU, `.cuda()` returns the tensor, nccl is gloo.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from verify.external.parameter_mapping import local_value
from verify.external.ranks.torch_private import preload

Tell = Callable[[str], None]
Change = tuple[Any, str, Any]  # owner, attribute, value
Groups = list[tuple[int, ...]]  # ranks of each
CPU = torch.device("cpu")
_FILLED, _STRIDE = 0.0371, 7919  # the largest number that memory is filled with; a prime: neighbours differ
_CUDA_NOTE = "the script asks for cuda devices: they were the CPU"


_OF_GPUS = re.compile(r"\b(cuda|nccl|nvidia|gpus?|xpu|triton)\b", re.IGNORECASE)
_NO_KERNEL = re.compile(
    r"arguments from the '(?P<kind>\w+)' backend.*? these backends: \[(?P<others>[\w, ]*)\]", re.DOTALL
)
WITHOUT_GPU = (
    "everything runs on the CPU here: take devices from `mesh.device_type` or `torch.accelerator`, and leave out what "
    "GPUs or NCCL alone have; import Triton only where there is one, with torch's operators in place of its kernels"
)


def asks_for_gpu(message: str) -> bool:
    """Return whether an error is about a GPU, or about what is for GPUs alone: no run on a CPU says more.

    An operator without a kernel for some kind of tensor names all kinds for which it has one: CUDA's is often there.
    """
    missing = _NO_KERNEL.search(message)
    if missing is None:
        return _OF_GPUS.search(message) is not None
    kind, others = missing["kind"], missing["others"].split(", ")
    return "CUDA" in kind or kind.replace("CPU", "CUDA") in others


def on_cpu(value: Any, tell: Tell) -> Any:
    """Return the CPU for a device of a GPU, by its name or as an object; anything else as it is."""
    if isinstance(value, str):
        name, _, number = value.partition(":")
    elif isinstance(value, torch.device):
        name, number = value.type, "" if value.index is None else str(value.index)
    else:
        return value
    if name not in ("cuda", "cpu") or (name == "cpu" and not number.isdecimal()):
        return value
    if name == "cuda":
        tell(_CUDA_NOTE)
    return CPU


def without_gpu(func: Any, args: list[Any], kwargs: dict[str, Any], tell: Tell) -> Any:
    """Put the CPU into the arguments of a function of torch. Return the result of one that is about GPUs alone; None
    for others."""
    if func in (Tensor.cuda, Tensor.pin_memory, Tensor.record_stream):
        if func is Tensor.cuda:
            tell(_CUDA_NOTE)
        return args[0]
    if func is torch.device and args and type(args[0]) is int:
        tell(_CUDA_NOTE)
        return CPU
    if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
        tell(_CUDA_NOTE)
        args[1] = CPU
    if "device" in kwargs:
        number = type(kwargs["device"]) is int
        kwargs["device"] = CPU if number else on_cpu(kwargs["device"], tell)
    elif func is Tensor.to and len(args) > 1:
        args[1] = on_cpu(args[1], tell)
    return None


class OnCpu(TorchFunctionMode):
    """While open, functions of torch that ask for a GPU compute on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, named = list(args), dict(kwargs or {})
        there = without_gpu(func, given, named, lambda note: None)
        return func(*given, **named) if there is None else there


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """While open, what a check file asks of torch.cuda, and moves there, stays on the CPU, in all threads but for
    functions of torch: each of them opens `OnCpu` itself."""

    def untold(note: str) -> None:
        del note

    preload()  # dynamo takes down torch's functions where it is imported
    changes = [*_modules(untold), *_ddp(untold), *_sync_batch_norm(untold), *_calls_of_cuda(lambda: 0)]
    with replaced([*changes, *_meshes(untold)]), OnCpu():
        yield


@contextmanager
def replaced(changes: Sequence[Change]) -> Iterator[None]:
    """Set attributes, and set them back."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, value))
        yield


def cpu_changes(
    ranks: int, here: int, store: Any, tell: Tell, groups: list[tuple[int, ...]], devices: int
) -> list[Change]:
    """Return what is to be replaced in torch: (owner, attribute, value). `groups`: where ranks of new groups go;
    `devices`: how many this machine is said to have."""
    init_process_group = _joining(ranks, here, store, tell)
    end = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            end(group)  # the default one is destroyed when all have ended: no rank loses its connections to another

    return [
        *((owner, "init_process_group", init_process_group) for owner in (dist, dist.distributed_c10d, device_mesh)),
        *((owner, "destroy_process_group", destroy_process_group) for owner in (dist, dist.distributed_c10d)),
        *_meshes(tell),
        *_started_meshes(tell, init_process_group),
        *_modules(tell),
        *_groups(tell, groups),
        *_wrappers(tell),
        *_calls(devices, here),
    ]


def _joining(ranks: int, here: int, store: Any, tell: Tell) -> Callable[..., None]:
    """Return what makes the default group, one of gloo over the ranks that were started."""
    start = dist.init_process_group

    def init_process_group(*args: Any, **named: Any) -> None:
        backend = args[0] if args else named.get("backend")
        if backend is not None and "nccl" in str(backend):
            tell("the script asks for nccl: gloo took its place")
        rank, size = named.get("rank", -1), named.get("world_size", -1)
        rank, size = (here if rank < 0 else rank), (ranks if size < 0 else size)
        if (rank, size) != (here, ranks):
            raise ValueError(f"the script joins as rank {rank} of {size}, and torchrun started rank {here} of {ranks}")
        options = {name: named[name] for name in ("timeout", "group_name") if named.get(name)}
        if store is not None:
            options["store"] = store
        start("gloo", rank=rank, world_size=size, **options)

    return init_process_group


def _meshes(tell: Tell) -> list[Change]:
    """Return what makes meshes lie on the CPU."""
    mesh_class = device_mesh.DeviceMesh.__init__

    def new_mesh(self: Any, device_type: str, *args: Any, **named: Any) -> None:
        mesh_class(self, str(on_cpu(str(device_type), tell)), *args, **named)

    return [(device_mesh.DeviceMesh, "__init__", new_mesh)]


def _started_meshes(tell: Tell, start: Callable[[], None]) -> list[Change]:
    """Return what makes a script's first mesh, which makes the default group by `start` where there is none yet."""
    mesh = device_mesh.init_device_mesh

    def init_device_mesh(device_type: str, *args: Any, **named: Any) -> Any:
        named.pop("backend_override", None)
        if not dist.is_initialized():
            start()
        return mesh(str(on_cpu(str(device_type), tell)), *args, **named)

    return [(owner, "init_device_mesh", init_device_mesh) for owner in (dist, device_mesh)]


def _modules(tell: Tell) -> list[Change]:
    """Return what keeps modules on the CPU when a script moves them."""
    module_to: Callable[..., nn.Module] = nn.Module.to
    module_to_empty: Callable[..., nn.Module] = nn.Module.to_empty

    def to(self: nn.Module, *args: Any, **named: Any) -> nn.Module:
        given = [CPU if type(value) is int else on_cpu(value, tell) for value in args]
        named = {n: CPU if type(v) is int and n == "device" else on_cpu(v, tell) for n, v in named.items()}
        return module_to(self, *given, **named)

    def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        made: nn.Module = module_to_empty(
            self, device=CPU if type(device) is int else on_cpu(device, tell), recurse=recurse
        )
        fill(made)
        return made

    def cuda(self: nn.Module, device: Any = None) -> nn.Module:
        del device
        tell(_CUDA_NOTE)
        return module_to(self, CPU)

    return [(nn.Module, "to", to), (nn.Module, "to_empty", to_empty), (nn.Module, "cuda", cuda)]


def fill(module: nn.Module) -> None:
    """Give memory that nobody has initialised small numbers, the same in each run: a script that forgets to initialise
    it can then be verified, and `left_as_filled` tells."""
    for tensor in (*module.parameters(), *module.buffers()):
        local = local_value(tensor)
        if local.is_floating_point():
            with torch.no_grad():
                local.copy_(_filling(local))


def left_as_filled(tensor: Tensor) -> bool:
    """Return whether a parameter still has the numbers of `fill`."""
    local = local_value(tensor)
    return local.numel() > 0 and local.is_floating_point() and torch.equal(local.detach(), _filling(local))


def _filling(local: Tensor) -> Tensor:
    values = torch.linspace(-_FILLED, _FILLED, local.numel(), dtype=torch.float64)
    return values[torch.arange(local.numel()) * _STRIDE % max(local.numel(), 1)].view(local.shape).to(local.dtype)


def _groups(tell: Tell, seen: Groups) -> list[Change]:
    """Make every group one of gloo, whatever backend it asks for."""
    new_group = dist.new_group

    def group(*args: Any, **named: Any) -> Any:
        given = list(args)
        if len(given) > 2:
            given[2] = "gloo"
        if named.get("backend") is not None:
            if "nccl" in str(named["backend"]):
                tell("the script asks for nccl: gloo took its place")
            named["backend"] = "gloo"
        made = new_group(*given, **{n: v for n, v in named.items() if n not in ("device_id", "pg_options")})
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            seen.append(tuple(dist.get_process_group_ranks(made)))
        return made

    return [(owner, "new_group", group) for owner in (dist, dist.distributed_c10d, device_mesh)]


def _ddp(tell: Tell) -> list[Change]:
    """Keep DDP, and FSDP of the old kind, from asking for a GPU."""
    shard = FullyShardedDataParallel.__init__
    wrap, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def ddp(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *a: Any, **n: Any) -> None:
        if device_ids or output_device is not None:
            tell(_CUDA_NOTE)
        wrap(self, module, None, None, *a, **n)

    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        given = wraps(hook)(partial(hook))
        given.__name__ = "hook"  # by the names of torch's own, DDP asks for NCCL
        register(self, state, given)

    def fsdp(self: Any, *args: Any, **named: Any) -> None:
        if named.get("device_id", CPU) != CPU:
            tell(_CUDA_NOTE)
        shard(self, *args, **named | {"device_id": CPU})

    return [
        (FullyShardedDataParallel, "__init__", fsdp),
        (DistributedDataParallel, "__init__", ddp),
        (DistributedDataParallel, "register_comm_hook", register_comm_hook),
    ]


def _sync_batch_norm(tell: Tell) -> list[Change]:
    """Compute a SyncBatchNorm by its definition, for which torch has kernels of GPUs alone: statistics over the rows of
    all ranks. Over some of them it stays as it is, for one rank cannot do the same."""
    on_gpus = nn.SyncBatchNorm.forward

    def forward(self: nn.SyncBatchNorm, rows: Tensor) -> Tensor:
        group = self.process_group or dist.group.WORLD
        if not self.training or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return _BatchNorm.forward(self, rows)
        if dist.get_world_size(group) < dist.get_world_size():
            return on_gpus(self, rows)
        tell("SyncBatchNorm has no kernel on a CPU: it was computed by its definition")
        dims = [0, *range(2, rows.dim())]
        count = all_reduce(rows.new_full((), rows.numel() / rows.size(1)), group=group)
        mean = all_reduce(rows.sum(dims, keepdim=True), group=group) / count
        square = all_reduce((rows - mean).square().sum(dims, keepdim=True), group=group)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.flatten(), share)
                self.running_var.lerp_(square.flatten() / (count - 1), share)
        normal: Tensor = (rows - mean) * (square / count + self.eps).rsqrt()
        shape = mean.shape
        normal = normal if self.weight is None else normal * self.weight.view(shape)
        return normal if self.bias is None else normal + self.bias.view(shape)

    return [
        (nn.SyncBatchNorm, "forward", forward),
        (DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None),  # it refuses what is on a CPU
    ]


def _wrappers(tell: Tell) -> list[Change]:
    """Keep DDP from asking for a GPU, the loader from starting processes, and the compiler from compiling."""
    load = DataLoader.__init__

    def loader(self: Any, *args: Any, **named: Any) -> None:
        if named.get("num_workers"):
            tell("data loaders had no worker processes")
        gone = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "multiprocessing_context")
        load(self, *args[:5], **{n: v for n, v in named.items() if n not in (*gone, "timeout", "pin_memory_device")})

    def compiled(model: Any = None, **named: Any) -> Any:
        del named
        tell("torch.compile was left out: the eager program was run")
        return (lambda function: function) if model is None else model

    def spawn(*_: Any, **__: Any) -> None:
        raise RuntimeError("the script starts ranks by torch.multiprocessing, and here torchrun has started them")

    def compile_here(self: nn.Module, *_: Any, **__: Any) -> None:
        compiled(self)

    return [
        *_ddp(tell),
        *_sync_batch_norm(tell),
        (DataLoader, "__init__", loader),
        (torch, "compile", compiled),
        *((torch.multiprocessing, name, spawn) for name in ("spawn", "start_processes")),
        (nn.Module, "compile", compile_here),
    ]


class _NothingToWaitFor:
    """An event or a stream of a GPU, where nothing runs on one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *_, **__: 1.0  # a query says that all is done


def _calls_of_cuda(here: Callable[[], int]) -> list[Change]:
    """Return calls of torch.cuda that are made without asking whether there is a GPU; `here`: the number of ours."""
    cuda = torch.cuda
    idle = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    numbers = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return [
        *((cuda, name, lambda *a, **n: None) for name in idle),
        *((cuda, name, lambda *a, **n: 0) for name in numbers),
        *((cuda, name, _NothingToWaitFor) for name in ("Event", "Stream", "current_stream", "default_stream")),
        (cuda, "stream", lambda *a, **n: nullcontext()),
        (cuda, "get_device_name", lambda *a, **n: "CPU"),
        (cuda, "current_device", here),
        (cuda, "device", lambda *a, **n: nullcontext()),
    ]


def _calls(devices: int, here: int) -> list[Change]:
    """Return calls of torch.cuda and torch.accelerator that scripts make without asking whether there is a GPU."""
    accelerator = torch.accelerator
    return [
        *_calls_of_cuda(lambda: here),
        *((accelerator, name, lambda *a, **n: None) for name in ("set_device_index", "set_device_idx", "synchronize")),
        (accelerator, "device_index", lambda *a, **n: nullcontext()),
        (accelerator, "is_available", lambda: True),
        (accelerator, "current_accelerator", lambda *a, **n: CPU),
        (accelerator, "device_count", lambda: devices),
        (accelerator, "current_device_index", lambda: here),
    ]
