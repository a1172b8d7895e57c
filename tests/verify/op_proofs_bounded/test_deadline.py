"""A question that Z3 does not come to an end with is ended with the time of its operator."""

from __future__ import annotations

import time

import z3  # type: ignore[import-untyped]

from verify.evidence.smt.decide_equality import answer_of


def test_the_solver_ends_at_a_deadline() -> None:
    x, y, z = z3.Ints("x y z")
    solver = z3.Solver()
    solver.add(x * x * x + y * y * y + z * z * z == 114, x > 100, y > 100)  # nobody knows
    started = time.thread_time()
    assert answer_of(solver, started + 0.5) == z3.unknown
    assert 0.4 < time.thread_time() - started < 60
    easy = z3.Solver()
    easy.add(x > 1, x < 1)
    assert answer_of(easy, time.thread_time() + 60) == z3.unsat
