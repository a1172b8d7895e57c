"""The roofline on calls whose work is known."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose, prod

import pytest

from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.cluster.description import Cluster
from nnscaler.planning.cost.analytic import EFFICIENCY, AnalyticCost
from nnscaler.planning.cost.flops_and_memory_traffic import Work, shard_sizes, shard_work

Make = Callable[..., Signature]


def test_a_product_and_its_shards(make: Make, cluster: Cluster) -> None:
    m, k, n = 4096, 2048, 1024
    product = make("aten.mm.default", [(m, k), (k, n)], (m, n))
    forward, backward = shard_work(product, [(m, k), (k, n)], [(m, n)], "float32")
    assert forward == Work(2.0 * m * k * n, 4.0 * (m * k + k * n + m * n))
    # both inputs are read again, the gradient of the result is read, and those of the inputs are written
    assert backward == Work(4.0 * m * k * n, 4.0 * (2 * (m * k + k * n) + m * n))
    for inputs, output in ([(m // 2, k), (k, n)], (m // 2, n)), ([(m, k // 2), (k // 2, n)], (m, n)):
        assert shard_work(product, inputs, [output], "float32")[0].flops == forward.flops / 2
    whole = AnalyticCost(cluster).compute(product, [(m, k), (k, n)], [(m, n)], "float32")
    assert isclose(whole[0], forward.flops / (EFFICIENCY * 1e13)) and isclose(whole[1], 2 * whole[0])
    half = AnalyticCost(cluster).compute(product, [(m, k), (k, n)], [(m, n)], "bfloat16")
    assert isclose(half[0], whole[0] / 10)


def test_elementwise_is_bound_by_memory(make: Make, cluster: Cluster) -> None:
    gelu = make("aten.gelu.default", [(1000, 1000)], (1000, 1000))
    forward, backward = AnalyticCost(cluster).compute(gelu, [(1000, 1000)], [(1000, 1000)], "float32")
    assert isclose(forward, 8e6 / (EFFICIENCY * 1e12)) and isclose(backward, 12e6 / (EFFICIENCY * 1e12))


def test_views_and_gradients_that_pass_are_free(make: Make, cluster: Cluster) -> None:
    cost = AnalyticCost(cluster)
    view = make("aten.reshape.default", [(6, 35)], (6, 5, 7), [6, 5, 7])
    assert cost.compute(view, [(6, 35)], [(6, 5, 7)], "float32") == (0.0, 0.0)
    shape = (6, 5)
    add = make("aten.add.Tensor", [shape, shape], shape)
    assert cost.compute(add, [shape, shape], [shape], "float32")[1] == 0
    bias = make("aten.add.Tensor", [shape, (5,)], shape)
    assert shard_work(bias, [shape, (5,)], [shape], "float32")[1] == Work(0.0, 4.0 * (30 + 5))


def test_an_embedding_reads_rows_and_indices_have_no_gradient(make: Make) -> None:
    table, rows = (5000, 64), (3, 7)
    embedding = make("aten.embedding.default", [table, (rows, "int64")], (3, 7, 64))
    forward, backward = shard_work(embedding, [table, rows], [(3, 7, 64)], "float32")
    assert forward == Work(0.0, 2 * 4.0 * 21 * 64 + 8 * 21)
    assert backward.bytes >= 4 * prod(table)  # its gradient is dense
    half, _ = shard_work(embedding, [table, rows], [(3, 7, 64)], "bfloat16")
    assert half == Work(0.0, 2 * 2.0 * 21 * 64 + 8 * 21)


def test_no_gradient_of_whole_numbers(make: Make) -> None:
    add = make("aten.add.Tensor", [((3,), "int64"), ((3,), "int64")], (3,), dtype="int64")
    assert shard_work(add, [(3,), (3,)], [(3,)], "float32") == (Work(0.0, 72.0), Work())


def test_attention_by_heads_and_rows(make: Make) -> None:
    q, k = (2, 8, 96, 16), (2, 8, 128, 16)
    attention = make("aten.scaled_dot_product_attention.default", [q, k, k], q)
    flops = 4 * 2 * 8 * 96 * 128 * 16
    forward, backward = shard_work(attention, [q, k, k], [q], "float32")
    assert forward.flops == flops and backward.flops == 2.5 * flops
    local, keys = (2, 2, 96, 16), (2, 2, 128, 16)
    assert shard_work(attention, [local, keys, keys], [local], "float32")[0].flops == flops / 4
    rows = (2, 8, 24, 16)
    assert shard_work(attention, [rows, k, k], [rows], "float32")[0].flops == flops / 4


def test_sizes_of_a_shard_with_dims_of_several_factors(make: Make) -> None:
    join = make("aten.reshape.default", [(6, 35)], (6, 5, 7), [6, 5, 7])
    sizes = shard_sizes(join, [(2, 7)], [(2, 1, 7)])
    assert sorted(sizes.values()) == [1, 2, 7]


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_smaller_shards_take_less(make: Make, cluster: Cluster, factor: int) -> None:
    cost = AnalyticCost(cluster)
    linear = make("aten.linear.default", [(64, 512), (256, 512), (256,)], (64, 256))
    whole = cost.compute(linear, [(64, 512), (256, 512), (256,)], [(64, 256)], "float32")
    part = 256 // factor
    shard = cost.compute(linear, [(64, 512), (part, 512), (part,)], [(64, part)], "float32")
    assert shard[0] < whole[0] and shard[1] < whole[1]


def test_identity_follows_the_cluster(cluster: Cluster) -> None:
    assert AnalyticCost(cluster).identity == AnalyticCost(cluster).identity
    assert AnalyticCost(cluster).identity != AnalyticCost(cluster.scaled(8)).identity
