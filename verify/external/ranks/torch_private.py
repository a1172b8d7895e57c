"""All that the executors use of torch's process groups and is not public, in one place; each is pinned by a test.

What is read of operators, DTensor and fake tensors is in `torch_private_trace`. Checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional  # its defaults hold the default group of whoever imports it first: nobody's
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules import module as torch_module

BACKEND = "nnscaler_ranks"
# classes of C++ that Python may subclass, though torch's stubs do not say so
ProcessGroup: Any = dist.ProcessGroup
Work: Any = c10d.Work
Store: Any = c10d.Store
FileStore: Any = torch._C._distributed_c10d.FileStore
_C10D: Any = c10d  # names that it does not export
_C10D_CPP: Any = torch._C._distributed_c10d
_MESH: Any = DeviceMesh
_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)


# -- a default group for each thread ----------------------------------------------------------------------------------


class RankWorlds:
    """Stands for `distributed_c10d._world`: every thread of a rank sees its rank's groups, other threads torch's own.

    The class `_World` itself cannot be used for each rank: it keeps its state in globals of its module. Where this
    process is one rank, all threads see torch's own, and `rank` is what we know of it.
    """

    def __init__(self, original: Any, create: Callable[[Any], Any], rank: SimpleNamespace | None) -> None:
        object.__setattr__(self, "_original", original)
        object.__setattr__(self, "_here", threading.local())
        object.__setattr__(self, "create", create)
        object.__setattr__(self, "_rank", rank)

    def enter(self, world: SimpleNamespace) -> None:
        """Give the current thread the groups in `world`."""
        self._here.world = world

    def leave(self) -> None:
        """Give the current thread torch's own groups again."""
        del self._here.world

    def world(self) -> SimpleNamespace | None:
        """Return the world of the current thread; None where it sees torch's own."""
        return getattr(self._here, "world", None)

    def rank(self) -> SimpleNamespace | None:
        """Return what we know of the current rank (`store`, `rank`, `ranks`, `identity`); None outside of ranks."""
        world = self.world()
        return self._rank if world is None else world

    def __getattr__(self, name: str) -> Any:
        world = self.world()
        return getattr(self._original if world is None else world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        world = self.world()
        setattr(self._original if world is None else world, name, value)


def new_world(**facts: Any) -> SimpleNamespace:
    """Return the state of torch.distributed of a rank that has no groups yet; `facts` are ours."""
    return SimpleNamespace(
        default_pg=None,
        pg_map={},
        pg_names={},
        pg_group_ranks={},
        pg_backend_config={},
        group_count=0,
        tags_to_pg={},
        pg_to_tag={},
        pg_coalesce_state={},
        comms=[],
        pg_config_info=[],
        **facts,
    )


def current_worlds() -> RankWorlds | None:
    """Return what stands for torch's groups while ranks run; None at other times."""
    worlds = c10d._world
    return worlds if isinstance(worlds, RankWorlds) else None


@contextmanager
def ranks_as_threads(create: Callable[[Any], Any]) -> Iterator[RankWorlds]:
    """Let threads be ranks, each with groups of its own, made as `our_groups` says."""
    with our_groups(create, None) as worlds:
        _C10D_CPP._set_thread_isolation_mode(True)
        try:
            yield worlds
        finally:
            _C10D_CPP._set_thread_isolation_mode(False)


@contextmanager
def our_groups(create: Callable[[Any], Any], rank: SimpleNamespace | None) -> Iterator[RankWorlds]:
    """Make every group of ranks by `create(options)`, whatever backend a program asks for.

    create  is told `group_id`, `group_rank`, `group_size`, `store`, `timeout` and `global_ranks_in_group` (empty for
            the default group)
    rank    what we know of this process, if it is one rank: `store`, `rank`, `ranks` and `identity`

    Ranks find each other through `store`, whatever address they ask for. `get_backend` says what the program asked for,
    and "gloo" where it asked for none.
    """
    _register(BACKEND)
    worlds = RankWorlds(_C10D._world, create, rank)
    make_group, meet, hook = _C10D._new_process_group_helper, _C10D.rendezvous, sys.excepthook
    initialise_mesh = _MESH.__init__

    def new_group(size: int, rank: int, members: Any, backend: Any, *rest: Any, **options: Any) -> Any:
        if worlds.rank() is None:
            return make_group(size, rank, members, backend, *rest, **options)
        group, store = make_group(size, rank, members, _C10D.Backend(BACKEND), *rest, **options)
        if group in worlds.pg_map:
            asked = "gloo" if str(backend) in ("undefined", BACKEND) else backend
            worlds.pg_map[group] = (asked, store)
        return group, store

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
        here = worlds.rank()
        if here is None:
            yield from meet(url, rank, world_size, **options)
        else:
            yield here.store, here.rank, here.ranks

    def new_mesh(self: Any, *arguments: Any, **options: Any) -> None:
        initialise_mesh(self, *arguments, **options)
        here = worlds.world()
        if here is not None:  # equal meshes of two ranks, or of two runs, would share what torch caches of them
            self._thread_id, self._hash = here.identity, None

    _C10D._world = worlds
    _C10D._new_process_group_helper, _C10D.rendezvous = new_group, rendezvous
    _MESH.__init__ = new_mesh
    try:
        yield worlds
    finally:
        _MESH.__init__ = initialise_mesh
        _C10D._new_process_group_helper, _C10D.rendezvous = make_group, meet
        _C10D._world = worlds._original
        sys.excepthook = hook  # every init_process_group wraps it once more
        forget_meshes()


def _register(name: str) -> None:
    """Make a backend of this name known to torch. Whoever runs as a rank is asked for its groups."""
    if not hasattr(dist.Backend, name.upper()):

        def create(options: Any, _: Any) -> dist.ProcessGroup:
            worlds = current_worlds()
            assert worlds is not None, "this backend is for ranks"
            return cast(dist.ProcessGroup, worlds.create(options))

        dist.Backend.register_backend(name, cast(Any, create), extended_api=True, devices=["cpu"])


def forget_meshes() -> None:
    """Empty the caches in which torch keeps what it knows of device meshes, which hold their groups."""
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribute is not None:
        for name in ("_gen_transform_infos", "clear_redistribute_planner_cache"):
            found = getattr(redistribute, name, None)
            if found is not None:
                getattr(found, "cache_clear", found)()


def register_groups_here(world: SimpleNamespace) -> None:
    """Let functional collectives of the current thread find the groups of its rank by their names."""
    for group, name in world.pg_names.items():
        torch._C._distributed_c10d._register_process_group(name, group)


def preload() -> None:
    """Import what most parallel programs need, before ranks are forked: each would take seconds for it.

    Functional collectives ask `torch._dynamo`, at their first call, whether they are being traced.
    """
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"):
        importlib.import_module(name)


def gloo_group(store: Any, place: int, size: int, timeout: Any) -> Any:
    """Return torch's own group over gloo."""
    group: Any = _C10D_CPP.ProcessGroup(store, place, size)
    backend = _C10D_CPP.ProcessGroupGloo(store, place, size, timeout=timeout)
    kind = _C10D_CPP.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def bare_gloo(store: Any, place: int, size: int, timeout: Any) -> Any:
    """Return torch's backend over gloo without a group, for processes that are no ranks of each other."""
    return _C10D_CPP.ProcessGroupGloo(store, place, size, timeout)


def check_peer(peer: int, size: int) -> None:
    """Check that a message goes to or comes from a rank that is there, or any (below 0). Raises ValueError.

    torch checks no rank of the default group, and gloo writes past its ends, or waits for ever.
    """
    if peer >= size:
        ranks = "one rank" if size == 1 else f"{size} ranks"
        raise ValueError(f"a message to or from rank {peer}, in a group of {ranks}")


def checked_messages() -> list[tuple[Any, str, Any]]:
    """Return what stands for the messages of torch's own groups: (owner, attribute, value)."""

    def checked(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(group: Any, tensors: Any, peer: int, tag: int) -> Any:
            check_peer(peer, group.size())
            return method(group, tensors, peer, tag)

        return called

    return [(ProcessGroup, name, checked(getattr(ProcessGroup, name))) for name in ("send", "recv")]


# -- facts of collectives ---------------------------------------------------------------------------------------------


def premultiplier(operation: Any) -> float | Tensor:
    """Return the factor of a PREMUL_SUM."""
    return cast("float | Tensor", operation.__getstate__()[1])


def unwaited_collectives() -> int:
    """Return how many functional collectives of this process, or of a rank's thread, nobody has waited for."""
    return int(torch._C._distributed_c10d._get_work_registry_size())


# -- what torch keeps per process, and a rank must have for itself ----------------------------------------------------


def rank_attributes() -> list[tuple[Any, str]]:
    """Return the (owner, attribute) that one rank changes while others run, by value or by what is in it.

    `loss_parallel` and `context_parallel` edit DTensor's handlers on entry and exit, `CommDebugMode` the hooks of all
    modules, and `context_parallel` replaces the attention function, and DTensor's table by a copy.
    """
    found: list[tuple[Any, str]] = [(torch_module, name) for name in _GLOBAL_HOOKS]
    found.append((torch.nn.functional, "scaled_dot_product_attention"))
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None:
        found.append((tensor.DTensor._op_dispatcher, "_custom_op_handlers"))
    for name in ("_context_parallel._attention", "_attention"):
        attention = sys.modules.get(f"torch.distributed.tensor.experimental.{name}")
        if attention is not None and tensor is not None:
            names = ("_replaced_functions", "_dispatch_mode", "_cp_options", "existing_custom_ops")
            found += [(attention, name) for name in names if hasattr(attention, name)]
    return found


def flat_shards(module: torch.nn.Module) -> dict[int, tuple[tuple[int, ...], range]]:
    """Return, for parameters that FullyShardedDataParallel has flattened and sharded, by `id`: the whole shape, and
    which elements of it come first in the local tensor. What follows them is padding."""
    found: dict[int, tuple[tuple[int, ...], range]] = {}
    for part in FullyShardedDataParallel.fsdp_modules(module):
        handle: Any = part._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        if flat._params is None:
            size, each = flat._unpadded_unsharded_size.numel(), flat._sharded_size.numel()
            first = min(handle.rank * each, size)
            found[id(flat)] = ((size,), range(first, min(first + each, size)))
            continue
        for parameter, shape, cut in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            places = range(cut.intra_param_start_idx, cut.intra_param_end_idx + 1) if cut.in_shard else range(0)
            found[id(parameter)] = (tuple(shape), places)
    return found


def resting_shards(module: torch.nn.Module) -> dict[int, Tensor]:
    """Return, for parameters that FSDP2 gathers for a time, by `id`: the shards in whose place they stand.

    A module has the gathered ones from its forward pass, or `unshard()`, until it reshards: after an evaluation, say.
    Optimizers hold the shards, and these get the gradients.
    """
    found: dict[int, Tensor] = {}
    for state in (part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)):
        one: Any = state
        groups = getattr(one, "_fsdp_param_groups", None)
        for group in [one._fsdp_param_group] if groups is None else groups:
            for parameter in [] if group is None else group.fsdp_params:
                gathered = (getattr(parameter, n, None) for n in ("_unsharded_param", "_sharded_post_forward_param"))
                found |= {id(tensor): parameter.sharded_param for tensor in gathered if tensor is not None}
    return found
