"""Compute rows that a mask selects in the model's own shapes: how many they are depends on the data, which no program's
shape can. `(a[m] - b[m]).abs().mean()` becomes a sum over all rows, of which `m` keeps some, over their number.

Rows that are not selected hold ones where they are selected, and both before and after an operator of theirs in which
another tensor takes part, say a weight. So nothing of them reaches a result, and to a gradient they add zeros: a NaN
that is computed of them stays among them. What is no such computation, and what is written in place, stays as it is,
and is refused where its shape is read.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

from op_registry.builtin.elementwise import broadcasting
from op_registry.registry import facts_of

from nnscaler.tracing.graph_builder import storage_of

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # reductions of a loss
_PUT = (aten.index_put_.default, aten.index_put.default)
_COMPARISONS = (operator.ge, operator.le, operator.gt, operator.lt, operator.eq, operator.ne)
_CHECKS = (*_COMPARISONS, aten.sym_size.int, aten._assert_scalar.default, aten._assert_tensor_metadata.default)
_BROADCAST = aten.broadcast_tensors.default
_LABELLED = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
_LAYERS = (aten.linear.default, aten.matmul.default, aten.layer_norm.default)
_SOFTMAX = (aten.softmax.int, aten.log_softmax.int)
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Rows:
    """`whole`: all rows; `mask`: over its first dims, those that are selected; `filled`: the others hold ones."""

    whole: fx.Node
    mask: fx.Node
    filled: bool = False

    @property
    def inner(self) -> tuple[int, ...]:
        """Return the shape of a row."""
        return tuple(_value(self.whole).shape[_value(self.mask).dim() :])


def keep_rows_in_place(program: ExportedProgram) -> None:
    """Rewrite the program's graphs where masks select rows."""
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    selecting = [graph for graph in graphs if any(n.target == aten.index.Tensor for n in graph.nodes)]
    written: set[int] = set()
    rewritings = [_Rewriting(graph, written) for graph in selecting]
    for rewriting in rewritings:
        rewriting.write_into_no_rows()
    written.update(memory for graph in graphs if selecting for memory in _written(graph))
    for rewriting in rewritings:
        rewriting.run()


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _depends_on_data(value: Any) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else ()
    return any(not isinstance(s, int) and s.node.maybe_as_int() is None for s in sizes)


@dataclass
class _Rewriting:
    graph: fx.Graph
    written: set[int]
    rows: dict[fx.Node, _Rows] = field(default_factory=dict)
    masks: dict[str, fx.Node] = field(default_factory=dict)  # by how they are computed

    def write_into_no_rows(self) -> None:
        """`x[mask] += 1` adds to a copy of the rows, and puts it back: what it writes into them is computed anew."""
        for rows in [node for node in self.graph.nodes if node.target == aten.index.Tensor]:
            if not _depends_on_data(rows.meta["val"]):
                continue
            memory, current = storage_of(_value(rows)), rows
            tensors = [node for node in self.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
            _, *writes = [node for node in tensors if storage_of(_value(node)) == memory]
            if any(_out_of_place(node) is None for node in writes):
                continue  # or is a view of them
            for node in writes:
                with self.graph.inserting_before(node):
                    made = self._call(node, _out_of_place(node), current, *node.args[1:], **node.kwargs)
                node.replace_all_uses_with(made)
                current.replace_all_uses_with(made, lambda user, made=made: user > made)
                self.graph.erase_node(node)
                current = made

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                with self.graph.inserting_before(node):
                    self._rewrite(node, node.target)
        broadcast = [node for node in self.graph.nodes if node.target == _BROADCAST]
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node in self.rows or node in broadcast or self._is_check(node)):
                self.graph.erase_node(node)

    def _is_check(self, node: fx.Node) -> bool:
        """Return whether the node only says how many rows there may be."""
        if node.target not in _CHECKS:
            return False
        return any(given in self.rows or self._is_check(given) for given in node.all_input_nodes)

    def _rewrite(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        given = [n for n in node.all_input_nodes if n in self.rows]
        if target == aten.index.Tensor:
            self._select(node)
        elif target in _PUT:
            self._put(node)
        elif not given or len({self.rows[n].mask for n in given}) > 1 or target._schema.is_mutable:
            return
        elif target in (aten.sum.default, aten.mean.default) and len(node.args) == 1 and not node.kwargs:
            self._reduce(node, self.rows[given[0]], target == aten.mean.default)
        elif target in (aten.sum.dim_IntList, aten.mean.dim, *_SOFTMAX):
            self._within_rows(node, self.rows[given[0]])
        elif target in _LAYERS:
            self._layer(node)
        elif target in _LABELLED:
            self._labelled(node)
        elif target == _BROADCAST:
            self._broadcast(node)
        elif _is_local(target):
            if (made := self._of_whole(node, node.args, node.kwargs)) is not None:
                self._hold(node, made, self.rows[given[0]].mask)
        elif any(argument.name == "reduction" for argument in target._schema.arguments):
            self._loss(node, target, self.rows[given[0]].mask)

    def _select(self, node: fx.Node) -> None:
        source, indices = node.args
        mask = indices[0] if isinstance(indices, Sequence) and len(indices) == 1 else None
        if not isinstance(source, fx.Node) or not isinstance(mask, fx.Node) or not _depends_on_data(node.meta["val"]):
            return
        if _value(mask).dtype == torch.bool and not self._is_written(mask) and not self._is_written(node):
            mask = self._known(mask)
            self.rows[node] = _Rows(self._keep(node, mask, source, 1), mask, filled=True)

    def _is_written(self, node: fx.Node) -> bool:
        """Return whether an operator writes into the node's memory: what stands for the node would lack that."""
        return storage_of(_value(node)) in self.written

    def _known(self, mask: fx.Node) -> fx.Node:
        """Return the first mask that is computed in the same way, of tensors that nobody writes."""
        given = [n.meta["val"] for n in mask.all_input_nodes]
        known = all(isinstance(value, Tensor) and storage_of(value) not in self.written for value in given)
        if mask.op != "call_function" or not known or _is_drawn(mask.target):
            return mask
        return self.masks.setdefault(repr((mask.target, mask.args, mask.kwargs)), mask)

    def _put(self, node: fx.Node) -> None:
        target, indices, values, *rest = node.args
        if values not in self.rows or rest or not isinstance(indices, Sequence) or len(indices) != 1:
            return
        if not isinstance(indices[0], fx.Node) or self._known(indices[0]) is not self.rows[values].mask:  # type: ignore[index]
            return
        rows = self.rows[values]  # type: ignore[index]
        whole = self._call(node, aten.where.self, self._over(rows.mask, _value(rows.whole).dim()), rows.whole, target)
        if _value(whole).shape != _value(target).shape or _value(whole).dtype != _value(target).dtype:  # type: ignore[arg-type]
            return
        if node.target == aten.index_put_.default:
            whole = self._call(node, aten.copy_.default, target, whole)
        node.replace_all_uses_with(whole)
        self.graph.erase_node(node)

    def _of_whole(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node | None:
        """Return the node's operator on whole tensors; None where their dims do not stand as those of the rows do."""
        given = [n for n in node.all_input_nodes if n in self.rows]
        inner = len(self.rows[given[0]].inner)
        others = [n for n in node.all_input_nodes if n not in self.rows]
        if any(len(self.rows[n].inner) != inner for n in given):
            return None
        if not all(isinstance(n.meta["val"], Tensor) and _fits_each(_value(n), inner) for n in others):
            return None
        self._fill(given if others else [])
        return self._call(node, node.target, *self._whole(args), **self._whole(kwargs))

    def _hold(self, node: fx.Node, made: fx.Node, mask: fx.Node) -> None:
        """Let `made` stand for the node, filled where a tensor that is no row took part."""
        if self._is_written(node):
            return
        self.rows[node] = _Rows(made, mask)
        if any(n not in self.rows for n in node.all_input_nodes):
            self._fill([node])

    def _fill(self, nodes: Sequence[fx.Node]) -> None:
        """Put ones where rows are not selected: what is computed of them may be NaN, or have a derivative that is, and
        zero times that would reach the gradient of a tensor that takes part."""
        for node in nodes:
            rows = self.rows[node]
            if not rows.filled:
                kept = self._keep(node, rows.mask, rows.whole, 1)
                self.rows[node] = replace(rows, whole=kept, filled=True)

    def _whole(self, value: Any) -> Any:
        return fx.map_arg(value, lambda n: self.rows[n].whole if n in self.rows else n)

    def _broadcast(self, node: fx.Node) -> None:
        """Rows of one shape are what they are."""
        given = node.all_input_nodes
        if all(n in self.rows for n in given) and len({_value(self.rows[n].whole).shape for n in given}) == 1:
            members: Any = node.args[0]
            for user in node.users:
                if user.target == operator.getitem:
                    self.rows[user] = self.rows[members[user.args[1]]]

    def _within_rows(self, node: fx.Node, rows: _Rows) -> None:
        """A sum or mean over dims of each row."""
        dims, moved = node.args[1], _value(rows.mask).dim() - 1
        listed = dims if isinstance(dims, Sequence) else [dims]
        inside = [d for d in listed if isinstance(d, int) and (d > 0 or -len(rows.inner) <= d < 0)]
        within = [d if d < 0 else d + moved for d in inside]
        if within and len(within) == len(listed):
            found = within if isinstance(dims, Sequence) else within[0]
            made = self._call(node, node.target, rows.whole, found, *node.args[2:], **node.kwargs)
            self._hold(node, made, rows.mask)

    def _layer(self, node: fx.Node) -> None:
        """A layer of each row: its parameters are no rows. Ones, normed without an epsilon, would be NaN."""
        given, others = node.args[0], [n for n in node.all_input_nodes if n is not node.args[0]]
        if given not in self.rows or any(n in self.rows for n in others) or node.kwargs:
            return
        rows = self.rows[given]  # type: ignore[index]
        norm = node.target == aten.layer_norm.default
        normed: Any = node.args[1] if norm else [1]
        epsilon: Any = node.args[4] if norm and len(node.args) > 4 else 1e-5
        vectors = node.target == aten.matmul.default and any(_value(n).dim() != 2 for n in others)
        finite = not others or epsilon >= torch.finfo(torch.float32).tiny
        if len(normed) <= len(rows.inner) and not vectors and finite:
            self._fill([given] if others else [])  # type: ignore[list-item]
            made = self._call(node, node.target, self.rows[given].whole, *node.args[1:])  # type: ignore[index]
            self._hold(node, made, rows.mask)

    def _reduce(self, node: fx.Node, rows: _Rows, mean: bool) -> None:
        kept, dtype = self._keep(node, rows.mask, rows.whole, 0), _value(rows.whole).dtype
        if not mean:
            made = self._call(node, aten.sum.default, kept)
        else:
            wide = {"dtype": torch.float32} if dtype in _HALF else {}  # a sum may be too large where its mean is not
            made = self._call(node, aten.sum.default, kept, **wide)
            count = self._call(node, aten.sum.default, rows.mask)
            made = self._call(node, aten.div.Tensor, made, self._call(node, aten.mul.Tensor, count, prod(rows.inner)))
            made = self._call(node, aten.to.dtype, made, dtype) if wide else made
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def _loss(self, node: fx.Node, target: torch._ops.OpOverload, mask: fx.Node) -> None:
        """A loss of each element, and its sum or mean."""
        arguments = target._schema.arguments
        place = [argument.name for argument in arguments].index("reduction")
        reduction = node.args[place] if place < len(node.args) else node.kwargs.get("reduction", _MEAN)
        kwargs = {name: value for name, value in node.kwargs.items() if name != "reduction"}
        before = [kwargs.pop(a.name, a.default_value) for a in arguments[len(node.args) : place]]
        args = [*node.args[:place], *before, _NONE, *node.args[place + 1 :]]
        made = self._of_whole(node, args, kwargs)
        given = next(n for n in node.all_input_nodes if n in self.rows)
        if made is None or _value(made).shape != _value(self.rows[given].whole).shape:
            return
        if reduction == _NONE:
            self._hold(node, made, mask)
        else:
            self._reduce(node, _Rows(made, mask), bool(reduction == _MEAN))

    def _labelled(self, node: fx.Node) -> None:
        """Labels of rows that are not selected are such as the loss ignores; its weights take no gradient."""
        defaults: tuple[Any, ...] = (None, _MEAN, -100)
        args: tuple[Any, ...] = (*node.args, *defaults[len(node.args) - 2 :])
        scores, labels, weight, reduction, ignored = args[:5]
        if scores not in self.rows or labels not in self.rows or node.kwargs or reduction == _NONE:
            return
        rows, target = self.rows[scores], self.rows[labels]
        if target.inner or len(rows.inner) != 1 or _value(target.whole).is_floating_point():
            return
        kept = self._keep(node, rows.mask, target.whole, ignored)
        flat = self._call(node, aten.reshape.default, rows.whole, [-1, *rows.inner])
        kept = self._call(node, aten.reshape.default, kept, [-1])
        made = self._call(node, node.target, flat, kept, weight, reduction, ignored, *args[5:])
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def _keep(self, like: fx.Node, mask: fx.Node, whole: fx.Node, filler: Any) -> fx.Node:
        """Return the tensor with `filler` where rows are not selected; where it is of booleans, with False."""
        filler = False if _value(whole).dtype == torch.bool else filler
        return self._call(like, aten.where.ScalarOther, self._over(mask, _value(whole).dim()), whole, filler)

    def _over(self, mask: fx.Node, dims: int) -> fx.Node:
        shape = tuple(_value(mask).shape)
        if len(shape) == dims:
            return mask
        return self._call(mask, aten.reshape.default, mask, [*shape, *[1] * (dims - len(shape))])

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = next(v.fake_mode for v in torch.utils._pytree.tree_leaves(values) if hasattr(v, "fake_mode"))
        assert isinstance(mode, FakeTensorMode)
        made.meta = dict(like.meta)
        with mode:
            made.meta["val"] = target(*values[0], **values[1])
        return made


def _fits_each(value: Tensor, inner: int) -> bool:
    """Return whether each of the rows, which have `inner` dims, takes all of a tensor."""
    return value.dim() <= inner or (value.dim() == inner + 1 and bool(value.shape[0] == 1))


def _is_local(target: torch._ops.OpOverload) -> bool:
    """Return whether an element of the result is made of the elements at its place."""
    facts = facts_of(str(target))
    local = torch.Tag.pointwise in target.tags or facts.annotation is broadcasting or facts.moves in ("value", "cast")
    return local and not _is_drawn(target)


def _out_of_place(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the operator that computes what this one writes into its first argument, of the same dtype; None where it
    is of another kind."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable or not _is_local(target):
        return None
    values = [n.meta["val"] for n in node.all_input_nodes]
    same = all(isinstance(v, Tensor) and v.dtype == values[0].dtype for v in values)
    packet = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    found = getattr(packet, target._overloadname, None) if same else None
    return found if found is not None and not found._schema.is_mutable else None


def _is_drawn(target: Any) -> bool:
    """Return whether the operator gives other values each time."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _written(graph: fx.Graph) -> set[int]:
    """Return the memory that operators write into."""
    found = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = torch.utils._pytree.tree_leaves(given)
                found |= {storage_of(_value(leaf)) for leaf in leaves if isinstance(leaf, fx.Node)}
    return found
