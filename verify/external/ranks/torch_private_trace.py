"""All that traces and profiles use of operators, DTensor, autograd and fake tensors and is not public, in one place;
each is pinned by a test.

Checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verify.external.ranks.torch_private import forget_meshes

_C10D: Any = c10d  # names that it does not export
_MESH: Any = DeviceMesh


# -- one rank of a world that is not there ----------------------------------------------------------------------------


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be one rank of `size`, with collectives that do nothing, until the end.

    Raises RuntimeError where groups exist.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers its backend when imported

    if dist.is_initialized():
        raise RuntimeError("process groups exist already")
    forget_meshes()
    forget_shardings()  # what was found for another rank holds that rank's mesh, which is equal to this one's
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        forget_meshes()
        forget_shardings()
        dist.destroy_process_group()


def has_sharding_rule(operator: Any) -> bool:
    """Return whether DTensor knows how to divide an operator. torch 2.11 to 2.13."""
    propagator = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher.sharding_propagator
    names = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
    return any(operator in getattr(propagator, name, ()) for name in names)


def attention_rings() -> Any:
    """Return the module in which torch computes attention over shards of a sequence: `custom_ops`, operator -> what
    computes it while a program is in `context_parallel`; two functions that pass keys and values around, given the
    kernel; `_cp_options`, whether sums are rounded to float32. torch 2.11 to 2.13."""
    return importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")


@contextmanager
def meshes_for_real() -> Iterator[None]:
    """While open, meshes are made of real numbers although tensors are fake: torch reads ranks from them."""
    from torch.utils._python_dispatch import _disable_current_modes

    places: Any = ((dist, "init_device_mesh"), (dist.device_mesh, "init_device_mesh"), (_MESH, "__init__"))

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **named)

        return call

    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(patch.object(owner, name, real(getattr(owner, name))))
        yield


def forget_shardings() -> None:
    """Empty the caches of DTensor's sharding rules, in Python and in C++."""
    debug: Any = sys.modules.get("torch.distributed.tensor.debug")
    if debug is None:
        from torch.distributed.tensor import debug
    debug._clear_sharding_prop_cache()


def group_ranks(name: str) -> list[int]:
    """Return the global ranks of the process group of this name."""
    return list(dist.get_process_group_ranks(_C10D._resolve_process_group(name)))


def autograd_sequence_number() -> int:
    """Return the number that the next autograd node of this thread will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def current_autograd_node() -> Any:
    """Return the autograd node whose backward runs; None outside of a backward pass."""
    return torch._C._current_autograd_node()


def unboxed(value: Any) -> str:
    """Return the name of the process group, or the reduction ("sum"), given to an operator of `c10d`; else its type."""
    kind = str(value._type())
    if "ProcessGroup" in kind:
        return str(dist.ProcessGroup.unbox(value).group_name)
    if "ReduceOp" in kind:
        names = {int(cast(Any, number)): name for name, number in dist.ReduceOp.RedOpType.__members__.items()}
        return names[int(value.op())].lower()
    return kind


# -- what DTensor does on its own -------------------------------------------------------------------------------------

_watching = threading.local()


@contextmanager
def watch_redistributions(note: Callable[[str], None]) -> Iterator[None]:
    """While open, tell `note` each operator for which DTensor brings an operand of this thread to another layout."""
    from torch.distributed.tensor._dispatch import OpDispatcher

    dispatcher: Any = OpDispatcher
    if not hasattr(dispatcher, "_nnscaler_watched"):  # once in a process: other ranks' threads may be inside of it
        dispatcher.redistribute_local_args = staticmethod(_watched(dispatcher.redistribute_local_args))
        dispatcher._nnscaler_watched = True
    before = getattr(_watching, "note", None)
    _watching.note = note
    try:
        yield
    finally:
        _watching.note = before


def _watched(original: Callable[..., None]) -> Callable[..., None]:
    def redistribute_local_args(op_info: Any, suggested: Any, *rest: Any, **named: Any) -> None:
        note = getattr(_watching, "note", None)
        if note is not None:
            wanted = suggested.args_schema
            if op_info.args_tree_spec is not None:
                wanted = torch.utils._pytree.tree_leaves(wanted)
            pairs = zip(op_info.flat_args_schema, wanted, strict=False)
            moved = [(a, b) for a, b in pairs if hasattr(a, "placements") and hasattr(b, "placements") and a != b]
            for given, asked in moved:
                note(f"{suggested.op} from {tuple(given.placements)} to {tuple(asked.placements)}")
        original(op_info, suggested, *rest, **named)

    return redistribute_local_args


def new_fake_tensor(
    mode: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a fake tensor in memory of its own."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    with in_kernel_invocation_manager(mode):
        made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, made, device)


def new_fake_view(
    mode: Any, of: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, device: torch.device
) -> Tensor:
    """Return a fake tensor in the memory of another one."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    with in_kernel_invocation_manager(mode):
        made = torch.as_strided(of, shape, strides, offset)
    return made if isinstance(made, FakeTensor) else FakeTensor(mode, made, device)
