"""Programs whose backwards run in two halves: right orders are proved and run exactly, wrong ones are refuted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nnscaler.runtime import ExecutorSettings, RankExecutor, Simulator
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.transform.plan import RecomputeStep
from tests.halves import Place, adjacent, drawn, late, rewritten, some, zero_bubble
from tests.sampling import every
from verify.self_test.programs import models_of_real_bugs, tiny_models
from verify.self_test.programs.judge_mutant import Execution, read_statically
from verify.self_test.programs.mutants.editable_program_and_edits import MutationOperator, take_apart
from verify.self_test.programs.mutants.mutant import apply_edits
from verify.self_test.programs.mutants.schedule import OPERATORS
from verify.self_test.programs.right_programs import TINY, SmallModel, Spec, build


class Deep(tiny_models.Tied):
    """Enough layers for three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(tiny_models.WIDTH, tiny_models.WIDTH) for _ in range(3))


KINDS = [operator.kind for operator in OPERATORS]
ORDERS = OPERATORS[: KINDS.index("messages to the wrong rank")]  # the others leave the order as it is
HALVES = ORDERS[KINDS.index("second half dropped") :]
TEXT = SmallModel(models_of_real_bugs.Transformer, models_of_real_bugs.text)
TIED = SmallModel(tiny_models.Tied, tiny_models.text)
AGAIN = RecomputeStep(("blocks.1.*", "blocks.1"))
SPECS = {
    "one": Spec("Tied", "pp=2", 2, 1, small=TIED),
    "long": Spec("Tied", "pp=2", 2, 4, small=TIED),
    "staged": TINY["staged"],
    "tied": TINY["tied"],
    "zero": Spec("Tied", "dp=2,zero=2,pp=2", 4, 2, small=TIED),
    "rested": Spec("Transformer", "dp=2,zero=3,pp=2", 4, 4, small=TEXT),
    "three": Spec("Deep", "pp=3", 3, 4, small=SmallModel(Deep, tiny_models.text)),
    "experts": Spec("moe", "tp=2,pp=2", 4, 2),
    "dropped": Spec("gpt", "pp=2", 2, 3, 0.25, steps=(AGAIN,)),
    "recomputed": Spec("Transformer", "tp=2,pp=2", 4, 2, small=TEXT, steps=(AGAIN,)),
    "recomputed, rested": Spec("Transformer", "dp=2,zero=3,pp=2", 4, 2, small=TEXT, steps=(AGAIN,)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Execution]:
    known: dict[str, Execution] = {}

    def make(name: str) -> Execution:
        if name not in known:
            folder = tmp_path_factory.mktemp("program")
            known[name] = Execution(build(SPECS[name], folder), folder, apart=False)
        return known[name]

    return make


def in_halves(right: Execution, place: Place) -> dict[str, str]:
    return {file: rewritten(text, place) for file, text in right.base.subject.program.sources.items()}


def last_stage(order: list[str]) -> list[str]:
    return some(late, (1,))(order)


PLACES = (adjacent, late, zero_bubble, last_stage)


@pytest.mark.parametrize("name", every(4, SPECS))
def test_right_orders(made: Callable[[str], Execution], name: str) -> None:
    """The step, its gradients and its losses are those of the model, to float64's precision."""
    right = made(name)
    for place in PLACES[list(SPECS).index(name) % 2 :: 2]:
        sources = in_halves(right, place)
        assert any(" W" in text for text in sources.values())
        read = read_statically(sources, right.base.subject.program.graph)
        assert not read.refuted and not read.undecided, read.said
        answer = right.judge(sources).answer
        assert not answer.refuted and not answer.undecided, (place.__name__, answer.said)


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_a_second_half_may_stand_anywhere(made: Callable[[str], Execution], data: st.DataObject) -> None:
    right = made("staged")
    sources = in_halves(right, drawn(lambda n: data.draw(st.integers(0, n - 1))))
    read = read_statically(sources, right.base.subject.program.graph)
    assert not read.refuted and not read.undecided, read.said
    assert not right.judge(sources).answer.refuted


@pytest.mark.long
@pytest.mark.parametrize("place", [None, adjacent, zero_bubble], ids=["whole", "adjacent", "zero bubble"])
def test_wrong_orders_are_refuted_by_the_text(made: Callable[[str], Execution], place: Place | None) -> None:
    """Mutants of a program whose backwards are whole, and of programs whose are not."""
    right = made("long")
    subject = right.base.subject
    if place is not None:
        subject = take_apart("long", "", replace(subject.program, sources=in_halves(right, place)))
    found: Counter[str] = Counter()
    for operator in ORDERS:
        places = operator.places(subject)
        for edits in places[:: max(1, len(places) // 4)]:
            changed = apply_edits(subject.program.sources, edits)
            read = read_statically({**subject.program.sources, **changed}, subject.program.graph)
            assert read.refuted, (operator.kind, str(edits[0]))
            found[operator.kind] += 1
    assert len(found) == len(ORDERS) and sum(found.values()) >= 40


@pytest.mark.parametrize("operator", HALVES[::3], ids=lambda o: o.kind)
def test_wrong_orders_are_refuted_by_running(made: Callable[[str], Execution], operator: MutationOperator) -> None:
    """Or the runtime refuses to begin: nothing is compared that a wrong order computed."""
    right = made("long")
    for edits in operator.places(right.base.subject)[:1]:
        sources = right.base.subject.program.sources
        answer = right.judge({**sources, **apply_edits(sources, edits)}).answer
        assert answer.refuted, (operator.kind, str(edits[0]))


def test_a_wrong_gradient_is_localised(made: Callable[[str], Execution]) -> None:
    """A reduction of an input's gradient is left out: it happens in I, and is found where it would be in B."""
    right = made("recomputed")
    sources = in_halves(right, late)
    line = next(s for s in right.base.subject.statements("comm.replicate") if s.stage == 1)
    wrong = {
        **sources,
        line.file: sources[line.file].replace(line.call, f"{line.arguments[0]}.view_as({line.arguments[0]})"),
    }
    assert wrong != sources
    answer = right.judge(wrong, localised=True).answer
    assert answer.refuted and "tensor_gradient_differs" in answer.codes, answer.codes
    assert f"`{line.arguments[0]}`" in answer.said or f"`{line.targets[0]}`" in answer.said, answer.said


Seen = dict[tuple[int, int, int, str, str], list[Tensor]]  # rank, stage, micro-batch, phase, name


def observed(right: Execution, sources: dict[str, str]) -> Seen:
    program = right.base.subject.program
    path = right.write(sources)
    roles = {rank: load_role(path / role.file) for role in program.manifest.roles for rank in role.ranks}
    found: Seen = {}

    def run(communicator: Communicator) -> None:
        rank = communicator.rank

        def observe(stage: int, micro: int, phase: str, name: str, value: Tensor) -> None:
            found.setdefault((rank, stage, micro, phase, name), []).append(value.detach().clone())

        settings = ExecutorSettings("float64", dropout=False)
        executor = RankExecutor(roles[rank], rank, communicator, program.state, settings, observe=observe)
        executor.step(program.inputs)

    Simulator(program.manifest.ranks).run(run)
    return found


@pytest.mark.parametrize("name", ["recomputed, rested", "tied"])
def test_each_gradient_is_observed_once(made: Callable[[str], Execution], name: str) -> None:
    right = made(name)
    whole = observed(right, dict(right.base.subject.program.sources))
    split = observed(right, in_halves(right, zero_bubble))
    assert split.keys() == whole.keys() and any(phase == "backward" for *_, phase, _ in whole)
    for key, values in whole.items():
        assert len(values) == len(split[key]), key
        torch.testing.assert_close(split[key], values, rtol=1e-12, atol=1e-12)
