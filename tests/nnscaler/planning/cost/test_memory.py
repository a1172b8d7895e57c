"""Bytes of parameters, their optimizer, and what backward keeps."""

from __future__ import annotations

from collections.abc import Callable

from nnscaler.planning.cost.memory import ParameterMemory, kept_bytes, parameter_memory
from nnscaler.transform.signature import Signature

Make = Callable[..., Signature]


def test_adam() -> None:
    assert parameter_memory(1000, "float32") == ParameterMemory(4000, 4000, 8000)
    # two states and a master copy in float32, and gradients summed in float32
    assert parameter_memory(1000, "bfloat16") == ParameterMemory(2000, 4000, 12000)
    assert parameter_memory(1000, "float64").total == 8000 + 8000 + 8000


def test_other_optimizers_and_frozen_parameters() -> None:
    assert parameter_memory(10, "float32", optimizer="sgd") == ParameterMemory(40, 40, 0)
    assert parameter_memory(10, "float32", optimizer="momentum") == ParameterMemory(40, 40, 40)
    assert parameter_memory(10, "float16", optimizer="sgd") == ParameterMemory(20, 40, 40)
    assert parameter_memory(10, "float16", trainable=False) == ParameterMemory(20, 0, 0)


def test_zero() -> None:
    whole = parameter_memory(800, "float32")
    first = parameter_memory(800, "float32", optimizer_elements=100)
    second = parameter_memory(800, "float32", optimizer_elements=100, gradient_elements=100)
    assert first == ParameterMemory(3200, 3200, 800) and second == ParameterMemory(3200, 400, 800)
    assert parameter_memory(100, "float32") == ParameterMemory(400, 400, 800)
    assert (whole + first).total == whole.total + first.total


def test_kept(make: Make) -> None:
    linear = make("aten.linear.default", [(6, 35), (4, 35), (4,)], (6, 4))
    shapes = [(6, 35), (4, 35), (4,)]
    assert kept_bytes(linear, shapes, [True, True, True]) == (840, 560, 0)
    # a frozen weight: the input is not read, and the weight is
    assert kept_bytes(linear, shapes, [True, False, False]) == (0, 560, 0)
    assert kept_bytes(linear, [(3, 35), (4, 35), (4,)], [False, True, False], ["bfloat16"] * 3) == (210, 0, 0)
    gelu = make("aten.gelu.default", [(6, 35)], (6, 35))
    assert kept_bytes(gelu, [(6, 35)], [True]) == (840,)
    add = make("aten.add.Tensor", [(6, 35), (35,)], (6, 35))
    assert kept_bytes(add, [(6, 35), (35,)], [True, True]) == (0, 0)
    view = make("aten.transpose.int", [(6, 35)], (35, 6), 0, 1)
    assert kept_bytes(view, [(6, 35)], [True]) == (0,)
