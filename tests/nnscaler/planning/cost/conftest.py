"""Clusters with round numbers, and signatures of single calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from op_registry.call import Call, TensorArgument
from op_registry.registry import default_registry

from nnscaler.ir.operation_annotations import Signature, signature_of
from nnscaler.planning.cluster.description import Cluster, Device, Level


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Two hosts of eight: 100 GB/s and 1 us inside, 10 GB/s and 10 us across; a launch is free."""
    device = Device("d", 10**10, {"float32": 1e13, "bfloat16": 1e14}, 1e12, 0.0)
    return Cluster("c", device, (Level("inside", 8, 100e9, 1e-6), Level("across", 2, 10e9, 10e-6)))


Make = Callable[..., Signature]


@pytest.fixture(scope="session")
def make() -> Make:
    """make(operator, inputs, output, *more arguments): the signature of a call on float32 tensors of these shapes; an
    input (shape, dtype) has another dtype."""

    def made(
        operator: str, inputs: list[Any], output: tuple[int, ...], *more: Any, dtype: str = "float32"
    ) -> Signature:
        described = [i if isinstance(i[-1], str) else (i, "float32") for i in map(tuple, inputs)]
        tensors = tuple(TensorArgument(i, shape, name) for i, (shape, name) in enumerate(described))
        call = Call(operator, (*tensors, *more), {}, (TensorArgument(0, output, dtype),))
        return signature_of(call, default_registry())

    return made
