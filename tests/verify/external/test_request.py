"""Requests to verify programs of others: plain values, and what cannot be asked for."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from nnscaler.errors import NnscalerError
from verify.external.request import ExternalRequest, check_values, read_mesh, sized

FILE, LIBRARY, SCRIPT = (
    ExternalRequest("check.py"),
    ExternalRequest("hf:llama"),
    ExternalRequest(script="train.py --size 4"),
)


def refused(request: ExternalRequest) -> NnscalerError:
    with pytest.raises(NnscalerError) as caught:
        check_values(request)
    return caught.value


def test_kinds() -> None:
    for request, kind in ((FILE, "file"), (LIBRARY, "library"), (SCRIPT, "script")):
        assert request.kind == kind
        check_values(request)
    assert [r.name for r in (FILE, LIBRARY, SCRIPT)] == ["check.py", "hf:llama", "train.py --size 4"]


def test_a_request_is_plain_values() -> None:
    for request in (
        replace(FILE, ranks=4, mesh="dp=2,tp=2", dtypes=("float64", "bfloat16"), checkpoint=True),
        replace(LIBRARY, tp=(2, 4), settings=("attention_bias=true",), sweep_flags=True, emit_script="s.py"),
        SCRIPT,
    ):
        check_values(request)
        document = json.loads(json.dumps(asdict(request)))
        again = {name: tuple(v) if isinstance(v, list) else v for name, v in document.items()}
        assert ExternalRequest(**again) == request


# a request, what replaces its values, and what is said
WRONG: list[tuple[ExternalRequest, dict[str, Any], str]] = [
    (FILE, {"target": ""}, "nothing is named"),
    (FILE, {"script": "train.py"}, "both 'check.py' and the script"),
    (FILE, {"executor": "threads"}, "executor 'threads' is none of simulator, gloo, both"),
    (FILE, {"dtypes": ("float8",)}, "dtype float8 is none of"),
    (FILE, {"dtypes": ()}, "dtype none"),
    (FILE, {"dtypes": ("float64", "float64")}, "named twice"),
    (FILE, {"steps": 0}, "at least one step"),
    (FILE, {"ranks": 0}, "at least one step and one rank"),
    (FILE, {"tp": (2,)}, "--tp is not for a check file"),
    (FILE, {"settings": ("a=1",)}, "--set is not for a check file"),
    (FILE, {"sweep_flags": True}, "--sweep-flags is not for a check file"),
    (FILE, {"emit_script": "s.py"}, "--emit-script is not for a check file"),
    (FILE, {"level": "static", "checkpoint": True}, "--checkpoint is about a run"),
    (FILE, {"level": "static", "dtypes": ("float32",)}, "--dtype float32 is about a run"),
    (LIBRARY, {"ranks": 2}, "--ranks is not for a model of transformers"),
    (LIBRARY, {"mesh": "tp=2"}, "--mesh is not for a model of transformers"),
    (LIBRARY, {"tp": (2, 0)}, "are at least 1"),
    (LIBRARY, {"settings": ("attention_bias",)}, "is no key=value"),
    (SCRIPT, {"mesh": "dp=2"}, "--mesh is not for a script"),
    (SCRIPT, {"dtypes": ("float32",)}, "--dtype is not for a script"),
    (SCRIPT, {"executor": "gloo"}, "--executor is not for a script"),
    (SCRIPT, {"level": "static"}, "--level is not for a script"),
    (SCRIPT, {"checkpoint": True}, "--checkpoint is not for a script"),
    (FILE, {"mesh": "dp"}, "'dp' of the mesh 'dp' is no axis with a size"),
    (FILE, {"mesh": "dp=0"}, "is no axis with a size"),
    (FILE, {"mesh": "dp=--2"}, "is no axis with a size"),
    (FILE, {"mesh": "dp=2,dp=2"}, "names an axis twice: dp, dp"),
]


@pytest.mark.parametrize(("request_", "values", "told"), WRONG, ids=[told for _, _, told in WRONG])
def test_what_cannot_be_asked_for(request_: ExternalRequest, values: dict[str, Any], told: str) -> None:
    error = refused(replace(request_, **values))
    assert told in error.message
    assert error.code in ("usage", "bad_mesh")


def test_meshes() -> None:
    assert read_mesh("dp=2, tp=4") == (("dp", 2), ("tp", 4))
    assert read_mesh("dp=-1,tp=2") == (("dp", -1), ("tp", 2))
    assert sized([("dp", -1), ("tp", 2)], 8, "it") == (("dp", 4), ("tp", 2))
    assert sized([("dp", 2), ("tp", 2)], None, "it") == (("dp", 2), ("tp", 2))


@pytest.mark.parametrize(
    ("axes", "ranks", "told"),
    [
        ([("dp", 2), ("tp", 2)], 8, "it is for 4 ranks (dp=2 x tp=2), and there are 8"),
        ([("dp", -1), ("tp", 3)], 8, "its other sizes (3) do not divide 8 ranks"),
        ([("dp", -1), ("tp", -1)], 8, "leaves the sizes of several axes open: dp, tp"),
    ],
)
def test_a_mesh_that_does_not_fit(axes: list[tuple[str, int]], ranks: int, told: str) -> None:
    with pytest.raises(NnscalerError) as caught:
        sized(axes, ranks, "it")
    assert caught.value.code == "bad_mesh" and told in caught.value.message
