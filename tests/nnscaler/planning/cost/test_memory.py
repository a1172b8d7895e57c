"""Bytes of parameters and their optimizer."""

from __future__ import annotations

from nnscaler.planning.sharding.parameter_and_activation_memory import ParameterMemory, parameter_memory


def test_adam() -> None:
    assert parameter_memory(1000, "float32") == ParameterMemory(4000, 4000, 8000)
    # two states and a master copy in float32, and gradients summed in float32
    assert parameter_memory(1000, "bfloat16") == ParameterMemory(2000, 4000, 12000)
    assert parameter_memory(1000, "float64").total == 8000 + 8000 + 8000


def test_a_frozen_parameter_has_its_value_only() -> None:
    assert parameter_memory(10, "float16", trainable=False) == ParameterMemory(20, 0, 0)
