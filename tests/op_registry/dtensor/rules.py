"""The rules of torch's DTensor: of a call, which placements of the inputs on one mesh axis give which of the outputs.

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
from torch._decomp import decomposition_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Placements = tuple[str, ...]  # "R", "S(0)", "P" (a sum), "P(max)", ...
Rule = tuple[Placements, Placements]  # of the inputs, of the outputs
MAX_RULES = 4000  # of a chain; a longer join is given up
_COMBINATIONS = 300  # of placements, where a rule has to be asked about one after the other


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


@dataclass(frozen=True)
class Chain:
    """The links of a call; its inputs are the first tensors."""

    links: tuple[_Link, ...]
    inputs: int
    outputs: tuple[int, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def operators(self) -> frozenset[str]:
        return frozenset(str(link.operator) for link in self.links)


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
        for decomposed in () if _has_rules(func) else (decomposition_table.get(func), func.decompose):
            before = len(self.links)
            try:
                with self:  # as DTensor does
                    found = NotImplemented if decomposed is None else decomposed(*args, **(kwargs or {}))
            except Exception:  # noqa: BLE001 - a decomposition that does not know this call
                found = NotImplemented
            if found is not NotImplemented:
                return found
            del self.links[before:]
        result = func(*args, **(kwargs or {}))
        inputs = tuple(self.number(t) for t in _tensors((args, kwargs or {})))
        outputs = tuple(self.number(t) for t in _tensors(result))
        if outputs:
            self.links.append(_Link(func, tuple(args), dict(kwargs or {}), inputs, outputs))
        return result


def _has_rules(operator: Any) -> bool:
    return str(operator) in registered()


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def recorded(function: Callable[[], Any], inputs: Sequence[Tensor]) -> Chain:
    """The operators below a call on these tensors."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Recorder(inputs) as recorder:
        results = _tensors(function())
    outputs = tuple(recorder.number(t) for t in results)
    return Chain(tuple(recorder.links), len(inputs), outputs, tuple(t.shape for t in recorder.kept))


def rules_of(chain: Chain) -> set[Rule]:
    """The rules of a chain. Raises `Unknown`, naming the link that has none."""
    joined: list[dict[int, str]] = [{}]
    for link in chain.links:
        rules = rules_of_operator(link.operator, link.args, link.kwargs, len(link.outputs))
        shapes = [chain.shapes[i] for i in (*link.inputs, *link.outputs)]
        joined = list(_join(joined, link, rules, shapes))
        if len(joined) > MAX_RULES:
            raise Unknown(f"{link.operator}: too many combinations")
    found = {
        (tuple(row.get(i, "R") for i in range(chain.inputs)), tuple(row.get(i, "R") for i in chain.outputs))
        for row in joined
    }
    return {rule for rule in found if set(rule[0]) - {"R"}}


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
    """Return whether every shard is of an existing dim with more than one entry."""
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


def _single(strategy: Any, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: int) -> Iterator[Rule]:
    """Rules that list placements of the outputs, then of the inputs."""
    given, named = pytree.tree_map_only(Tensor, _meta, (tuple(args), kwargs))
    for row in strategy(operator, given, named):
        if any(p is None for p in row):
            continue
        placements = tuple(_text(p) for p in row)
        yield placements[len(row) - inputs :], placements[: len(row) - inputs]


def _strategies(strategy: Any, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: int) -> set[Rule]:
    """Rules that follow the placements which the inputs have: each tensor offers all of them at once. A function that
    reads one placement of each is asked about every combination."""
    tensors = _tensors((args, kwargs))
    try:
        return set(_asked(strategy, operator, args, kwargs, [_placements(t) for t in tensors], outputs))
    except Exception:  # noqa: BLE001 - whatever a rule raises that did not expect several placements
        combinations = list(product(*(_placements(t) for t in tensors)))
    found, error = set(), None
    for one in combinations[:_COMBINATIONS]:
        try:
            found |= set(_asked(strategy, operator, args, kwargs, [[p] for p in one], outputs))
        except Exception as raised:  # noqa: BLE001 - this combination has no rule
            error = raised
    if not found and error is not None:
        raise error
    return found


def _asked(
    strategy: Any,
    operator: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    offers: Sequence[Sequence[Any]],
    outputs: int,
) -> Iterator[Rule]:
    """The rules that a function gives when each tensor offers these placements."""
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, TupleStrategy

    left = iter(offers)

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            return OpStrategy([_offer(value, p) for p in next(left)])
        if isinstance(value, list | tuple) and any(isinstance(t, Tensor) for t in value):
            every = [argument(t) for t in value]
            return TupleStrategy(every) if all(isinstance(t, Tensor) for t in value) else every
        return value

    schema = OpSchema(operator, tuple(map(argument, args)), {k: argument(v) for k, v in kwargs.items()})
    found = strategy(schema)
    for row in found.strategies if isinstance(found, OpStrategy) else ():
        inputs = row.input_specs
        results = row.output_specs if isinstance(row.output_specs, tuple | list) else [row.output_specs] * outputs
        if any(r is None for r in results):
            continue
        ins = [results[0]] * len(offers) if inputs is None else inputs
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
    if type(placement).__name__ == "_NormPartial":
        return "P(norm)"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    outer = getattr(placement, "split_factor", 1)
    return f"S({placement.dim})" if outer == 1 else f"SS({placement.dim},{outer})"
