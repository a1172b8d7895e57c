"""What the executors use of torch that is not public is there, and does what they rely on."""

from __future__ import annotations

import inspect
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel

from nnscaler.runtime.start_autograd import start_autograd
from verify.external.ranks import torch_private as private
from verify.external.ranks import torch_private_trace as trace
from verify.external.ranks.run_ranks_here_or_in_child import run_ranks

COLLECTIVES = """
allreduce allreduce_coalesced reduce broadcast allgather allgather_coalesced _allgather_base
allgather_into_tensor_coalesced reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall
alltoall_base scatter gather barrier send recv recv_anysource
""".split()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_group_of_torch_has_the_methods_that_are_forwarded(name: str) -> None:
    assert callable(getattr(dist.ProcessGroup, name))


def test_the_world_has_no_attribute_that_a_rank_lacks() -> None:
    names = {name for name in dir(c10d._World) if not name.startswith("_")}
    assert names <= set(vars(private.new_world()))


def test_what_is_replaced_in_torch_is_called_by_its_module() -> None:
    assert "_new_process_group_helper(" in inspect.getsource(c10d.init_process_group)
    assert "_new_process_group_helper(" in inspect.getsource(c10d._new_group_with_tag)
    assert "rendezvous(" in inspect.getsource(c10d.init_process_group)
    parameters = list(inspect.signature(c10d._new_process_group_helper).parameters)
    assert parameters[:4] == ["group_size", "group_rank", "global_ranks_in_group", "backend"]


def test_everything_is_put_back() -> None:
    def state() -> tuple[object, ...]:
        return c10d._world, c10d._new_process_group_helper, c10d.rendezvous, DeviceMesh.__init__, sys.excepthook

    before = state()
    run_ranks(lambda _: dist.barrier(), 2)
    assert state() == before
    assert private.current_worlds() is None


def test_a_thread_sees_its_own_groups() -> None:
    worlds = private.RankWorlds(c10d._world, lambda _: None, None)
    worlds.enter(private.new_world(rank=1))
    worlds.group_count = 5
    worlds.pg_map["group"] = "here"
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend([worlds.group_count, dict(worlds.pg_map)]))
    thread.start()
    thread.join()
    assert (worlds.group_count, worlds.pg_map) == (5, {"group": "here"})
    assert seen == [c10d._world.group_count, dict(c10d._world.pg_map)]
    worlds.leave()
    assert worlds.rank() is None


def test_a_process_that_is_one_rank_keeps_the_groups_of_torch() -> None:
    with private.our_groups(lambda _: None, SimpleNamespace(rank=3)) as worlds:
        assert worlds.rank().rank == 3
        assert worlds.pg_map is c10d._world._original.pg_map


def test_meshes_of_two_ranks_are_not_equal_and_have_other_hashes() -> None:
    meshes: dict[int, DeviceMesh] = {}

    def work(rank: int) -> tuple[bool, bool]:
        meshes[rank] = mesh = init_device_mesh("cpu", (2,))
        dist.barrier()
        again = init_device_mesh("cpu", (2,))
        return mesh == again, hash(mesh) == hash(again)

    assert run_ranks(work, 2).results == ((True, True), (True, True))
    assert meshes[0] != meshes[1]


def test_the_factor_of_a_sum_of_products() -> None:
    operation = dist._make_nccl_premul_sum(0.25)  # type: ignore[attr-defined]
    assert operation.op.name == "PREMUL_SUM"
    assert private.premultiplier(operation) == 0.25


def test_attributes_that_a_rank_changes_are_there() -> None:
    names = {name for _, name in private.rank_attributes()}
    assert {"_global_forward_hooks", "_global_forward_pre_hooks", "_custom_op_handlers"} <= names
    assert {"scaled_dot_product_attention", "_replaced_functions", "_dispatch_mode", "_cp_options"} <= names
    for owner, name in private.rank_attributes():
        getattr(owner, name)


def test_one_rank_is_inside_of_loss_parallel_while_another_is_not() -> None:
    def handlers() -> int:
        return len(DTensor._op_dispatcher._custom_op_handlers)

    outside = handlers()

    def work(rank: int) -> list[int]:
        if rank == 0:
            with loss_parallel():
                dist.barrier()
                found = [handlers()]
                dist.barrier()
            return [*found, handlers()]
        dist.barrier()
        found = [handlers()]
        dist.barrier()
        return [*found, handlers()]

    first, second = run_ranks(work, 2).results
    assert first[0] > outside
    assert second == [outside, outside]
    assert first[1] == handlers() == outside


def test_a_rank_in_context_parallel_keeps_the_handlers_of_its_loss_parallel() -> None:
    """Context parallelism puts a copy of DTensor's table in its place, and the table itself back at its end."""
    outside = dict(DTensor._op_dispatcher._custom_op_handlers)

    def work(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2,))
        with loss_parallel(), context_parallel(mesh, buffers=[torch.ones(4)], buffer_seq_dims=[0]):
            for _ in range(rank + 1):
                dist.barrier(mesh.get_group())
        inside = len(DTensor._op_dispatcher._custom_op_handlers)
        for _ in range(1 - rank):
            dist.barrier(mesh.get_group())
        return inside

    assert run_ranks(work, 2).results == (len(outside), len(outside))
    assert outside == DTensor._op_dispatcher._custom_op_handlers


def test_hooks_of_all_modules_are_a_rank_s_own() -> None:
    def work(rank: int) -> list[int]:
        called: list[int] = []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: called.append(rank))
        for _ in range(rank + 1):
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
        dist.barrier()
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        handle.remove()
        dist.barrier()
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        return called

    assert run_ranks(work, 2).results == ([0, 0], [1, 1, 1])


def test_each_rank_has_a_debug_mode() -> None:
    def work(rank: int) -> int:
        world = dist.group.WORLD
        assert world is not None
        with CommDebugMode() as mode:
            for _ in range(2):
                torch.nn.Linear(2, 2)(torch.ones(1, 2))
                value = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", world.group_name)
                torch.ops._c10d_functional.wait_tensor(value)
        return int(mode.get_total_counts())

    assert run_ranks(work, 2).results == (2, 2)


def test_functional_collectives_find_the_group_of_their_thread() -> None:
    def work(rank: int) -> float:
        group = dist.new_group([0, 1])
        if rank == 2:
            return 0.0
        value = torch.ops._c10d_functional.all_reduce(torch.ones(1) + rank, "sum", group.group_name)
        return float(torch.ops._c10d_functional.wait_tensor(value))

    assert run_ranks(work, 3).results == (3.0, 3.0, 0.0)


def test_preloading_imports_what_collectives_ask_for() -> None:
    private.preload()
    assert "torch._dynamo" in sys.modules
    assert "torch.distributed.fsdp" in sys.modules


def test_processes_that_are_no_ranks_add_up_a_tensor(tmp_path: Path) -> None:
    results: dict[int, torch.Tensor] = {}

    def add(place: int) -> None:
        group = private.bare_gloo(private.FileStore(str(tmp_path / "store"), 2), place, 2, timedelta(seconds=20))
        results[place] = torch.tensor([1.0 + place])
        group.allreduce([results[place]]).wait()

    threads = [threading.Thread(target=add, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[place].item() for place in range(2)] == [3.0, 3.0]


def test_a_rank_of_a_world_that_is_not_there_has_its_meshes_and_groups() -> None:
    with trace.fake_world(5, 8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        assert (dist.get_rank(), mesh.get_coordinate()) == (5, (2, 1))
        assert trace.group_ranks(mesh.get_group("tp").group_name) == [4, 5]
        operator = torch.ops.aten.mm.default
        assert trace.has_sharding_rule(operator) and not trace.has_sharding_rule(object())
    assert not dist.is_initialized()


def test_what_dtensor_moves_on_its_own_is_told() -> None:
    told: list[str] = []

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        left = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        right = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
        with trace.watch_redistributions(told.append if rank == 0 else lambda move: None):
            left + right

    run_ranks(on_rank, 2)
    assert told and all("aten.add.Tensor from " in move for move in told)


def test_fake_tensors_are_made_in_memory_that_is_told() -> None:
    start_autograd()
    mode = FakeTensorMode()
    whole = trace.new_fake_tensor(mode, (4, 6), (6, 1), torch.float32, torch.device("cpu"))
    part = trace.new_fake_view(mode, whole, (2, 6), (6, 1), 12, torch.device("cpu"))
    assert (whole.shape, part.shape, part.storage_offset()) == ((4, 6), (2, 6), 12)
    assert whole.untyped_storage()._cdata == part.untyped_storage()._cdata


@pytest.mark.parametrize("original", [False, True])
def test_flattened_parameters_tell_their_elements(original: bool) -> None:
    def on_rank(rank: int) -> list[tuple[tuple[int, ...], range, bool]]:
        torch.manual_seed(0)
        plain = nn.Linear(3, 5)
        whole = {(5, 3): plain.weight.detach().flatten(), (5,): plain.bias.detach()}
        whole[20,] = torch.cat([plain.weight.detach().flatten(), plain.bias.detach()])
        made = FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=original)
        shards, found = private.flat_shards(made), []
        for parameter in made.parameters():
            shape, places = shards[id(parameter)]
            same = torch.equal(parameter.detach()[: len(places)], whole[shape][places.start : places.stop])
            found.append((shape, places, same))
        return found

    runs = run_ranks(on_rank, 3, "gloo").results
    assert all(same for run in runs for _, _, same in run)
    assert sorted(place for run in runs for shape, places, _ in run if shape == (5,) for place in places) == (
        [0, 1, 2, 3, 4] if original else []
    )
    assert sum(len(places) for run in runs for _, places, _ in run) == 20


def test_what_fsdp_has_gathered_stands_for_its_shards() -> None:
    def on_rank(rank: int) -> bool:
        made = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
        shards = list(made.parameters())
        made.unshard()
        gathered = list(made.parameters())
        resting = private.resting_shards(made)
        return not set(map(id, shards)) & set(map(id, gathered)) and [resting[id(p)] for p in gathered] == shards

    assert run_ranks(on_rank, 2).results == (True, True)


def test_autograd_numbers_its_nodes() -> None:
    number = trace.autograd_sequence_number()
    product = torch.ones(2, requires_grad=True) * 2
    assert trace.autograd_sequence_number() > number
    seen: list[object] = []
    product.register_hook(lambda _: seen.append(trace.current_autograd_node()))
    product.sum().backward()
    assert len(seen) == 1 and seen[0] is not None
    assert trace.current_autograd_node() is None
