"""A model of many equal layers as a chain of three pieces: the first layer with the operations before it, one layer of
the middle, and the last layer with the operations after it. The pieces meet in the nodes that neighbouring layers
share, the cut.

A piece is eliminated (see `solver.variable_elimination`) for many prices of memory at once: the price is one more
variable, which is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import numpy as np

from nnscaler.ir.graph import Graph
from nnscaler.planning.parallel_configurations import uneven_ramps
from nnscaler.planning.planner.prune_dominated import Kept, Numbers, lean, of_conversions, often_counted, seconds_of
from nnscaler.planning.sharding.cost_tables import Tables, when_backward_ends
from nnscaler.planning.solver.problem import TooWide
from nnscaler.planning.solver.variable_elimination import (
    Elimination,
    EliminationOrder,
    Factor,
    find_order,
    run_elimination,
    substitute,
)
from nnscaler.scheduling.schedule import Ramp

WIDE = 64  # joint choices of a cut, and of hubs, that are worth it
PRICES = 320  # at which a piece may be eliminated at once


@dataclass(frozen=True, slots=True)
class ChainSegment:
    """Part of a chain, as indices into the tables.

    nodes    whose costs the piece counts
    edges    whose costs the piece counts
    inside   those of `nodes` that lie in a layer
    before   nodes of the cut before the piece
    after    nodes of the cut after the piece
    hubs     hubs that the piece reads
    """

    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    inside: frozenset[int]
    before: tuple[int, ...]
    after: tuple[int, ...]
    hubs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Chain:
    """A graph of equal layers as three pieces.

    tables   cost tables of the operations that `shown` returns, without dominated strategies
    kept     by node, which of all its strategies the tables still have
    head     the piece before the middle: what comes before the layers, and the first layer
    layer    one layer of the middle
    tail     the last layer, and what follows the layers
    hubs     nodes before the layers that several pieces read
    entry    by joint choice of the cut after the head, the joint choice of a cut between layers that means the same
    orders   elimination orders of head, layer and tail
    """

    tables: Tables
    kept: Kept
    head: ChainSegment
    layer: ChainSegment
    tail: ChainSegment
    hubs: tuple[int, ...]
    entry: tuple[int, ...]
    orders: tuple[EliminationOrder, ...]
    _least: dict[Ramp, tuple[float, ...]] = field(default_factory=dict)

    def least(self, form: Ramp) -> tuple[float, ...]:
        """Return the least seconds of head, layer and tail where F, I and W count so often, with all conversions,
        whatever the memory is and the states at their cuts are."""
        if form not in self._least:
            forms = tuple(dict.fromkeys((form, *uneven_ramps())))
            often = np.array([of_conversions(one) for one in forms])
            # [choices, forms], and of edges [choices of first, choices of second, forms]: forms stand where prices do
            nodes = [np.stack([seconds_of(own, one) for one in forms], axis=1) for own in self.tables.columns]
            pieces = (self.head, self.layer, self.tail)
            made = [price(self, piece, {node: nodes[node] for node in piece.nodes}, often) for piece in pieces]
            least = np.stack([one.table.min(axis=(0, 1, 2)) for one in made], axis=1)  # [forms, pieces]
            self._least.update({one: tuple(map(float, found)) for one, found in zip(forms, least, strict=True)})
        return self._least[form]

    def with_conversions(self, often: float) -> Chain:
        """Return the chain in which conversions count so often."""
        if often == 1.0:
            return self
        edges = tuple((a, b, often_counted(table, often)) for a, b, table in self.tables.edges)
        return replace(self, tables=replace(self.tables, edges=edges))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(columns.forward) for columns in self.tables.columns)

    @property
    def handed(self) -> tuple[float, ...]:
        """By joint choice of a cut, the bytes of a micro-batch that go from one layer to the next."""
        columns = [self.tables.columns[node].handed for node in self.layer.after]
        return tuple(float(sum(joint)) for joint in product(*columns))

    def when_backward_ends(self) -> Chain:
        """Return the chain with the memory of the moment when the backward of a micro-batch ends."""
        return replace(self, tables=when_backward_ends(self.tables))

    def with_kept_outside(self, head: float, tail: float) -> Chain:
        """Return the chain in which what is kept outside of layers counts so often, in the head and in the tail."""
        if head == tail == 1.0:
            return self
        columns = list(self.tables.columns)
        for piece, often in ((self.head, head), (self.tail, tail)):
            for node in piece.nodes:
                if node not in piece.inside:
                    columns[node] = replace(columns[node], kept=columns[node].kept * often)
        return replace(self, tables=replace(self.tables, columns=tuple(columns)))

    @property
    def width(self) -> int:
        """Number of joint choices of a cut."""
        return prod(self.sizes[node] for node in self.layer.before)


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """A piece that was eliminated at many prices.

    piece         what was eliminated
    elimination   from which the choices are read off
    table         priced seconds of the best choices: [hubs, before, after, prices]; missing axes have size 1
    sizes         by node, its number of strategies
    entry         as in `Chain`, for the head; empty for other pieces
    """

    piece: ChainSegment
    elimination: Elimination
    table: Numbers
    sizes: tuple[int, ...]
    entry: tuple[int, ...] = ()

    def choices(self, hubs: Sequence[int], before: int, after: int, price: int) -> dict[int, int]:
        """Return the best choice of each node, given those of the hubs, the joint choices of the cuts, and the number
        of a price."""
        made = dict(zip(self.piece.hubs, hubs, strict=True))
        after = self.entry.index(after) if self.entry else after
        for nodes, joint in ((self.piece.before, before), (self.piece.after, after)):
            shape = tuple(self.sizes[node] for node in nodes)
            made.update(zip(nodes, map(int, np.unravel_index(joint, shape)), strict=True) if nodes else ())
        made[len(self.sizes)] = price
        substitute(self.elimination, made)
        return {node: made[node] for node in self.piece.nodes}

    def at_hubs(self, hubs: Sequence[int]) -> Numbers:
        """Return the table at these choices of the hubs: [before, after, prices]."""
        shape = tuple(self.sizes[node] for node in self.piece.hubs)
        found: Numbers = self.table[int(np.ravel_multi_index(tuple(hubs), shape)) if shape else 0]
        return found


def price(chain: Chain, piece: ChainSegment, nodes: Mapping[int, Numbers], often: Numbers | None = None) -> Priced:
    """Eliminate a piece whose nodes cost `nodes` [choices, prices], with no more than `PRICES` prices.

    `often` is how often conversions count at each price; None: once.
    """
    sizes = chain.sizes
    number = len(sizes)  # of the price as a variable
    count = next(iter(nodes.values())).shape[1]
    tables = chain.tables
    # one factor per node [choices, prices], and one per edge [choices of first, choices of second], or one more axis
    factors = [Factor((node, number), nodes[node]) for node in piece.nodes]
    for first, second, table in (tables.edges[i] for i in piece.edges):
        if often is None:
            factors.append(Factor((first, second), table))
        else:
            factors.append(Factor((first, second, number), often_counted(table[:, :, None], often)))
    pieces = (chain.head, chain.layer, chain.tail)
    order = next(order for order, other in zip(chain.orders, pieces, strict=True) if other is piece)
    elimination = run_elimination(factors, order, (*sizes, count))
    shape = [prod(sizes[n] for n in nodes_) for nodes_ in (piece.hubs, piece.before, piece.after)]
    # [hubs, before, after, prices], each group of nodes as one joint choice
    table = elimination.table().reshape(*shape, count)
    if piece is not chain.head:
        return Priced(piece, elimination, table, sizes)
    # the head's own cut is renumbered as a cut between layers; states that the head cannot end in are infinite
    states = np.full((shape[0], shape[1], chain.width, count), np.inf)
    states[:, :, list(chain.entry)] = table
    return Priced(piece, elimination, states, sizes, chain.entry)


def _order(tables: Tables, piece: ChainSegment) -> EliminationOrder:
    """Return the order in which a piece is eliminated at `PRICES` prices. Raises TooWide."""
    sizes = tuple(len(columns.forward) for columns in tables.columns)
    number = len(sizes)
    scopes = [(node, number) for node in piece.nodes] + [tables.edges[i][:2] for i in piece.edges]
    keep = (*piece.hubs, *piece.before, *piece.after, number)
    return find_order(scopes, [node for node in piece.nodes if node not in keep], (*sizes, PRICES), keep=keep)


def shown(graph: Graph, groups: Mapping[str, int], layers: int) -> frozenset[str]:
    """Return the operations that a chain is made from.

    These are the operations outside of layers, those of the first, the last and one middle layer, and those of the
    layers next to these that share a tensor with them. `groups` is the layer of an operation.
    """
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
    """Return the chain of these tables; None where the graph is no chain, or its pieces are too wide.

    `items` is the item of every node, as `Subject.items_of` counts. The graph is a chain where neighbouring layers
    alone share edges, every cut between them means the same, and what is outside of the layers comes before or after
    all of them. It is too wide where a cut or the hubs have more than `WIDE` joint choices, or an elimination would
    need a table that is too large.
    """
    groups, model = tables.groups, layers // 2 + 1
    # nodes by layer; `outside` are those of no layer
    inside: dict[int, list[int]] = {group: [] for group in range(layers)}
    for node, group in enumerate(groups):
        inside.setdefault(group, []).append(node)
    outside = inside.pop(-1, [])
    # what is outside lies before the second layer or after the last one, and edges join neighbouring layers only
    if any(1 < items[node] <= layers for node in outside):
        return None
    if any(abs(groups[a] - groups[b]) > 1 for a, b, _ in tables.edges if min(groups[a], groups[b]) >= 0):
        return None
    # the nodes of the two ends, each with its layer
    head = [*(n for n in outside if items[n] <= 1), *inside[0]]
    tail = [*inside[layers - 1], *(n for n in outside if items[n] > layers)]
    # by layer, those of its nodes that the next layer touches; the cuts around the model layer stand for all others
    cut = {group: _touching(tables, inside[group], inside[group + 1]) for group in (0, model - 1, model, layers - 2)}
    # states of one cut are compared with those of another: choices must mean the same at every cut
    looks = [[_look(tables, node) for node in cut[group]] for group in (model - 1, model, layers - 2)]
    entry = _entry([_look(tables, node) for node in cut[0]], looks[0])
    if not cut[model] or entry is None or any(look != looks[0] for look in looks):
        return None
    # nodes of the head, outside of layers, that later layers or the tail read
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
    # dominated strategies go, but those of nodes where pieces meet: not all of their edges are in one piece
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
    """Return those of `nodes` that share an edge with one of the others."""
    here, there = set(nodes), set(others)
    pairs = ((a, b) for first, second, _ in tables.edges for a, b in ((first, second), (second, first)))
    return tuple(sorted({a for a, b in pairs if a in here and b in there}))


def _entry(first: Sequence[Sequence[object]], others: Sequence[Sequence[object]]) -> tuple[int, ...] | None:
    """Map each joint choice of the first cut to the one of the others that means the same; None where one has no
    equal."""
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
    """Return the meaning of a node's choices: strategies of an operation, layouts of a tensor."""
    name = tables.names[node]
    return tables.strategies[name] if node < len(tables.strategies) else tables.layouts[name]


def _piece(
    tables: Tables, nodes: Sequence[int], before: tuple[int, ...], after: tuple[int, ...], hubs: tuple[int, ...]
) -> ChainSegment | None:
    """Return the piece with these nodes and all edges at them; None where it touches a node that it should not."""
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
    return ChainSegment(
        tuple(nodes), tuple(edges), inside, before, after, tuple(h for h in hubs if h in read or h in own)
    )
