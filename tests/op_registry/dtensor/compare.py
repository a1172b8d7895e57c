"""Our annotations and DTensor's rules in one form, and what each has that the other lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from op_registry.annotation.bind_sizes import BoundAnnotation, BoundOperand
from op_registry.annotation.splits import shard_of
from op_registry.annotation.syntax_tree import UNSPLIT
from op_registry.bind_and_localise_call import linear_sets
from op_registry.samples import SAMPLES
from op_registry.samples.sample import Sample

from tests.op_registry.builtin.oracle import Whole, run, whole_run
from tests.op_registry.dtensor.rules import Placements, Rule, Unknown, recorded, rules_of


@dataclass(frozen=True)
class Compared:
    """One sample call. `below`: the operators that the dispatcher meets; `unknown`: that of them without rules."""

    sample: Sample
    ours: frozenset[Rule]
    theirs: frozenset[Rule]
    below: frozenset[str]
    unknown: str = ""

    @property
    def both(self) -> frozenset[Rule]:
        return self.ours & self.theirs

    @property
    def theirs_only(self) -> frozenset[Rule]:
        return frozenset() if self.unknown else self.theirs - self.ours

    @property
    def ours_only(self) -> frozenset[Rule]:
        return self.ours if self.unknown else self.ours - self.theirs


def compare(number: int) -> Compared:
    """Both sets of rules for a sample, by its number."""
    w = whole_run(SAMPLES[number], number)
    ours = frozenset(our_rules(w))
    chain = recorded(lambda: run(w.call, w.inputs, {}), w.inputs)
    try:
        found = rules_of(chain)
    except Unknown as error:
        return Compared(SAMPLES[number], ours, frozenset(), chain.operators, str(error))
    return Compared(SAMPLES[number], ours, frozenset(_plain(r, w) for r in found), chain.operators)


def _plain(rule: Rule, w: Whole) -> Rule:
    """In our words. A mean of the parts' means is, with us, a sum of parts of the whole mean; a sum of booleans is
    their maximum, and a product their minimum."""
    of_bools = {"P": "P(max)", "P(product)": "P(min)"}
    bools = [t.dtype == torch.bool for t in w.outputs if t is not None]
    outputs = ["P" if p == "P(avg)" else p for p in rule[1]]
    inputs = tuple(
        p if p == "R" or _can_add(t) else p.replace("P", "P!") for p, t in zip(rule[0], w.inputs, strict=True)
    )
    return inputs, tuple(of_bools.get(p, p) if b else p for p, b in zip(outputs, bools, strict=True))


def _can_add(t: torch.Tensor) -> bool:
    """Return whether partial sums of such a tensor mean anything: `P!` marks those that do not."""
    return t.dtype != torch.bool


def our_rules(w: Whole) -> Iterator[Rule]:
    """One rule for each identifier that is not frozen, and one for each set of tensors that may be partial sums."""
    bound = w.bound
    for name in bound.sizes:
        members = bound.tied[name]
        if members[0] == name and bound.marks[name] not in UNSPLIT and all(bound.sizes[m] > 1 for m in members):
            summed = bound.marks[name] == "+"
            inputs = tuple(
                _placed(bound, o, name, "P" if summed and o is not None and o.additive else "R") for o in bound.inputs
            )
            lacking = "P" if bound.reductions.get(name, "sum") == "sum" else "P(max)"
            lacking = lacking if summed else "R"
            outputs = [_placed(bound, o, name, lacking) for o in bound.outputs]
            yield inputs, _of_tensors(w, outputs)
    for slots in linear_sets(w.spec, w.call):
        inputs = tuple("P" if i in slots else "R" for i in range(len(w.inputs)))
        if slots:
            yield inputs, _of_tensors(w, ["P"] * len(w.outputs))


def _of_tensors(w: Whole, outputs: list[str]) -> Placements:
    return tuple(p for p, t in zip(outputs, w.outputs, strict=True) if t is not None)


def _placed(bound: BoundAnnotation, operand: BoundOperand | None, identifier: str, lacking: str) -> str:
    shard = shard_of(bound, operand, identifier) if operand is not None else None
    if shard is None:
        return lacking
    if shard.sections:
        return f"[S({shard.dim})]"
    return f"S({shard.dim})" if shard.outer == 1 else f"SS({shard.dim},{shard.outer})"
