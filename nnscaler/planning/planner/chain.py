"""A model of many equal layers as a chain of three pieces: what comes before the layers with the first one, one layer,
and the last one with what follows. The pieces meet in the nodes that neighbouring layers share, the cut.

A piece is eliminated for many prices of memory at once: the price is one more variable, which stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from nnscaler.ir.graph import Graph
from nnscaler.planning.planner.lean import Kept, lean
from nnscaler.planning.sharding.tables import Tables
from nnscaler.planning.solver.eliminate import Elimination, Factor, run_elimination, substitute
from nnscaler.planning.solver.order import Order, find_order
from nnscaler.planning.solver.problem import TooWide

WIDE = 64  # joint choices of a cut, and of hubs, that are worth it
PRICES = 320  # at which a piece may be eliminated at once

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Indices into tables: the `nodes` and `edges` whose costs it counts, those of them that lie in a layer, the nodes
    of the cuts `before` and `after` it, and the hubs that it reads."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    inside: frozenset[int]
    before: tuple[int, ...]
    after: tuple[int, ...]
    hubs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Chain:
    """`tables` have the operations of `shown`, and of each node the strategies `kept`, by number among all. `hubs`:
    nodes before the layers that several pieces read. `entry`: by joint choice of the cut after the head, that of a cut
    between layers which means the same. `orders`: in which the pieces are eliminated."""

    tables: Tables
    kept: Kept
    head: Piece
    layer: Piece
    tail: Piece
    hubs: tuple[int, ...]
    entry: tuple[int, ...]
    orders: tuple[Order, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(columns.forward) for columns in self.tables.columns)

    @property
    def handed(self) -> tuple[float, ...]:
        """By joint choice of a cut, the bytes of a micro-batch that go from one layer to the next."""
        columns = [self.tables.columns[node].handed for node in self.layer.after]
        return tuple(float(sum(joint)) for joint in product(*columns))

    @property
    def width(self) -> int:
        """Joint choices of a cut."""
        return prod(self.sizes[node] for node in self.layer.before)


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """A piece at many prices. `table`: the best value by choices of the hubs, of the cut before, of the cut after, and
    by price: [hubs, before, after, prices], where what is not there has size 1."""

    piece: Piece
    elimination: Elimination
    table: Numbers
    sizes: tuple[int, ...]
    entry: tuple[int, ...] = ()

    def choices(self, hubs: Sequence[int], before: int, after: int, price: int) -> dict[int, int]:
        """The best choice of each node for these choices (joint ones of the cuts) at the price of this number."""
        made = dict(zip(self.piece.hubs, hubs, strict=True))
        after = self.entry.index(after) if self.entry else after
        for nodes, joint in ((self.piece.before, before), (self.piece.after, after)):
            shape = tuple(self.sizes[node] for node in nodes)
            made.update(zip(nodes, map(int, np.unravel_index(joint, shape)), strict=True) if nodes else ())
        made[len(self.sizes)] = price
        substitute(self.elimination, made)
        return {node: made[node] for node in self.piece.nodes}

    def at_hubs(self, hubs: Sequence[int]) -> Numbers:
        """[before, after, prices]"""
        shape = tuple(self.sizes[node] for node in self.piece.hubs)
        found: Numbers = self.table[int(np.ravel_multi_index(tuple(hubs), shape)) if shape else 0]
        return found


def price(chain: Chain, piece: Piece, nodes: Mapping[int, Numbers]) -> Priced:
    """Eliminates a piece, whose nodes cost `nodes` [choices, prices], of which there are no more than PRICES."""
    sizes = chain.sizes
    number = len(sizes)  # of the price as a variable
    count = next(iter(nodes.values())).shape[1]
    tables = chain.tables
    factors = [Factor((node, number), nodes[node]) for node in piece.nodes]
    factors += [Factor((first, second), table) for first, second, table in (tables.edges[i] for i in piece.edges)]
    pieces = (chain.head, chain.layer, chain.tail)
    order = next(order for order, other in zip(chain.orders, pieces, strict=True) if other is piece)
    elimination = run_elimination(factors, order, (*sizes, count))
    shape = [prod(sizes[n] for n in nodes_) for nodes_ in (piece.hubs, piece.before, piece.after)]
    table = elimination.table().reshape(*shape, count)
    if piece is not chain.head:
        return Priced(piece, elimination, table, sizes)
    states = np.full((shape[0], shape[1], chain.width, count), np.inf)
    states[:, :, list(chain.entry)] = table
    return Priced(piece, elimination, states, sizes, chain.entry)


def _order(tables: Tables, piece: Piece) -> Order:
    """In which a piece is eliminated at PRICES prices. Raises TooWide."""
    sizes = tuple(len(columns.forward) for columns in tables.columns)
    number = len(sizes)
    scopes = [(node, number) for node in piece.nodes] + [tables.edges[i][:2] for i in piece.edges]
    keep = (*piece.hubs, *piece.before, *piece.after, number)
    return find_order(scopes, [node for node in piece.nodes if node not in keep], (*sizes, PRICES), keep=keep)


def shown(graph: Graph, groups: Mapping[str, int], layers: int) -> frozenset[str]:
    """The operations that a chain is made from: those outside of layers, of both ends and of one layer in the middle,
    and those of the layers next to these that share a tensor with them. `groups`: the layer of an operation."""
    model = layers // 2 + 1
    whole = frozenset((-1, 0, model, layers - 1))
    near = frozenset((1, model - 1, model + 1, layers - 2))
    kept = {op.name for op in graph.operations if groups.get(op.name, -1) in whole}
    shared = {
        name for op in graph.operations if groups.get(op.name, -1) in whole - {-1} for name in (*op.inputs, *op.outputs)
    }
    touching = {
        op.name
        for op in graph.operations
        if groups.get(op.name, -1) in near and not shared.isdisjoint((*op.inputs, *op.outputs))
    }
    return frozenset(kept | touching)


def find_chain(tables: Tables, items: Sequence[int], layers: int) -> Chain | None:
    """`items`: of every node, as `Subject.items` counts. None where the graph is no such chain, or where its pieces
    touch in too many choices, or have tables that are too wide."""
    groups, model = tables.groups, layers // 2 + 1
    inside: dict[int, list[int]] = {group: [] for group in range(layers)}
    for node, group in enumerate(groups):
        inside.setdefault(group, []).append(node)
    outside = inside.pop(-1, [])
    if any(1 < items[node] <= layers for node in outside):
        return None
    if any(abs(groups[a] - groups[b]) > 1 for a, b, _ in tables.edges if min(groups[a], groups[b]) >= 0):
        return None
    head = [*(n for n in outside if items[n] <= 1), *inside[0]]
    tail = [*inside[layers - 1], *(n for n in outside if items[n] > layers)]
    cut = {group: _touching(tables, inside[group], inside[group + 1]) for group in (0, model - 1, model, layers - 2)}
    looks = [[_look(tables, node) for node in cut[group]] for group in (model - 1, model, layers - 2)]
    entry = _entry([_look(tables, node) for node in cut[0]], looks[0])
    if not cut[model] or entry is None or any(look != looks[0] for look in looks):
        return None
    hubs = tuple(
        sorted(
            {
                end
                for pair in tables.edges
                for end, other in (pair[:2], pair[1::-1])
                if groups[end] < 0 and end in head and (other in tail or groups[other] > 0)
            }
        )
    )
    first = _piece(tables, head, (), cut[0], hubs)
    layer = _piece(tables, inside[model], cut[model - 1], cut[model], hubs)
    last = _piece(tables, tail, cut[layers - 2], (), hubs)
    if first is None or layer is None or last is None:
        return None
    pieces = (first, layer, last)
    shared = {node for piece in pieces for node in (*piece.before, *piece.after, *hubs)}
    inner = {node for piece in pieces for node in piece.nodes} - shared
    smaller, kept = lean(tables, set(range(len(tables.names))) - inner)
    width, choices = (prod(len(smaller.columns[node].forward) for node in nodes) for nodes in (layer.before, hubs))
    if width > WIDE or choices > WIDE:
        return None
    try:
        orders = tuple(_order(smaller, piece) for piece in pieces)
    except TooWide:
        return None
    return Chain(smaller, kept, *pieces, hubs, entry, orders)


def _touching(tables: Tables, nodes: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    """The nodes that share an edge with one of the others."""
    here, there = set(nodes), set(others)
    pairs = ((a, b) for first, second, _ in tables.edges for a, b in ((first, second), (second, first)))
    return tuple(sorted({a for a, b in pairs if a in here and b in there}))


def _entry(first: Sequence[Sequence[object]], others: Sequence[Sequence[object]]) -> tuple[int, ...] | None:
    """By joint choice of the first cut, the one of the others that means the same. None where there is none."""
    if len(first) != len(others):
        return None
    maps = [
        [there.index(look) if look in there else -1 for look in here] for here, there in zip(first, others, strict=True)
    ]
    if any(-1 in found for found in maps):
        return None
    sizes = tuple(len(there) for there in others)
    return tuple(int(np.ravel_multi_index(joint, sizes)) for joint in product(*maps)) if maps else ()


def _look(tables: Tables, node: int) -> Sequence[object]:
    """What the choices of a node mean."""
    name = tables.names[node]
    return tables.strategies[name] if node < len(tables.strategies) else tables.layouts[name]


def _piece(
    tables: Tables, nodes: Sequence[int], before: tuple[int, ...], after: tuple[int, ...], hubs: tuple[int, ...]
) -> Piece | None:
    """None where it touches what it should not."""
    own, known = set(nodes), {*nodes, *before, *hubs}
    edges = []
    for i, (first, second, _) in enumerate(tables.edges):
        if first in own or second in own:
            if first in known and second in known:
                edges.append(i)
            else:
                here, there = (first, second) if first in own else (second, first)
                if here not in hubs and not tables.groups[there] > tables.groups[here] >= 0:
                    return None
    read = {end for i in edges for end in tables.edges[i][:2]}
    inside = frozenset(n for n in nodes if tables.groups[n] >= 0)
    return Piece(tuple(nodes), tuple(edges), inside, before, after, tuple(h for h in hubs if h in read or h in own))
