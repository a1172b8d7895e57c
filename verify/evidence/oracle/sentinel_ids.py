"""Inputs with numbers among the ids that mean something of their own: an ignored label, padding, the end of a text.

Ids are drawn from 0 up to the size of a table. An operator that leaves some of them out, and divides by how many are
left, is right on all of these and wrong where shards leave out unequal numbers of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from op_registry.numbers_in_user_code import signed_numbers_in

from verify.evidence.inputs.concrete_call import with_tensors
from verify.evidence.inputs.draw_values import in_order
from verify.evidence.inputs.meta_preflight import succeeds
from verify.evidence.oracle.case_runner import OperatorRunner
from verify.evidence.oracle.run_whole_operator import WholeRun
from verify.evidence.oracle.size_checked_kernels import runs_checked
from verify.evidence.split_case import Inputs
from verify.evidence.verify_op_options import KINDS

ALWAYS = (-100, -1)  # defaults inside of torch, and free places of caches: they need not stand in a user's code
LARGEST = 1 << 18  # a vocabulary; some code makes as many elements as the largest id says
OPERANDS = 4  # that are changed
NUMBERS = 24  # of one operand that are tried
TOGETHER = 3  # in one draw: there is room for so many in a dozen elements
DRAWN = 4


def sentinel_inputs(runner: OperatorRunner, inputs: Inputs) -> Iterator[Inputs]:
    """Yield these inputs with sentinels in each operand that holds ids, and in all of them. Numbers on which the whole
    operator raises are left out: they are no ids of it."""
    try:
        usual = runner.exact(inputs)
    except Exception:  # noqa: BLE001 - sizes were our choice
        return
    groups: list[Sequence[tuple[int, float]]] = []
    trial = _Trial(runner, inputs, usual)
    for index in islice(_holding_ids(runner, inputs, usual), OPERANDS):
        tensor = usual.concrete.tensors[index]
        wanted = (n for n in _numbers(runner.spec.target) if _new(tensor, n))
        taken = [(index, n) for n in islice(wanted, NUMBERS) if trial.takes(index, n)]
        groups += [taken[i : i + TOGETHER] for i in range(0, len(taken), TOGETHER)]
    by_operand = {group[0][0]: group for group in reversed(groups)}
    if len(by_operand) > 1:
        groups.append([pair for group in by_operand.values() for pair in group])
    for group in groups:
        for draw in range(DRAWN):
            kind = KINDS[draw % len(KINDS)] if inputs.kind != "given" else inputs.kind
            yield replace(inputs, kind=kind, seed=inputs.seed + draw, sentinels=tuple(group))


def _numbers(target: Any) -> Iterator[int]:
    """Yield numbers that may be sentinels: those that are so anywhere, and those of the code, with their neighbours
    (one less than the size of a vocabulary, say), negative ones first, then large ones."""
    own = [int(n) for n in signed_numbers_in(target) if n == n // 1 and abs(n) <= LARGEST]
    near = [n + d for n in sorted(own, reverse=True) for d in (0, -1, 1) if n > 0]
    yield from dict.fromkeys((*ALWAYS, *(n for n in own if n < 0), *near))


def _holding_ids(runner: OperatorRunner, inputs: Inputs, usual: WholeRun) -> Iterator[int]:
    """Yield the operands that hold ids: integers, and floating numbers through which no gradient flows. Offsets, whose
    order is their meaning, are none."""
    for index, tensor in enumerate(usual.concrete.tensors):
        ids = tensor.dtype != torch.bool and not tensor.is_complex()
        if tensor.is_floating_point():
            ids = usual.gradients[index] is None and index not in inputs.without_gradient
        elif runner.given:
            ids = ids and not in_order(tensor)
        if ids and tensor.numel() > 1:
            yield index


def _new(tensor: Tensor, number: int) -> bool:
    """Return whether a tensor can hold a number, and does not yet."""
    if not tensor.is_floating_point():
        limits = torch.iinfo(tensor.dtype)
        if not limits.min <= number <= limits.max:
            return False
    return not bool((tensor == number).any())


class _Trial:
    """Tries the whole operator on one sentinel at a time."""

    def __init__(self, runner: OperatorRunner, inputs: Inputs, usual: WholeRun) -> None:
        self.runner, self.inputs = runner, inputs
        self.shapes = [_shape(o) for o in usual.outputs]
        # in the others an id out of range may end the process
        self.checked = runs_checked(lambda: runner.exact(inputs))

    def takes(self, index: int, number: float) -> bool:
        """Return whether the operator runs with a number among its ids, and its results have the same shapes."""
        tried = replace(self.inputs, sentinels=((index, number),))
        if not self.checked and not succeeds(lambda: self._forward(tried)):
            return False
        try:
            return [_shape(o) for o in self.runner.exact(tried).outputs] == self.shapes
        except Exception:  # noqa: BLE001 - it is no id of this operator
            return False

    def _forward(self, inputs: Inputs) -> None:
        call = self.runner.concrete(inputs)
        args, kwargs = with_tensors(call.call, call.tensors, {})
        with torch.no_grad():
            self.runner.function(call)(*args, **kwargs)


def _shape(output: Tensor | None) -> tuple[int, ...] | None:
    return None if output is None else tuple(output.shape)
