"""A random legal choice for every operation: a plan that nobody would make, which must be right all the same.

Needs no policy, meets every row of the conversion table, and finds wrong annotations, hooks and conversions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

from nnscaler.ir.derive import explain_illegal_choices
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.ir.placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.ir.signature import Signature
from nnscaler.planning.policies import pipeline
from nnscaler.planning.tensor_parallel import step_of
from nnscaler.transform.candidates import Candidates, all_candidates
from nnscaler.transform.complete_plan import follow_batch
from nnscaler.transform.plan import AssignStep, Axes, Plan, RestStep, Step


def random_plan(
    graph: Graph,
    signatures: Mapping[str, Signature],
    mesh: Sequence[tuple[str, int]],
    seed: int,
    *,
    micro_batches: int = 1,
    stage_axes: Sequence[Axes] = (),
) -> Plan:
    """Draw a choice for every operation on every axis among whole, whole with deferred gradients, partial sums and
    splits.

    `mesh` may have `pp`: the stages are those of the policy `pipeline`. `stage_axes`: as in `Plan`, with other names on
    other devices. Micro-batches follow the batch. Parameters may rest in shards over any axis.
    """
    random = Random(seed)
    plan = Plan(tuple(mesh), (), micro_batches, data_axes=(), stage_axes=tuple(stage_axes))
    steps: list[Step] = list(pipeline(graph, signatures, plan.devices, 1))
    stages_of = {n: s.stages for s in steps if isinstance(s, AssignStep) for n in s.operations}
    over_micro_batches, micro_axes = follow_batch(graph, signatures, plan, ())
    candidates = {p: all_candidates(graph, signatures, p) for axes in plan.device_axes for _, p in axes}
    for op in graph.operations:
        signature = signatures[op.name]
        for device_axes in dict.fromkeys(plan.device_axes[s] for s in stages_of.get(op.name, (0,))):
            made, axes = over_micro_batches[op.name], micro_axes
            for axis in device_axes:
                axes = (*axes, axis)
                options = _options(op, signature, candidates[axis[1]])
                random.shuffle(options)
                legal = (c for c in options if not explain_illegal_choices(graph, op, signature, (*made, c), axes))
                made = (*made, next(legal))
                steps.append(step_of((op.name,), axis[0], made[-1]))
    return replace(plan, steps=(*steps, *_rests(graph, plan, Random(f"at rest {seed}"))))


def _rests(graph: Graph, plan: Plan, random: Random) -> Iterator[RestStep]:
    """Yield steps that let some parameters rest in shards over some axis, in every second plan."""
    names = sorted({name for axes in plan.device_axes for name, _ in axes})
    parameters = [tensor.fqns[0] for tensor in graph.with_role("parameter")]
    if names and parameters and random.random() < 0.5:
        for axis in random.sample(names, random.randint(1, min(len(names), 2))):
            yield RestStep(tuple(random.sample(parameters, random.randint(1, len(parameters)))), axis)


def _options(op: Operation, signature: Signature, candidates: Candidates) -> list[Choice]:
    """Return all choices; splits are twice as likely."""
    splits: list[Split] = 2 * list(candidates[op.name])
    return [RunInvariant(), RunReplicated(), *(RunPartial(slots) for slots in signature.linear), *splits]
