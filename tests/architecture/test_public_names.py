"""The front doors, frozen: a name is added or removed here first, on purpose."""

from __future__ import annotations

import importlib

import pytest

FRONT_DOORS = {
    "nnscaler": [
        "AutoPlan",
        "Checkpoints",
        "Engine",
        "LossScaler",
        "NnscalerError",
        "Plan",
        "Precision",
        "Program",
        "Trainer",
        "__version__",
        "export_weights",
        "load_weights",
        "parallelize",
        "parallelize_part",
        "register_op",
        "start",
    ],
    "verify": [
        "Check",
        "ExternalProgram",
        "Finding",
        "Report",
        "Verdict",
        "merge",
        "verify_external",
        "verify_op",
        "verify_plan",
        "vouch",
    ],
    "op_registry": [
        "Annotation",
        "AnnotationError",
        "AxisShard",
        "BoundAnnotation",
        "BoundDim",
        "BoundOperand",
        "Call",
        "DType",
        "Expression",
        "Factor",
        "NnscalerError",
        "OperatorSpec",
        "Refusal",
        "Registry",
        "SchemaParameter",
        "Shard",
        "SourceLocation",
        "TensorArgument",
        "bind",
        "bind_call",
        "block_start",
        "by_index",
        "check",
        "default_registry",
        "index",
        "linear_sets",
        "local_size",
        "localise",
        "name_of",
        "operator_of",
        "parse",
        "print_annotation",
        "register_op",
        "shard_of",
        "splittable",
    ],
}


@pytest.mark.parametrize("package", FRONT_DOORS)
def test_public_names_are_frozen(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(FRONT_DOORS[package])


@pytest.mark.parametrize("package", FRONT_DOORS)
def test_public_names_exist(package: str) -> None:
    module = importlib.import_module(package)
    for name in FRONT_DOORS[package]:
        assert getattr(module, name) is not None
