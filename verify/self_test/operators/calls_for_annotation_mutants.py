"""Calls whose annotations are mutated: every sample call of every built-in operator, and operators made of several, as
models have them. Built-in operators have short annotations; those have groups, reductions inside, and sizes given by
keyword."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from op_registry.annotation.syntax_tree import Annotation
from op_registry.annotation.well_formed import parse_checked, tied_identifiers
from op_registry.builtin import SPECS
from op_registry.spec import OperatorSpec

from nnscaler.ir.operation_annotations import Signature
from verify.evidence.inputs.draw_calls import identifiers_of
from verify.evidence.oracle.case_runner import OperatorRunner, Prepared
from verify.evidence.split_case import Inputs
from verify.evidence.verify_op_options import Kind, OpOptions
from verify.self_test.operators import right_operators as f
from verify.self_test.operators.mutants.mutant import Function, spec_of

_CORPUS: tuple[tuple[str, str, Function], ...] = (
    ("linear with bias", "b k+, n k+, +n -> b n", f.linear),
    ("SwiGLU", "t d^, d^ f+, d^ f+, f+ e -> t e", f.swiglu_mlp),
    ("MLP with biases", "t d^, d^ f+, f+, f+ e, +e -> t e", f.mlp),
    ("attention with projections", "b s^ c^, c^ (h+ d^), c^ (h+ d^), c^ (h+ d^), (h+ d^) e -> b s^ e", f.mha),
    ("packed attention", "b s^ (3 h d^) -> b s^ (h d^)", f.packed_attention),
    ("packed projection", "t c+, c+ (3 h d) -> t (3 h d)", f.packed_projection),
    ("rotary embedding", "s h (2 d), s d, s d -> s h (2 d)", f.rope),
    ("LoRA", "t k+, k+ n, k+ r^, r^ n -> t n", f.lora),
    ("grouped bmm", "e t k+, e k+ n -> e t n", torch.bmm),
    ("grouped linear", "t (g k+), g k+ n -> t (g n)", f.grouped_linear),
    ("RMSNorm", "t d^, d^ -> t d^", f.rms_norm),
    ("norm and linear", "t d^, d^, d^, d^ n -> t n", f.norm_linear),
    ("attention", "b h q d^, b h k^ d^, b h k^ e -> b h q e", f.attend),
    ("grouped-query attention", "b (h g) q d^, b h k^ d^, b h k^ e -> b (h g) q e", f.grouped_query),
    ("linear attention", "q d+, k+ d+, k+ v -> q v", f.linear_attention),
    ("patch embedding", "b c+ (h p+) (w q+), e c+ p+ q+ -> b (h w) e", f.patch_embed),
    ("pixel shuffle", "b (c r s) h w -> b c (h r) (w s)", f.pixel_shuffle),
    ("channel shuffle", "b (g c) -> b (c g)", f.channel_shuffle),
    ("scores", "b h q d+, b h k d+ -> b h q k", f.scores),
    ("bilinear form", "m i+, i+ j+, n j+ -> m n", f.bilinear),
    ("cross entropy of probabilities", "t+ c^, t+ c^ -> ()", f.soft_cross_entropy),
    ("squared error", "a+ b+, a+ b+ -> ()", f.squared_error),
    ("depthwise convolution", "b c l^, c w^ -> b c m^", f.depthwise),
    ("residual", "+t d, t f+, f+ d -> t d", f.residual),
    ("mixture of experts", "t e+, e+ t d -> t d", f.combine),
    ("GLU", "t (2 f) -> t f", f.glu),
    ("packing", "t q, t k -> t [q k]", f.pack),
    ("unpacking", "t [p q] -> t p, t q", f.unpack),
    ("largest", "t c+max -> t", f.largest),
    ("outer sum", "m, n -> m n", f.outer_sum),
    ("segment mean", "(b s^) d -> b d", f.segment_mean),
    ("projection to heads", "b s d+, d+ h e -> b h s e", f.mixed_heads),
)


def composed_operators() -> tuple[OperatorSpec, ...]:
    """Return every operator of the corpus; its inputs are drawn from its annotation."""
    given = {"depthwise convolution": lambda: (torch.randn(6, 12, 9), torch.randn(12, 4))}
    return tuple(spec_of(name, annotation, function, given.get(name)) for name, annotation, function in _CORPUS)


_SPLIT = (6, 12, 4, 8, 18, 10, 24)  # of identifiers that are not frozen
_FROZEN = (9, 14, 15, 16, 20, 21)
_EQUAL = 6
_EQUAL_BUILTIN = 12
_FALLBACKS: tuple[Kind, ...] = ("normal", "positive")


@dataclass(frozen=True)
class SampledCall:
    """A call, run whole on a few draws. `text` and `given`: its annotation, and the sizes that come with it."""

    name: str
    spec: OperatorSpec
    text: str
    given: tuple[tuple[str, int], ...]
    runs: tuple[Prepared, ...]
    runner: OperatorRunner
    inputs: tuple[Inputs, ...]

    @property
    def signature(self) -> Signature:
        """The annotation as it is, bound to the call."""
        return self.runs[0].signature

    def other_run(self, seed: int) -> Prepared | None:
        """Return a run on real numbers from another seed."""
        base = self.inputs[-1]
        kind: Kind = "positive" if base.kind == "positive" else "normal"
        inputs = Inputs(base.sample, base.sizes, kind, 1000 + seed)
        return _run(self.runner, inputs)


def builtin_subjects(options: OpOptions, equal: bool, every: int = 1) -> Iterator[SampledCall]:
    """Yield every so many of the registry's sample calls.

    `equal`: all sizes alike; calls that then do not run are left out.
    """
    number = 0
    for spec in SPECS:
        for sample in range(OperatorRunner(spec, options).samples):
            number += 1
            if number % every == 0:
                subject = _of_sample(OperatorRunner(spec, options), sample, equal)
                if subject is not None:
                    yield subject


def composed_subjects(options: OpOptions, equal: bool, every: int = 1) -> Iterator[SampledCall]:
    """Yield the composed operators, every so many."""
    for spec in composed_operators()[::every]:
        runner = OperatorRunner(spec, options)
        if runner.samples:
            subject = _of_sample(runner, 0, equal)
        else:
            assert isinstance(spec.annotation, str)
            subject = _subject(runner, None, _sizes(parse_checked(spec.annotation), equal))
        if subject is not None:
            yield subject


def _sizes(annotation: Annotation, equal: bool) -> tuple[tuple[str, int], ...]:
    ties = tied_identifiers(annotation)
    frozen = {i.name for i in annotation.identifiers() if i.mark == "^"}
    split, kept = iter(_SPLIT), iter(_FROZEN)
    found: dict[str, int] = {}
    for name in identifiers_of(annotation):
        if equal:
            found[name] = _EQUAL
        elif name in found:
            continue
        elif name in frozen:
            found[name] = next(kept)
        else:
            first = next(split)
            found.update({n: first * (1 + i) for i, n in enumerate(ties.get(name, (name,)))})
    return tuple(found.items())


def _of_sample(runner: OperatorRunner, sample: int, equal: bool) -> SampledCall | None:
    if not equal:
        return _subject(runner, sample, ())
    plain = _run(runner, Inputs(sample, (), "normal"))
    if plain is None or plain.signature.bound is None:
        return None
    sizes = tuple((name, _EQUAL_BUILTIN) for name, size in plain.signature.bound.sizes.items() if size > 1)
    return _subject(runner, sample, sizes) if len(sizes) > 1 else None


def _subject(runner: OperatorRunner, sample: int | None, sizes: tuple[tuple[str, int], ...]) -> SampledCall | None:
    runs: list[Prepared] = []
    inputs: list[Inputs] = []
    kinds = runner.options.safeguards.values
    for seed, kind in enumerate((*kinds, *_FALLBACKS)):
        wanted = Inputs(sample, sizes, kind, seed)
        found = _run(runner, wanted) if len(runs) < len(kinds) else None
        if found is not None:
            runs.append(found)
            inputs.append(wanted)
    if not runs:
        return None
    call = runs[0].signature.call
    annotation = runner.spec.annotation
    result = annotation if isinstance(annotation, str) else annotation(call)
    text, given = (result, ()) if isinstance(result, str) else (result[0], tuple(result[1].items()))
    name = f"{runner.spec.name} {' '.join('x'.join(map(str, t.shape)) or '()' for t in call.tensors())}"
    return SampledCall(name, runner.spec, text, given, tuple(runs), runner, tuple(inputs))


def _run(runner: OperatorRunner, inputs: Inputs) -> Prepared | None:
    """Return the run, if there is something to see."""
    try:
        found = runner.prepare(inputs)
    except Exception:  # noqa: BLE001 - sizes and values are our choice: a call that does not run on them is left out
        return None
    whole = found.whole
    return found if (whole.finite and whole.shows_something) or not whole.concrete.compare else None
