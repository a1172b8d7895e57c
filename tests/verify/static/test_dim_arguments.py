"""Dims from the end are counted as torch counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from op_registry.infer_torch_schema import schema_of
from op_registry.registry import default_registry
from op_registry.samples import SAMPLES

from verify.evidence.inputs.concrete_call import function_of, outputs_of, with_tensors
from verify.evidence.inputs.draw_calls import builtin_call
from verify.programs.typing.lines.canonical_calls import dim_arguments, wrapped


def test_dims_are_counted_from_the_first() -> None:
    assert wrapped("aten.transpose.int", {"dim0": -1, "dim1": 0}, 3) == {"dim0": 2, "dim1": 0}
    assert wrapped("aten.unsqueeze.default", {"dim": -1}, 3) == {"dim": 3}
    assert wrapped("aten.stack.default", {"dim": -1}, 2) == {"dim": 2}
    assert wrapped("aten.sum.dim_IntList", {"dim": [-1], "keepdim": True}, 2) == {"dim": [1], "keepdim": True}
    assert wrapped("aten.softmax.int", {"dim": -5}, 2) == {"dim": -5}  # out of range stays what it is
    assert wrapped("aten.roll.default", {"shifts": [-1], "dims": [-1]}, 2) == {"shifts": [-1], "dims": [1]}


def _outcome(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[Tensor | None] | None:
    try:
        return list(outputs_of(function(**arguments)))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def _equal(one: list[Tensor | None] | None, other: list[Tensor | None] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return one is other
    return all(
        a is b
        or (a is not None and b is not None and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in zip(one, other, strict=True)
    )


def _ranked(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments, and the same with tensors of more or fewer dims: what is broadcast counts its dims elsewhere.
    Not with indices, which kernels may trust."""
    yield arguments
    floats = {n: v for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point()}
    for name, tensor in floats.items():
        yield {**arguments, name: tensor.unsqueeze(0)}
        if tensor.ndim:
            yield {**arguments, name: tensor[0]}
    yield {**arguments, **{name: tensor.unsqueeze(0) for name, tensor in floats.items()}}


@pytest.fixture(scope="module")
def compared_dims() -> tuple[set[str], list[str]]:
    """Operators of whose samples negative dims were compared with those that stand for them; and where they differ."""
    compared: set[str] = set()
    differences: list[str] = []
    generator, registry = torch.Generator().manual_seed(0), default_registry()
    for sample in SAMPLES:
        names = dim_arguments(sample.operator)
        found = schema_of(sample.operator)
        if not names or found is None:
            continue
        call = builtin_call(sample, "normal", generator)
        function = function_of(sample.operator, registry.lookup(sample.operator))
        args, kwargs = with_tensors(call.call, call.tensors, {})
        lists = {a.name: "List" in str(a.type) for a in found.arguments}
        defaults = {a.name: a.default_value for a in found.arguments if a.has_default_value()}
        given = dict(zip(lists, args, strict=False)) | dict(kwargs)
        for arguments, name in product(_ranked(given), sorted(names)):
            first = next(v for v in tree_leaves(arguments) if isinstance(v, Tensor))
            old = arguments.get(name, defaults.get(name))
            more = list(old[1:]) if isinstance(old, list | tuple) else []
            for dim in range(-max(first.ndim, 1) - 1, 0):
                asked = {name: [dim, *more] if lists[name] else dim}
                counted = wrapped(sample.operator, asked, first.ndim)
                one, other = (_outcome(function, {**arguments, **a}) for a in (asked, counted))
                if not _equal(one, other):
                    differences.append(f"{sample.operator} {asked} {counted} {tuple(first.shape)}")
                elif one is not None and counted != asked:
                    compared.add(sample.operator)
    return compared, differences


@pytest.mark.long
def test_negative_dims_are_counted_as_torch_counts_them(compared_dims: tuple[set[str], list[str]]) -> None:
    """Of every operator whose dims are taken for those of its first tensor; the others are in a list of exceptions."""
    compared, differences = compared_dims
    assert not differences
    known = {name for name in default_registry().names() if dim_arguments(name)}
    assert known <= compared, known - compared


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("aten.diag_embed.default", {"dim1": -1}),
        ("aten.cosine_similarity.default", {"dim": -1}),
        ("aten.linalg_vecdot.default", {"dim": -2}),
        ("aten.norm_except_dim.default", {"dim": -1}),
        ("aten._weight_norm.default", {"dim": -1}),
        ("aten.tile.default", {"dims": [-1]}),
        ("aten._nobody_annotated.default", {"dim": -1}),
        ("mylib.some.default", {"dim": -1}),
    ],
)
def test_dims_of_other_tensors_stay_as_they_are(operator: str, arguments: dict[str, Any]) -> None:
    assert wrapped(operator, arguments, 2) == arguments
