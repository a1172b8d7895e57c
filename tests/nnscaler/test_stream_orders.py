"""Orders with updates: which versions they read, how they go on, and what is refused of them."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnscaler.instructions import (
    Instruction,
    StagePasses,
    batches_written,
    check_order,
    going_on,
    read_instruction,
    versions_read,
)
from nnscaler.scheduling.pipedream import delays, pipedream, written_for
from nnscaler.scheduling.timeline import simulate


def passes(written: int, staleness: int, versions: int | None = None) -> dict[int, StagePasses]:
    return {0: StagePasses((written,), "must", staleness, staleness + 1 if versions is None else versions)}


def first_stage(stages: int, batches: int) -> list[str]:
    return [str(i) for i in pipedream(stages, 1, batches).orders[0]]


@pytest.mark.parametrize("stages", range(1, 6))
def test_versions_are_those_of_delayed_sgd(stages: int) -> None:
    for batches in (1, stages, stages + 1, 3 * stages + 2):
        made = pipedream(stages, 1, batches)
        for stage, order in enumerate(made.orders):
            read = versions_read(order, stage)
            assert read == {(k,): max(0, k - (stages - 1 - stage)) for k in range(batches)}
            kept = _most_live(order, read)
            assert kept == min(batches, stages - stage), "versions that are read again, and the newest one"


def _most_live(order: tuple[Instruction, ...], read: dict[tuple[int, ...], int]) -> int:
    """Count, from the definition, the versions between the oldest that a batch on its way has read and the newest."""
    made, live, most = 0, dict[tuple[int, ...], int](), 1
    for i in order:
        if i.kind == "F":
            live[i.at] = read[i.at]
        elif i.kind == "U":
            made += 1
        most = max(most, made - min(live.values(), default=made) + 1)
        if i.kind == "B":
            del live[i.at]
    return most


@pytest.mark.parametrize("stages", range(1, 5))
def test_a_stream_goes_on_as_it_is_written(stages: int) -> None:
    made = pipedream(stages, 1, written_for(stages))
    for batches in range(4 * stages):
        longer = pipedream(stages, 1, batches)
        for device, order in enumerate(made.orders):
            asked: list[int] = []
            found = tuple(going_on(order, partial(_more, asked, batches)))
            assert found == longer.orders[device]
            assert asked == list(range(batches + 1)), "each batch is asked for once, and nothing after the last"


def _more(asked: list[int], batches: int, batch: int) -> bool:
    asked.append(batch)
    return batch < batches


def test_no_device_waits_once_the_pipeline_is_full() -> None:
    """The idle time is that of filling it, (p - 1) (F + B) on the first device, for any number of batches."""
    for stages in (2, 3, 4):
        for batches in (stages, 4 * stages, 16 * stages):
            timeline = simulate(pipedream(stages, 1, batches))
            assert timeline.idle == tuple(3.0 * (stages - 1 - d) for d in range(stages))
            assert timeline.peak_live == tuple(stages - d for d in range(stages))


def test_words_are_read_and_written() -> None:
    order = pipedream(3, 1, 4).orders[0]
    assert tuple(map(read_instruction, map(str, order))) == order
    assert batches_written(map(str, order)) == 4
    _, mistakes = check_order([str(i) for i in order], passes(4, 2))
    assert not mistakes


WRONG = [
    # (words of the first of three stages, versions kept, what is said)
    ("F0.0 F0.1 F0.2 B0.0 U0.0 F0.3 B0.1 U0.1 B0.2 U0.2 B0.3 U0.3", 2, "B0.2 when version 0, which F0.2 read"),
    ("F0.0 F0.1 F0.2 B0.0 U0.0 F0.3 B0.1 U0.1 B0.2 U0.2 B0.3 U0.3", 1, "B0.1 when version 0, which F0.1 read"),
    ("F0.0 F0.1 F0.2 B0.0 F0.3 U0.0 B0.1 U0.1 B0.2 U0.2 B0.3 U0.3", 3, "F0.3 on version 0"),
    ("F0.0 F0.1 B0.0 U0.0 F0.2 B0.1 U0.1 F0.3 B0.2 U0.2 B0.3 U0.3", 3, "F0.2 on version 1"),
    ("F0.0 F0.1 F0.2 B0.0 U0.0 F0.3 B0.1 B0.2 U0.2 B0.3 U0.3", 3, "never runs U0.1"),
    ("F0.0 F0.1 F0.2 B0.0 U0.0 F0.3 U0.1 B0.1 B0.2 U0.2 B0.3 U0.3", 3, "U0.1 before B0.1"),
    ("F0.0 F0.1 F0.2 B0.0 U0.0 F0.3 B0.1 U0.1 U0.1 B0.2 U0.2 B0.3 U0.3", 3, "U0.1 twice"),
    ("F0.0 F0.1 F0.2 B0.0 U0.0 F0.3 B0.1 B0.2 U0.2 U0.1 B0.3 U0.3", 3, "U0.2 as update 1"),
    ("F0.0 F0.1 F0.2 B0.0 U0.0 B0.1 F0.3 U0.1 B0.2 U0.2 B0.3 U0.3", 3, "where the stream goes on"),
    ("F0.0 F0.1 F0.2 I0.0 U0.0 W0.0 F0.3 B0.1 U0.1 B0.2 U0.2 B0.3 U0.3", 3, "U0.0 before W0.0"),
]


@pytest.mark.parametrize(("text", "versions", "said"), WRONG)
def test_wrong_streams_are_refused(text: str, versions: int, said: str) -> None:
    words = text.split()
    _, mistakes = check_order(words, passes(batches_written(words), 2, versions))
    assert mistakes and said in mistakes[0].message, mistakes


def test_a_step_has_no_updates() -> None:
    _, mistakes = check_order(["F0.0", "B0.0", "U0.0"], {0: StagePasses((1,))})
    assert [m.kind for m in mistakes] == ["unwanted"]


def test_split_backwards_may_be_updated_after_their_second_half() -> None:
    words = "F0.0 F0.1 F0.2 I0.0 W0.0 U0.0 F0.3 I0.1 W0.1 U0.1 I0.2 W0.2 U0.2 I0.3 W0.3 U0.3".split()
    _, mistakes = check_order(words, passes(4, 2))
    assert not mistakes


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(9)), st.integers(0, 2), st.integers(1, 3))
def test_versions_against_their_definition(places: list[int], staleness: int, versions: int) -> None:
    """Three batches in any order: what is accepted of the written part reads right versions, by a run of it."""
    words = [f"{'FBU'[n % 3]}0.{n // 3}" for n in places]
    _, mistakes = check_order(words, passes(3, staleness, versions))
    made, held, right = 0, dict[str, int](), True
    for word in words:
        kind, batch = word[0], word[-1]
        if kind == "F":
            right &= made == max(0, int(batch) - staleness)
            held[batch] = made
        elif kind == "B":
            right &= batch in held and made - held[batch] < versions
            held[f"B{batch}"] = made
        else:
            right &= f"B{batch}" in held and int(batch) == made
            made += 1
    if not right:
        assert mistakes
    elif mistakes:
        assert all("goes on" in m.message for m in mistakes)


def test_delays_add_up_to_the_formula() -> None:
    assert delays(4) == (3, 2, 1, 0) and delays(1) == (0,)
