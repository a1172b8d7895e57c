"""Trace one rank of an external program, and its plain model, on fake tensors: shapes alone, at any number of ranks.

The program is its author's, unmodified: `parallelize` gets a module of fake parameters and a mesh of torch's `fake`
backend, which says that it is rank r of n and whose collectives do nothing. Then one step runs, forward and backward,
under the recorder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from nnscaler.exception_in_one_line import in_one_line
from nnscaler.layout import Axis
from nnscaler.layout import DeviceMesh as Ranks
from nnscaler.runtime.nested_values import leaves_of, map_tensors
from nnscaler.runtime.start_autograd import start_autograd
from verify.evidence.dimension_types.functional_trace import written
from verify.evidence.operator_trace import arguments_of
from verify.external.parameter_mapping import clean_name
from verify.external.program import ExternalProgram
from verify.external.proof.graph_recorder import GraphRecorder
from verify.external.proof.rank_graph import HeldInGraph, RankGraph, pruned
from verify.external.ranks.torch_private_trace import fake_world, group_ranks, meshes_for_real
from verify.external.reference import row_count
from verify.external.torchrun.cuda_on_cpu import replaced
from verify.programs.module_tensors_by_every_name import state_of

Spans = Callable[[str], tuple[str, ...] | None]  # name of a group -> the mesh axes that it spans
WHOLE = -1  # "rank" of the plain model's graph


class NotTraced(Exception):
    """The program cannot be traced; the message says why."""


def trace_rank(program: ExternalProgram, rank: int) -> RankGraph:
    """Return the graph of a rank. Raises NotTraced."""
    axes = tuple(Axis(name, size) for name, size in program.mesh)
    places = Ranks(axes, tuple(range(program.ranks))).coordinates(rank)
    mode = _fake_mode()
    with fake_world(rank, program.ranks):
        names, sizes = tuple(a.name for a in axes), tuple(a.size for a in axes)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model = _model(program, mode)
        with mode:
            watch = _OperatorWatch(list(_state(model)))
            with replaced(_ddp_by_hooks()):
                with watch, meshes_for_real():
                    returned = _attempt("`parallelize`", lambda: program.parallelize(model, mesh))
                runs = model if returned is None else returned
                _refuse_hooks(runs)
                batch = _part(_attempt("`batch()`", program.batch), mode, program, places)
                graph = _traced(runs, batch, program.step, rank, places, _spans(axes, rank))
            doubts = {name: watch.doubt(name, tensor, program.names) for name, tensor in _state(runs)}
            stored = {name: replace(held, doubt=doubts.get(name, "")) for name, held in graph.stored.items()}
            return replace(graph, stored=stored)


def trace_whole(program: ExternalProgram) -> RankGraph:
    """Return the graph of the plain model on the whole batch. Raises NotTraced."""
    mode = _fake_mode()
    model = _model(program, mode)
    with mode:
        batch = _part(_attempt("`batch()`", program.batch), mode, program, {})
        return _traced(model, batch, program.reference_step or program.step, WHOLE, {}, lambda name: None)


def _fake_mode() -> FakeTensorMode:
    start_autograd()  # before tensors are faked
    return FakeTensorMode(allow_non_fake_inputs=True)


def _model(program: ExternalProgram, mode: FakeTensorMode) -> nn.Module:
    """Make the plain model of fake tensors; what cannot be made of them is made for real, and its tensors replaced.

    Raises NotTraced.
    """
    made: nn.Module
    try:
        with mode:
            made = program.model()
        return made
    except Exception:  # noqa: BLE001 - it copies a model, or looks at values while it makes them
        made = _attempt("`model()`", program.model)
    fakes: dict[int, Tensor] = {}  # by tensor, so that tied ones stay one
    alive = []

    def fake(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        return fakes.setdefault(id(tensor), _faked(tensor, mode))

    for module in made.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for held in holders:
            for name, value in list(held.items()):
                if isinstance(value, Tensor):
                    held[name] = fake(value)
    return made


def _faked(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    found = mode.from_tensor(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, requires_grad=tensor.requires_grad)
    return found.requires_grad_(tensor.requires_grad)


class _OperatorWatch(TorchDispatchMode):
    """Watches what `parallelize` does to the model's tensors: a proof is about values, and begins with the model's.

    `state`: the model's, which stays alive, so that its storages are no others'. What DTensor makes of a parameter is
    taken as it says.
    """

    def __init__(self, state: Sequence[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.wrote = state, dict[str, str]()
        self.names: dict[int, set[str]] = {}
        for name, tensor in state:
            self.names.setdefault(storage_of(tensor), set()).add(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        given = kwargs or {}
        if func.namespace == "aten" and func._schema.is_mutable:
            for tensor in written(func, arguments_of(func, args, given)):
                self.wrote |= dict.fromkeys(self.names.get(storage_of(tensor), ()), str(func))
        return func(*args, **given)

    def doubt(self, name: str, tensor: Tensor, names: Mapping[str, str]) -> str:
        """Return why a tensor of the program may not hold the model's values; empty where it is the model's own."""
        own = names.get(name, clean_name(name))
        if own in self.wrote:
            return f"`parallelize` writes to `{own}` ({self.wrote[own]})"
        if isinstance(tensor, DTensor):
            return ""
        origin = self.names.get(storage_of(tensor))
        if origin is None:
            return f"`{name}` is a tensor that `parallelize` makes: whether it holds the model's values is not seen"
        return "" if own in origin else f"`{name}` is the model's `{min(origin)}`"


def storage_of(tensor: Tensor) -> int:
    """Return what tells a tensor's storage from others; for a DTensor, that of the rank's part."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


def _attempt(what: str, call: Callable[[], Any]) -> Any:
    """Return what the author's function returns. Raises NotTraced for whatever it raises."""
    try:
        return call()
    except NotTraced:
        raise
    except Exception as error:
        raise NotTraced(f"{what} raises on fake tensors: {in_one_line(error)}") from error


_OF_DDP = frozenset(  # arguments that do not change what its reducer computes
    "module device_ids output_device dim broadcast_buffers init_sync process_group bucket_cap_mb check_reduction "
    "find_unused_parameters gradient_as_bucket_view static_graph".split()
)


def _ddp_by_hooks() -> list[tuple[Any, str, Any]]:
    """Return what stands for DistributedDataParallel in a trace, whose reducer is no operator: a hook on each parameter
    that averages its gradient over the group, as the reducer is documented to do once the wrapper was called."""
    signature = inspect.signature(DistributedDataParallel.__init__)

    def wrap(self: Any, *args: Any, **named: Any) -> None:
        given = signature.bind(self, *args, **named).arguments
        given.pop("self")
        if not _OF_DDP.issuperset(given):
            refuse()
        nn.Module.__init__(self)
        self.module, self.called = given["module"], False
        group: Any = given.get("process_group") or dist.group.WORLD
        ignored = set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))

        def average(parameter: Tensor) -> None:
            if self.called and parameter.grad is not None:
                parameter.grad.copy_(collectives.all_reduce(parameter.grad, "avg", group))

        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                parameter.register_post_accumulate_grad_hook(average)

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        self.called = self.called or torch.is_grad_enabled()
        return self.module(*args, **named)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotTraced(
            "DistributedDataParallel's reducer is no operator that a trace sees, and is told to do more than average: "
            "run the program instead"
        )

    others = ("register_comm_hook", "_register_builtin_comm_hook", "_register_fused_optim", "no_sync", "join")
    own = {"__init__": wrap, "forward": forward} | dict.fromkeys(others, refuse)
    return [(DistributedDataParallel, name, value) for name, value in own.items()]


def _refuse_hooks(runs: Any) -> None:
    """Raise NotTraced for what works by hooks that are no operators."""
    if not isinstance(runs, nn.Module):
        raise NotTraced(f"`parallelize` returns a {type(runs).__name__}, which is no module: it cannot be traced")
    for name, module in runs.named_modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            kind = "FSDP2's" if isinstance(module, FSDPModule) else f"{type(module).__name__}'s"
            raise NotTraced(
                f"{kind} hooks move parameters outside of the operators that a trace sees"
                f" (at {name or 'the module itself'}): run the program instead"
            )


def _part(batch: Any, mode: FakeTensorMode, program: ExternalProgram, places: Mapping[str, int]) -> Any:
    """Return the rows that the rank's step sees, as fake tensors. Without `places`: all of them."""
    sizes = dict(program.mesh)
    axes = [axis for axis in sizes if axis in program.data_axes and places]
    parts = prod(sizes[a] for a in axes)
    index = 0
    for axis in axes:
        index = index * sizes[axis] + places[axis]

    rows = row_count(batch)

    def part(value: Tensor) -> Tensor:
        fake = value if _is_fake(value, mode) else mode.from_tensor(value)
        if parts == 1 or fake.ndim == 0 or fake.shape[0] != rows:
            return fake
        if rows % parts:
            raise NotTraced(f"the {rows} rows of `batch()` do not divide into {parts} parts")
        return fake[index * (rows // parts) : (index + 1) * (rows // parts)].clone()

    return map_tensors(batch, part)


def _is_fake(value: Tensor, mode: FakeTensorMode) -> bool:
    return getattr(value, "fake_mode", None) is mode


def _spans(axes: tuple[Axis, ...], rank: int) -> Spans:
    """Return what names the axes along which the ranks of a group lie, through this rank; None where it is no such."""
    lines: dict[tuple[int, ...], tuple[str, ...]] = {}
    strides = [prod(a.size for a in axes[i + 1 :]) for i in range(len(axes))]
    for chosen in range(1, 2 ** len(axes)):
        members = [rank]
        for i, axis in enumerate(axes):
            if chosen >> i & 1:
                members = [
                    m + (c - m // strides[i] % axis.size) * strides[i] for m in members for c in range(axis.size)
                ]
        picked = tuple(a.name for i, a in enumerate(axes) if chosen >> i & 1 and a.size > 1)
        lines.setdefault(tuple(members), picked)
    return lambda name: lines.get(tuple(group_ranks(name)))


def _traced(
    runs: nn.Module, batch: Any, step: Callable[[Any, Any], Any], rank: int, places: Mapping[str, int], spans: Spans
) -> RankGraph:
    recorder = GraphRecorder()
    inputs = {}
    for path, leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            inputs[path] = recorder.given(leaf, f"batch {path}")
    stored = {name: _held(recorder, tensor, spans, f"stored {name}") for name, tensor in _state(runs)}
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(recorder)
        loss = _attempt("the step", lambda: step(runs, batch))
        if isinstance(loss, Tensor) and loss.requires_grad:
            _attempt("the backward pass", loss.backward)
    gradients = {
        name: _held(recorder, tensor.grad, spans)
        for name, tensor in _state(runs)
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None
    }
    found = _held(recorder, loss, spans) if isinstance(loss, Tensor) else None
    after = {name: _held(recorder, tensor, spans) for name, tensor in _state(runs)}
    changed = {name: held for name, held in after.items() if name not in stored or held.ref != stored[name].ref}
    named = {a for c in recorder.calls for a in c.arguments.values() if isinstance(a, str)}
    groups = {name: spans(name) for name in sorted(named) if _is_group(name)} if places else {}
    return pruned(RankGraph(rank, places, tuple(recorder.calls), stored, inputs, found, gradients, changed, groups))


def _is_group(name: str) -> bool:
    try:
        group_ranks(name)
    except (RuntimeError, ValueError, KeyError):
        return False
    return True


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, stored ones or not; a tied one under each of its names."""
    return ((clean_name(name), tensor) for name, tensor, _ in state_of(module))


def _held(recorder: GraphRecorder, tensor: Tensor, spans: Spans, name: str = "") -> HeldInGraph:
    local, placements = tensor, None
    axes: tuple[tuple[str, ...] | None, ...] = ()
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        local, placements = tensor._local_tensor, tensor.placements
        axes = tuple(spans(mesh.get_group(d).group_name) for d in range(mesh.ndim))
    ref = recorder.given(local, name) if name else recorder.read(local)
    return HeldInGraph(ref, placements, axes, tuple(tensor.shape))
