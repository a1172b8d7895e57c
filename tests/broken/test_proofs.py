"""Programs that were once proved by their text, and whose ranks compute something else. Random edits found them, or an
audit; each takes edits that fit each other, so that the text agrees with itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from verify.self_test.programs.judge_mutant import Execution, read_statically
from verify.self_test.programs.right_programs import TINY, build


@dataclass(frozen=True)
class Wrong:
    """`program`: of `TINY`; `changed`: (what stands in the first role, what stands there instead); `says`: of the
    first finding."""

    name: str
    program: str
    changed: tuple[tuple[str, str], ...]
    says: str


PROGRAMS = (
    Wrong(
        "a dim cut by sections becomes a factor of another one",
        "shuffled",
        (
            ('"w": Parameter("w", (), "float32", {}),', '"w": Parameter("w", (), "float32", {}, reduce=("tp",)),'),
            ('Input("x", {})', 'Input("x", {"tp": Sharded(2, sections=(2, 4))})'),
            ('return {"loss": sum_1}', 'whole = comm.invariant(sum_1, self.tp)\n        return {"loss": whole}'),
        ),
        "pixel_shuffle",
    ),
    Wrong(
        "classes cut by sections, and labels counted from where a contiguous shard begins",
        "losses",
        (
            (
                '(20, 16), "float32", {"tp": Sharded(0)}, reduce=("dp",)),\n    }',
                '(20, 16), "float32", {"tp": Sharded(0, sections=(18, 2))}, reduce=("dp",)),\n    }',
            ),
        ),
        "ce_pick",
    ),
)


@pytest.mark.parametrize("wrong", PROGRAMS, ids=[w.name for w in PROGRAMS])
def test_it_is_not_proved(tmp_path: Path, wrong: Wrong) -> None:
    right = Execution(build(TINY[wrong.program], tmp_path), tmp_path)
    sources = dict(right.base.subject.program.sources)
    for old, new in wrong.changed:
        assert sources["role_0.py"].count(old) == 1, sources["role_0.py"]
        sources["role_0.py"] = sources["role_0.py"].replace(old, new)
    answer = read_statically(sources, right.base.traced.graph)
    assert answer.refuted and wrong.says in answer.said, answer.said
    assert right.judge(sources).answer.refuted, "the ranks compute the same: there is nothing to find"
