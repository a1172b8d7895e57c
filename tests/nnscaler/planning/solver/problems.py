"""Random choice problems of the shapes that models have, and their optimum by trying everything."""

from __future__ import annotations

from math import inf

import numpy as np

from nnscaler.planning.solver.problem import ChoiceProblem, Edge, Node, Table

SHAPES = ("chain", "tree", "skips", "hub", "layers")


def random_problem(seed: int, shape: str, memory: bool = False) -> ChoiceProblem:
    """At most about 60,000 joint choices; a few entries are forbidden, but one choice is always legal."""
    random = np.random.default_rng([seed, SHAPES.index(shape)])
    if shape == "layers":
        return layered(random, layers=int(random.integers(3, 6)), interior=1, most=3, hubs=seed % 2, memory=memory)
    sizes: list[int] = []
    while np.prod(sizes, initial=1.0) < 8_000:
        sizes.append(int(random.integers(2, 7)))
    legal = [int(random.integers(size)) for size in sizes]
    nodes = [_node(random, f"n{i}", size, legal[i], memory) for i, size in enumerate(sizes)]
    return ChoiceProblem(
        tuple(nodes), tuple(_edge(random, sizes, legal, pair) for pair in _pairs(random, shape, len(sizes)))
    )


def layered(
    random: np.random.Generator,
    layers: int,
    interior: int,
    most: int,
    hubs: int = 0,
    memory: bool = False,
    period: int = 1,
    cuts: int = 1,
) -> ChoiceProblem:
    """`layers` layers of `interior` + `cuts` nodes behind `hubs` hub nodes and a first node, and before a last one.

    Every layer reads the one before in its first interior node and, as a residual, in its last nodes. Layers repeat
    with `period`, and share their arrays.
    """
    size = interior + cuts
    hub_sizes = [int(random.integers(2, most + 1)) for _ in range(hubs)]
    out = [int(random.integers(2, most + 1)) for _ in range(cuts)]
    kinds = []
    for _ in range(period):
        sizes = [*(int(random.integers(2, most + 1)) for _ in range(interior)), *out]
        legal = [*(int(random.integers(k)) for k in sizes[:interior]), *(0 for _ in out)]
        nodes = [_node(random, f"k{i}", k, legal[i], memory) for i, k in enumerate(sizes)]
        inner = {(i, i + 1): _table(random, sizes, legal, (i, i + 1)) for i in range(size - 1)}
        residual = {
            (interior + c, d): _table(random, [*out, *sizes], [*(0 for _ in out), *legal], (c, cuts + d))
            for c in range(cuts)
            for d in (0, interior + c)
        }
        hub = {(h, 0): _table(random, [*hub_sizes, *sizes], [0] * hubs + legal, (h, hubs)) for h in range(hubs)}
        kinds.append((nodes, inner, residual, hub))
    nodes = [_node(random, f"hub{h}", k, 0, memory) for h, k in enumerate(hub_sizes)]
    nodes += [_node(random, f"first{c}", k, 0, memory) for c, k in enumerate(out)]
    edges: list[Edge] = []
    before = hubs - interior  # as if the first nodes were the last ones of a layer
    for layer in range(layers):
        base = len(nodes)
        parts, inner, residual, hub = kinds[layer % period]
        nodes += [Node(f"l{layer}.{part.name}", part.cost, part.memory, layer) for part in parts]
        edges += [Edge(base + a, base + b, table) for (a, b), table in inner.items()]
        edges += [Edge(before + a, base + b, table) for (a, b), table in residual.items()]
        edges += [Edge(h, base + b, table) for (h, b), table in hub.items()]
        before = base
    nodes.append(_node(random, "last", 3, 0, memory))
    last = _table(random, [out[-1], 3], [0, 0], (0, 1))
    return ChoiceProblem(tuple(nodes), (*edges, Edge(len(nodes) - 2, len(nodes) - 1, last)))


def joint_tables(problem: ChoiceProblem) -> tuple[Table, Table]:
    """The value and the memory of every joint choice, one axis per node."""
    count = len(problem.nodes)
    value, memory = np.zeros(()), np.zeros(())
    for index, node in enumerate(problem.nodes):
        shape = [1] * count
        shape[index] = len(node.cost)
        value = value + node.cost.reshape(shape)
        memory = memory + (np.zeros(len(node.cost)) if node.memory is None else node.memory).reshape(shape)
    for edge in problem.edges:
        shape = [1] * count
        shape[edge.first], shape[edge.second] = edge.cost.shape
        table = edge.cost if edge.first < edge.second else edge.cost.T
        value = value + table.reshape(shape)
    return value, memory


def _pairs(random: np.random.Generator, shape: str, count: int) -> list[tuple[int, int]]:
    if shape == "tree":
        return [(int(random.integers(i)), i) for i in range(1, count)]
    chain = [(i, i + 1) for i in range(count - 1)]
    if shape == "skips":
        return chain + [(i + 2, i) for i in range(0, count - 2, 2)] + [(0, 1)]
    if shape == "hub":
        return chain + [(i, count - 1) for i in range(count - 2)]
    return chain


def _node(random: np.random.Generator, name: str, size: int, legal: int, memory: bool) -> Node:
    cost = random.random(size)
    cost[(random.random(size) < 0.05) & (np.arange(size) != legal)] = inf
    return Node(name, cost, np.round(random.random(size) * 100) if memory else None)


def _table(random: np.random.Generator, sizes: list[int], legal: list[int], pair: tuple[int, int]) -> Table:
    first, second = pair
    table = random.random((sizes[first], sizes[second]))
    forbidden = random.random(table.shape) < 0.1
    forbidden[legal[first], legal[second]] = False
    table[forbidden] = inf
    return table


def _edge(random: np.random.Generator, sizes: list[int], legal: list[int], pair: tuple[int, int]) -> Edge:
    return Edge(*pair, _table(random, sizes, legal, pair))
