"""The facts of built-in operators against torch, on every sample call: no table is right because it says so."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from op_registry.builtin import SPECS
from op_registry.call import Call
from op_registry.samples import SAMPLES
from op_registry.torch_schema import is_factory

from tests.op_registry.builtin.oracle import Whole, run, whole

NAMES = {spec.name for spec in SPECS if spec.name.startswith("aten.")}


def wholes(names: set[str]) -> Iterator[Whole]:
    """The run of every sample of these operators."""
    for number, sample in enumerate(SAMPLES):
        if sample.operator in names:
            yield whole(number)


def made_from_nothing(call: Call) -> bool | None:
    """Whether a result of the call does not lie where its tensors do. None: it asks for their values."""
    inputs = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in call.tensors()]
    try:
        outputs = run(call, inputs, {})
    except RuntimeError:
        return None
    return any(output is not None and output.device.type == "cpu" for output in outputs)


def test_factories_are_what_makes_tensors_from_nothing() -> None:
    """A program gives these, and no others, the device of its rank. Where the numbers are tensors, torch's kernels and
    its meta kernels differ in what they take for the device, which is why it is told."""
    runs = list(wholes(NAMES))
    numbers = {w.spec.name for w in runs if is_factory(w.spec.name) and w.inputs}
    assert {name.split(".")[1] for name in numbers} == {"linspace", "logspace"}
    found = {w.spec.name for w in runs if made_from_nothing(w.call)}
    assert found == {name for name in NAMES if is_factory(name)} - numbers
    assert {"aten.bartlett_window.default", "aten.kaiser_window.beta", "aten.range.step"} <= found
