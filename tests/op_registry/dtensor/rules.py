"""What torch's DTensor allows: of a call, which placements of the inputs on one mesh axis give which of the outputs.

A call is run once to see the operators that the dispatcher meets below composite ones; DTensor has a table of rules for
each, and the rules of a chain are those of its links, joined on the tensors between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Placements = tuple[str, ...]  # "R", "S(0)", "P" (a sum), "P(max)", ...
Rule = tuple[Placements, Placements]  # of the inputs, of the outputs
MAX_RULES = 4000  # of a chain; a longer join is given up


class Unknown(Exception):
    """DTensor has no rules for this operator."""


@cache
def propagator() -> Any:
    """DTensor's table of rules. Raises ImportError or AttributeError where this version of torch keeps it elsewhere."""
    from torch.distributed.tensor import DTensor

    found = DTensor._op_dispatcher.sharding_propagator
    assert found.op_strategy_funcs is not None
    return found


@cache
def registered() -> dict[str, Any]:
    """Every operator that DTensor has rules for, by our name for it."""
    table = propagator()
    singles = getattr(table, "op_single_dim_strategy_funcs", {})
    return {str(op): op for op in (*table.op_strategy_funcs, *singles, *table.op_to_rules)}


@dataclass(frozen=True)
class _Link:
    """One operator of a chain, with its tensors by number."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    """Numbers tensors, and keeps the operators that make them."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.kept: list[Tensor] = list(inputs)  # alive, so that no other tensor has their address
        self.links: list[_Link] = []

    def number(self, t: Tensor) -> int:
        for i, kept in enumerate(self.kept):
            if kept is t:
                return i
        self.kept.append(t)
        return len(self.kept) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = tuple(self.number(t) for t in _tensors((args, kwargs or {})))
        outputs = tuple(self.number(t) for t in _tensors(result))
        if str(func) != "aten.detach.default" or inputs != outputs:
            self.links.append(_Link(func, tuple(args), dict(kwargs or {}), inputs, outputs))
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def rules_of_call(function: Callable[[], Any], inputs: Sequence[Tensor]) -> set[Rule]:
    """The rules of a call on these tensors. Raises `Unknown`, naming the operator."""
    with torch.no_grad(), _Recorder(inputs) as recorder:
        results = _tensors(function())
    wanted = [recorder.number(t) for t in results]
    joined: list[dict[int, str]] = [{}]
    for link in recorder.links:
        rules = rules_of_operator(link.operator, link.args, link.kwargs, len(link.outputs))
        shapes = [recorder.kept[i].shape for i in (*link.inputs, *link.outputs)]
        joined = list(_join(joined, link, rules, shapes))
        if len(joined) > MAX_RULES:
            raise Unknown(f"{link.operator}: too many combinations")
    found = {
        (tuple(row.get(i, "R") for i in range(len(inputs))), tuple(row.get(i, "R") for i in wanted)) for row in joined
    }
    return {rule for rule in found if set(rule[0]) != {"R"}}


def _join(
    rows: Iterable[dict[int, str]], link: _Link, rules: Iterable[Rule], shapes: Sequence[torch.Size]
) -> Iterator[dict[int, str]]:
    """Rows that agree with a rule on every tensor that both have."""
    table = [
        dict(zip((*link.inputs, *link.outputs), (*ins, *outs), strict=True))
        for ins, outs in rules
        if len(ins) == len(link.inputs) and len(outs) == len(link.outputs) and _real((*ins, *outs), shapes)
    ]
    seen = set()
    for row, rule in product(rows, table):
        if all(row.get(i, placement) == placement for i, placement in rule.items()):
            merged = {**row, **rule}
            key = tuple(sorted(merged.items()))
            if key not in seen:
                seen.add(key)
                yield merged


def _real(placements: Sequence[str], shapes: Sequence[torch.Size]) -> bool:
    """Whether every shard is of a dim that there is, with more than one entry."""
    return all(
        not p.startswith("S(") or (int(p[2:-1]) < len(shape) and shape[int(p[2:-1])] > 1)
        for p, shape in zip(placements, shapes, strict=True)
    )


def rules_of_operator(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: int) -> set[Rule]:
    """The table of one operator. Raises `Unknown`."""
    table = propagator()
    tensors = _tensors((args, kwargs))
    everywhere = (("R",) * len(tensors), ("R",) * outputs)
    if not tensors:
        return {((), ("R",) * outputs)}
    single = getattr(table, "op_single_dim_strategy_funcs", {}).get(operator)
    try:
        if single is not None:
            return {everywhere, *_single(single, operator, args, kwargs, len(tensors))}
        if operator in table.op_strategy_funcs:
            return {everywhere, *_strategies(table.op_strategy_funcs[operator], operator, args, kwargs, outputs)}
    except Exception as error:  # noqa: BLE001 - torch raises many kinds for calls that a rule did not think of
        raise Unknown(f"{operator}: {type(error).__name__}: {error}") from None
    raise Unknown(str(operator))


def _single(
    strategy: Any, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: int
) -> Iterator[Rule]:
    """Rules that list placements of the outputs, then of the inputs."""
    given, named = pytree.tree_map_only(Tensor, _meta, (tuple(args), kwargs))
    for row in strategy(operator, given, named):
        if any(p is None for p in row):
            continue
        placements = tuple(_text(p) for p in row)
        yield placements[len(row) - inputs :], placements[: len(row) - inputs]


def _strategies(
    strategy: Any, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: int
) -> Iterator[Rule]:
    """Rules that follow the placements which the inputs may have: each tensor offers all of them."""
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, TupleStrategy

    def offered(t: Tensor) -> Any:
        return OpStrategy([_offer(t, p) for p in _placements(t)])

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            return offered(value)
        if isinstance(value, list | tuple) and any(isinstance(t, Tensor) for t in value):
            if all(isinstance(t, Tensor) for t in value):
                return TupleStrategy([offered(t) for t in value])
            return [argument(t) for t in value]
        return value

    schema = OpSchema(operator, tuple(map(argument, args)), {k: argument(v) for k, v in kwargs.items()})
    found = strategy(schema)
    for row in found.strategies if isinstance(found, OpStrategy) else ():
        inputs = row.input_specs
        results = row.output_specs if isinstance(row.output_specs, tuple | list) else [row.output_specs] * outputs
        if any(r is None for r in results):
            continue
        ins = [results[0]] * len(_tensors((args, kwargs))) if inputs is None else inputs
        yield tuple(_text(s.placements[0]) for s in ins), tuple(_text(s.placements[0]) for s in results)


@cache
def _mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)


def _meta(t: Tensor) -> Any:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    return TensorMeta(t.shape, t.stride(), t.dtype)


def _offer(t: Tensor, placement: Any) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec

    return OpSpec(DTensorSpec(_mesh(), (placement,), tensor_meta=_meta(t)))


def _placements(t: Tensor) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [Replicate(), *(Shard(d) for d in range(t.dim()) if t.shape[d] > 1), Partial(), Partial("max")]


def _text(placement: Any) -> str:
    """`S(0)`, `R`, `P` for a sum, `P(max)`; of shards that are not contiguous `SS(dim, outer)`."""
    from torch.distributed.tensor import Partial, Replicate

    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    outer = getattr(placement, "split_factor", 1)
    return f"S({placement.dim})" if outer == 1 else f"SS({placement.dim},{outer})"
