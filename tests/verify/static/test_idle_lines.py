"""Lines that change nothing: what is proved of a program holds for all sizes still, unless they name some."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sampling import only
from verify.programs.proof import Proof, ProofOptions, prove_program
from verify.self_test.programs.corpus import BASES, build
from verify.self_test.programs.mutants.role_source import RightProgram


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> RightProgram:
    return build(BASES["sharded stages"], Path(tmp_path_factory.mktemp("idle"))).subject


@pytest.fixture(scope="module")
def unedited(sharded: RightProgram) -> Proof:
    program = sharded.program
    return prove_program(program.sources, program.graph, options=ProofOptions(cached=False))


@pytest.mark.parametrize(
    ("edit", "line"),
    only(
        (0, 4),
        [
            ("gelu = aten.slice(gelu, 0, 0, 6)", "gelu = aten.slice(gelu, 0, 0, 6)"),
            ("gelu = aten.view(gelu, {shape})", "gelu = aten.view(gelu"),
            ("unread = aten.add(gelu, gelu)", "unread = aten.add(gelu, gelu)"),
            ("gelu = aten.squeeze(aten.unsqueeze(gelu, 0), 0)", "aten.squeeze("),
            ("gelu = aten.transpose(aten.transpose(gelu, 0, 1), 1, 0)", ""),
            ("gelu = aten.clone(gelu)", ""),
            ("unread = aten.exp(gelu)", ""),
        ],
    ),
)
def test_an_idle_line_holds_for_the_sample_only_if_it_has_sizes(
    edit: str, line: str, sharded: RightProgram, unedited: Proof
) -> None:
    found = sharded
    graph, sources = found.program.graph, dict(found.program.sources)
    file = next(name for name, text in sources.items() if " gelu = " in text)
    width = next(op for op in graph.operations if op.operator == "aten.gelu.default").outputs[0]
    edit = edit.format(shape=(-1, *graph.tensors[width].shape[1:-1], graph.tensors[width].shape[-1] // 2))
    sources[file], count = re.subn(r"(        )(gelu = .*)", rf"\1\2\n\1{edit}", sources[file], count=1)
    assert count == 1
    whole = unedited
    proof = prove_program(sources, graph, options=ProofOptions(cached=False))
    assert proof.holds and proof.sizes is not None and whole.sizes is not None
    assert whole.all_sizes or any(not s.blocker for s in whole.sizes.symbols)
    if line:
        assert proof.sizes.text.startswith("holds for the sizes of the sample\n")
        assert all(line in s.blocker and file in s.blocker for s in proof.sizes.symbols)
    else:
        assert proof.sizes == whole.sizes
