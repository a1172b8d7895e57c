"""Batches of any container are walked alike: torch's own and those of users and libraries."""

from __future__ import annotations

import inspect
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.nested_values import leaves_of, map_tensors, tensors_in
from nnscaler.tracing.sample_inputs import BatchConstants, flatten_inputs
from nnscaler.training.data.pack_and_collate_samples import Collated, check_collate
from nnscaler.training.model_part.compile_submodule_as_program import call_inputs

Named = namedtuple("Named", "x scale")


@dataclass(frozen=True)
class Rows:
    x: Tensor
    scale: Any = 2.0


class Held(MutableMapping[str, Any]):
    """A mapping of a library, which keeps its items in a dict that a shallow copy shares."""

    def __init__(self, **items: Any) -> None:
        self.held = items

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def proxy(**items: Any) -> MappingProxyType[str, Any]:
    return MappingProxyType(items)


def listed(x: Any, scale: Any) -> list[Any]:
    return [x, (scale, None)]


KINDS: list[Callable[..., Any]] = [dict, OrderedDict, UserDict, Held, proxy, Named, Rows, listed]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_found_and_replaced_and_the_value_stays(kind: Callable[..., Any]) -> None:
    x = torch.zeros(3, 2)
    value = kind(x=x, scale=2.0)
    assert [id(t) for t in tensors_in(value)] == [id(x)]
    made = map_tensors(value, lambda t: t[:1])
    assert [t.shape[0] for t in tensors_in(made)] == [1] and tensors_in(value)[0] is x
    assert type(made) is (dict if kind is proxy else type(value))
    assert [leaf for _, leaf in leaves_of(made)][1] == 2.0
    assert map_tensors(value, lambda t: t) is value
    assert map_tensors(value, lambda t: t, anew=True) is not value


def test_places_are_told_as_python_writes_them() -> None:
    value = {"a": [1, Rows(torch.zeros(()), Named(2, 3))]}
    assert [path for path, _ in leaves_of(value)] == [
        "['a'][0]",
        "['a'][1].x",
        "['a'][1].scale.x",
        "['a'][1].scale.scale",
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("known", "given"),
    [
        (2.0, 3.0),
        (2, True),
        (None, torch.zeros(())),
        (np.int64(2), np.int64(3)),
        (2 + 1j, 2 - 1j),
        (np.arange(2), np.arange(3)),
        ("sum", "mean"),
    ],
)
def test_what_is_a_constant_of_a_program_must_not_change(kind: Callable[..., Any], known: Any, given: Any) -> None:
    """Numbers in a dataclass or a mapping of a library were not seen: the program went on with the sample's."""
    one, other = (kind(x=torch.zeros(2), scale=value) for value in (known, given))
    constants = BatchConstants((one,), {})
    constants.check((kind(x=torch.ones(2), scale=known),))
    with pytest.raises(NnscalerError, match="and the program was compiled with") as caught:
        constants.check((other,))
    assert caught.value.code == "batch_differs"


def test_constants_by_name() -> None:
    constants = BatchConstants((), {"x": torch.zeros(2), "scale": 2.0, "of": {"a": 1, "b": float("nan")}})
    constants.check({"x": torch.ones(2), "of": {"b": float("nan"), "a": 1}, "scale": 2.0, "else": 1})
    constants.check({"x": torch.ones(2)})  # what is left out is what the program has
    with pytest.raises(NnscalerError, match=r"the batch has scale = None, and the program was compiled with 2\.0"):
        constants.check({"x": torch.ones(2), "scale": None})


def scaled(x: Tensor, scale: float = 1.0, *, mask: Any = None) -> Tensor:
    return x * scale if mask is None else x * mask


def test_constants_that_a_batch_lacks_are_forwards_defaults() -> None:
    x, takes = torch.zeros(2), inspect.signature(scaled)
    constants = BatchConstants((x,), {}, takes)
    for same in ((x,), (x, 1.0), {"x": x}, {"x": x, "scale": 1.0, "mask": None}, {"x": x, "else": 2}):
        constants.check(same)
    for other in ((x, 2.0), {"x": x, "scale": 2.0}, {"x": x, "mask": x}):
        with pytest.raises(NnscalerError, match=r"the batch has (scale = 2\.0|mask = a tensor), and the program was"):
            constants.check(other)
    with pytest.raises(NnscalerError, match=r"the batch has scale = 1\.0, and the program was compiled with 2\.0"):
        BatchConstants((x, 2.0), {}, takes).check((x,))


class Taking(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        return batch["x"].sum()


@pytest.mark.parametrize("kind", [dict, UserDict, Held])
def test_the_sample_batch_stays_as_it_is(kind: Callable[..., Any]) -> None:
    batch = kind(x=torch.zeros(3))
    sample = flatten_inputs(Taking(), (batch,))
    assert list(sample.tensors) == ["batch_x"] and isinstance(batch["x"], Tensor)


@pytest.mark.parametrize("kind", [dict, UserDict, Held, Rows])
def test_a_part_without_rows_has_none_in_any_container(kind: Callable[..., Any]) -> None:
    """The row that is there for its form was trained on where the batch is no dict or tuple."""
    collated = Collated(lambda samples: kind(x=torch.stack(samples)))
    (rows,) = tensors_in(collated(([torch.ones(3)], True)))
    assert rows.shape == (0, 3)


def test_whole_numbers_do_not_stand_for_complex_ones() -> None:
    """Neither is floating, and one was taken for the other."""
    ids = torch.arange(4)
    form = call_inputs(nn.Identity(), flatten_inputs(nn.Identity(), (ids,)))
    assert form.named((ids.int(),), {})["input"].dtype == torch.int32
    with pytest.raises(NnscalerError, match=r"of torch\.int64, and was given torch\.complex64"):
        form.named((ids + 0j,), {})


def test_rows_that_a_batch_lists_one_by_one_cannot_be_left_out() -> None:
    collated = Collated(lambda samples: {"images": samples, "y": torch.zeros(len(samples))})
    with pytest.raises(NnscalerError, match="makes 2 tensors of one row and 3 of two"):
        collated(([torch.ones(3)], True))


def test_texts_of_rows_in_a_list_are_no_rows_to_be_joined() -> None:
    """They are as many as the rows, of which a part has fewer."""
    rows = [(torch.full((2,), float(i)), f"row {i}") for i in range(4)]

    def collated(samples: list[Any]) -> dict[str, Any]:
        return {"names": [name for _, name in samples], "x": torch.stack([x for x, _ in samples])}

    check_collate(collated, rows)
    with pytest.raises(NnscalerError, match=r"\['x'\] is \[4, 2\] of 4 rows, and other values where they are joined"):
        check_collate(lambda samples: {**collated(samples), "x": collated(samples[::-1])["x"]}, rows)
