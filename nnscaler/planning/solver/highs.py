"""Solve the choice problem as a linear and as an integer program by HiGHS, for what is too wide to eliminate.

The relaxation is the local polytope (Schlesinger 1976): one variable per strategy and one per pair of strategies of an
edge, whose sums agree with the strategies' variables. Its bound is computed again from the multipliers of those rows,
so that it holds whatever the tolerances of the program are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import highspy
import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.solver.drop_dominated_strategies import merge_edges
from nnscaler.planning.solver.problem import ChoiceProblem, Infeasible, Solution, Table, evaluate, memory_of

SLACK = 1e-6  # relative: what the tolerances of an integer program may hide


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The result of the linear program.

    bound        a lower bound of the value
    multiplier   the price per unit of memory
    weights      by node, [k]: the strategies' variables
    """

    bound: float
    multiplier: float
    weights: tuple[Table, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """A program as arrays for HiGHS.

    cost            [columns]: +inf where a column is forbidden
    rows, columns   [entries]: place of each entry of the matrix
    values          [entries]
    lower, upper    [rows]: right-hand sides
    starts          first column of each node
    pairs           of each edge, its nodes and its first column
    """

    cost: Table
    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: Table
    lower: Table
    upper: Table
    starts: tuple[int, ...]  # first column of each node
    pairs: tuple[tuple[int, int, int], ...]  # of each edge: its nodes and its first column


def columns_of(problem: ChoiceProblem) -> int:
    """Return how many columns the program has."""
    return sum(problem.sizes) + sum(edge.cost.size for edge in problem.edges)


def relax(problem: ChoiceProblem, budget: float | None = None, seconds: float = 60.0) -> Relaxation:
    """Return the linear relaxation, with a lower bound that holds even where `seconds` did not suffice.

    Raises `Infeasible` where the relaxation shows that no choice is legal within the budget.
    """
    program = _program(problem, budget)
    solver, scale = _load(program, seconds)
    _run(solver)
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        raise Infeasible(inf, inf if budget is None else budget)
    found = solver.getSolution()
    duals = np.array(found.row_dual) / scale if found.dual_valid else np.zeros(len(program.lower))
    values = np.array(found.col_value) if found.value_valid else np.zeros(len(program.cost))
    ends = [*program.starts[1:], program.starts[-1] + len(problem.nodes[-1].cost)]
    weights = tuple(values[start:end] for start, end in zip(program.starts, ends, strict=True))
    bound, multiplier = _dual_bound(problem, program, duals, budget)
    return Relaxation(bound, multiplier, weights)


def optimise(
    problem: ChoiceProblem, budget: float | None = None, seconds: float = 60.0, start: Sequence[int] | None = None
) -> Solution | None:
    """Return the best choices that the integer program finds in `seconds`, and its bound; None where it finds none.

    Raises `Infeasible` where no choice is legal within the budget. `start` are choices to begin with.
    """
    program = _program(problem, budget)
    solver, scale = _load(program, seconds)
    count = sum(problem.sizes)
    kinds = np.full(count, highspy.HighsVarType.kInteger)
    solver.changeColsIntegrality(count, np.arange(count, dtype=np.int32), kinds)
    if start is not None:
        solver.setSolution(_as_columns(problem, program, start))
    _run(solver)
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        raise Infeasible(inf, inf if budget is None else budget)
    information = solver.getInfo()
    bound = information.mip_dual_bound / scale
    values = np.array(solver.getSolution().col_value)
    if not len(values) or not np.isfinite(information.objective_function_value):
        return None
    choices = tuple(
        int(values[first : first + size].argmax()) for first, size in zip(program.starts, problem.sizes, strict=True)
    )
    value = evaluate(problem, choices)
    if value == inf or (budget is not None and memory_of(problem, choices) > budget):
        return None
    magnitude = float(np.abs([value, bound]).max()) if np.isfinite(bound) else 0.0
    return Solution(choices, value, min(value, bound - SLACK * magnitude), "integer program")


def _program(problem: ChoiceProblem, budget: float | None) -> _Program:
    """Return the program: a row per node (its strategies sum to one), two blocks of rows per edge, and one for memory,
    if any."""
    merged = merge_edges(problem.edges)
    sizes = np.array(problem.sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    costs = [node.cost for node in problem.nodes]
    rows = [np.repeat(np.arange(len(sizes)), sizes)]
    columns = [np.arange(starts[-1])]
    values = [np.ones(starts[-1])]
    pairs = []
    column, row = int(starts[-1]), len(sizes)
    for (first, second), table in merged.items():
        pairs.append((first, second, column))
        # [k of first, k of second]: the columns of the edge's pairs
        inner = column + np.arange(table.size).reshape(table.shape)
        for node, grid in ((first, inner), (second, inner.T)):
            count, width = problem.sizes[node], grid.size // problem.sizes[node]
            rows += [np.repeat(np.arange(row, row + count), width), np.arange(row, row + count)]
            columns += [grid.ravel(), starts[node] + np.arange(count)]
            values += [np.ones(grid.size), np.full(count, -1.0)]
            row += count
        costs.append(table.ravel())
        column += table.size
    # [rows]: all are equations but that of memory
    lower = np.concatenate([np.ones(len(sizes)), np.zeros(row - len(sizes))])
    upper = lower.copy()
    if budget is not None:
        unit = abs(budget) or 1.0
        memory = np.concatenate([np.zeros(len(n.cost)) if n.memory is None else n.memory for n in problem.nodes])
        rows.append(np.full(starts[-1], row))
        columns.append(np.arange(starts[-1]))
        values.append(memory / unit)
        lower, upper = np.append(lower, -inf), np.append(upper, budget / unit)
    return _Program(
        np.concatenate(costs),
        np.concatenate(rows).astype(np.int32),
        np.concatenate(columns).astype(np.int32),
        np.concatenate(values),
        lower,
        upper,
        tuple(int(first) for first in starts[:-1]),
        tuple(pairs),
    )


def _load(program: _Program, seconds: float) -> tuple[highspy.Highs, float]:
    """HiGHS with the program, and the factor that its costs were multiplied by: its tolerances are absolute."""
    finite = np.isfinite(program.cost)
    largest = float(np.abs(program.cost[finite]).max(initial=0.0)) or 1.0
    scale = 1000.0 / largest
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.cost), len(program.lower)
    model.col_cost_ = np.where(finite, program.cost, 0.0) * scale
    model.col_lower_ = np.zeros(len(program.cost))
    model.col_upper_ = np.where(finite, 1.0, 0.0)
    model.row_lower_, model.row_upper_ = program.lower, program.upper
    order = np.lexsort((program.columns, program.rows))
    counts = np.bincount(program.rows, minlength=len(program.lower))
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    model.a_matrix_.index_ = program.columns[order]
    model.a_matrix_.value_ = program.values[order]
    solver = highspy.Highs()
    for option, setting in (
        ("output_flag", False),
        ("threads", 1),
        ("random_seed", 0),
        ("time_limit", float(seconds)),
        ("mip_rel_gap", 0.0),
    ):
        solver.setOptionValue(option, setting)
    solver.passModel(model)
    return solver, scale


def _run(solver: highspy.Highs) -> None:
    """Run HiGHS in a thread of its own: in the main thread, Ctrl-C would wait for its end."""
    solver.HandleUserInterrupt = True
    thread = solver.startSolve()
    try:
        thread.join()
    except BaseException:
        solver.cancelSolve()
        thread.join()
        raise


def _dual_bound(problem: ChoiceProblem, program: _Program, duals: Table, budget: float | None) -> tuple[float, float]:
    """Return the bound that the multipliers of the edges' rows, and of memory, prove: minima of nodes and edges
    apart."""
    multiplier = 0.0
    unary = [node.cost.copy() for node in problem.nodes]
    if budget is not None:
        multiplier = max(0.0, -float(duals[-1])) / (abs(budget) or 1.0)
        for index, node in enumerate(problem.nodes):
            if node.memory is not None:
                unary[index] += multiplier * node.memory
    bound = -multiplier * budget if budget is not None else 0.0
    row = len(problem.nodes)
    for first, second, column in program.pairs:
        shape = (len(unary[first]), len(unary[second]))
        left, right = duals[row : row + shape[0]], duals[row + shape[0] : row + sum(shape)]
        row += sum(shape)
        table = program.cost[column : column + shape[0] * shape[1]].reshape(shape)
        unary[first] += left
        unary[second] += right
        bound += float((table - left[:, None] - right[None, :]).min())
    return bound + sum(float(costs.min()) for costs in unary), multiplier


def _as_columns(problem: ChoiceProblem, program: _Program, choices: Sequence[int]) -> highspy.HighsSolution:
    values = np.zeros(len(program.cost))
    for first, choice in zip(program.starts, choices, strict=True):
        values[first + choice] = 1.0
    for first, second, column in program.pairs:
        values[column + choices[first] * len(problem.nodes[second].cost) + choices[second]] = 1.0
    solution = highspy.HighsSolution()
    solution.col_value = list(values)
    return solution
