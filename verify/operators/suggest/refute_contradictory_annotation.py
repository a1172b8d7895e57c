"""Refute an annotation that contradicts itself by a counter-example in numbers.

`m k, k n -> m n` says that `k` may be split and that each shard then computes the output: an identifier without mark
which an output lacks. The language refuses it, so no plan can contain it; asked about it, `verify_op` still answers
with a counter-example rather than with a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from op_registry.annotation.parser import parse
from op_registry.annotation.syntax_tree import Identifier, Operand
from op_registry.annotation.well_formed import with_marks

from nnscaler.errors import AnnotationError, NnscalerError
from nnscaler.exception_in_one_line import first_line
from nnscaler.ir.operation_placement import Split
from nnscaler.runtime.tensor_bits_and_differences import difference, largest
from verify.evidence.inputs.concrete_call import outputs_of
from verify.evidence.inputs.cut_and_join_operands import spread
from verify.evidence.inputs.find_operator import find_operator
from verify.evidence.oracle.case_runner import OperatorRunner, WholeRaised
from verify.evidence.oracle.compare_partition import ShardRaised, make_partition, run_shards
from verify.evidence.oracle.enumerate_cases import Enumerator, Unusable, bases
from verify.evidence.oracle.run_whole_operator import as_leaves
from verify.evidence.verify_op_options import OpOptions
from verify.operators.suggest.repair_annotation import frozen, repair
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict


def contradiction(
    operator: Any, annotation: str | Callable[..., Any] | None, error: AnnotationError, options: OpOptions
) -> Report | None:
    """Return the report on an annotation whose only fault is an unmarked identifier that an output lacks; else None."""
    if not isinstance(annotation, str):
        return None
    try:
        parsed = parse(annotation)
    except AnnotationError:
        return None
    missing = _missing(annotation)
    if not missing:
        return None
    try:
        spec = find_operator(operator, with_marks(parsed, missing, Identifier("", "+")))
        facts = _counter_example(OperatorRunner(spec, options), missing[0])
    except (NnscalerError, Unusable, ShardRaised, WholeRaised):
        return None
    if facts is None:
        return None
    advice = repair(replace(spec, annotation=frozen(annotation, missing[0])), missing[0], options)
    sentence = "" if advice is None else advice.sentence.replace(f"`{missing[0]}^`", f"`{missing[0]}`")
    finding = Finding(
        "annotation_wrong",
        f"`{missing[0]}` in `{annotation}` has no mark, but shards of it do not each compute the output",
        spec.where,
        facts,
        cause=first_line(error.message),
        help=error.help if advice is None else f'this annotation holds (tested): "{advice.text}"\n{sentence}',
    )
    check = Check(f"split `{missing[0]}` (spatial)", Verdict.REFUTED, 1, 1)
    setting = f"`{annotation}`"
    return Report(
        "verify-op", spec.name, setting, options.seed, (check,), (finding,), (), {**environment(), "dtype": "float64"}
    )


def _missing(text: str) -> list[str]:
    """Return the identifiers without mark that some output lacks."""
    annotation = parse(text)
    outputs = [{i.name for i in o.identifiers()} for o in annotation.outputs if isinstance(o, Operand)]
    names = {i.name: None for i in annotation.identifiers() if not i.mark}
    return [name for name in names if any(name not in output for output in outputs)]


def _counter_example(runner: OperatorRunner, identifier: str) -> dict[str, str] | None:
    """Return how far one shard's output is from the whole's; None if it is equal after all."""
    for base in bases(runner):
        enumerator = Enumerator(runner, base)
        for inputs in enumerator.draws(enumerator.sizes_for([identifier])):
            prepared = runner.prepare(inputs)
            partition = make_partition(prepared.signature, (Split(identifier),), (2,))
            whole = prepared.whole
            columns = [
                spread(t, lay, inputs.generator())
                for t, lay in zip(whole.concrete.tensors, partition.inputs, strict=True)
            ]
            leaves = [as_leaves([column[rank] for column in columns]) for rank in range(2)]
            shard = outputs_of(run_shards(partition, leaves, torch.float64)[0])
            for index, (expected, actual) in enumerate(zip(whole.outputs, shard, strict=True)):
                if expected is None or actual is None or prepared.bound.agree(actual.detach(), expected, 0.0):
                    continue
                found = difference(actual.detach(), expected, largest(expected))
                return {
                    "annotation": str(runner.spec.annotation),
                    "identifier": identifier,
                    "parts": "2",
                    "shapes": ", ".join(str(tuple(t.shape)) for t in whole.concrete.tensors),
                    "dtype": "float64",
                    "tensor": f"output {index} of shard 0",
                    "greatest difference": f"{found.absolute:.6g} ({found})",
                }
    return None
