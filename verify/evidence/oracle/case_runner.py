"""Run the cases of one operator. Wholes, signatures and partitions are kept, so that cases share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

import torch

from op_registry.annotation.well_formed import parse_checked
from op_registry.bind_and_localise_call import bind_call, linear_sets, size_arguments
from op_registry.call import Call, dtype_name
from op_registry.registry import default_registry
from op_registry.samples import samples_of
from op_registry.spec import OperatorSpec, Refusal

from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.ir.derive_operand_layouts import explain_illegal_choice
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Split
from nnscaler.runtime.training.autocast_on_any_device import AskedDtypes
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of, with_outputs, with_tensors
from verify.evidence.inputs.draw_calls import builtin_call, choose_sizes, from_annotation, resize, sample_calls
from verify.evidence.inputs.draw_values import refill, varied, with_sentinels
from verify.evidence.inputs.meta_preflight import remembers, succeeds, tried_on_meta
from verify.evidence.oracle.compare_partition import (
    Partition,
    PartitionComparison,
    ShardRaised,
    compare_partition,
    make_partition,
    states_of,
)
from verify.evidence.oracle.run_whole_operator import WholeRun, run_whole, whole_arguments
from verify.evidence.oracle.size_checked_kernels import raised_on_meta, runs_checked
from verify.evidence.oracle.tolerance import NOISE_FACTOR, Bound, float64_bound, low_bound, noise
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import OpOptions

KEPT = 6  # wholes in memory
NARROW = 0.1  # relative; no narrower dtype inside an operator rounds by more
VALUES = 64  # whose rounding is measured before a difference counts: of a few, one may happen to move little


@dataclass(frozen=True)
class Prepared:
    """The whole operator's run on some inputs, its annotation bound to it, and what rounding may explain."""

    whole: WholeRun
    signature: Signature
    bound: Bound
    on_meta: bool  # whether the operator runs without values


class Declined(str):
    """The reason that an operator's own hook gives for not doing a split."""


@dataclass(frozen=True)
class CaseResult:
    """`compared` is None where the case did not run, `raised` on a shard, or was `refused`: it decides nothing."""

    case: SplitCase
    signature: Signature
    compared: PartitionComparison | None = None
    raised: ShardRaised | None = None
    refused: str = ""

    @property
    def failed(self) -> bool:
        """Return whether this case is a counter-example."""
        return self.raised is not None or (self.compared is not None and bool(self.compared.mismatches))


class WholeRaised(Exception):
    """The whole operator raised; `shapes` are of its tensors."""

    def __init__(self, error: Exception, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error
        self.shapes = shapes


class OperatorRunner:
    """`progress` is told what runs: a child process dies with the last word on record."""

    def __init__(self, spec: OperatorSpec, options: OpOptions, progress: Callable[[str], None] | None = None) -> None:
        self.spec = spec
        self.options = options
        self.progress = progress
        self.given = tuple(sample_calls(spec)) if spec.sample_inputs is not None else ()
        self.rows = samples_of(spec.name) if spec.target is None and not self.given else ()
        # a wrong annotation can crash the process: only what is in the registry as it is runs without a trial
        self.trusted = bool(self.rows) and default_registry().lookup(spec.name) is spec
        self._prepared: dict[Inputs, Prepared] = {}
        self._partitions: dict[Any, Partition | str] = {}
        self._tried: set[Any] = set()
        self._untried: bool | None = None
        self._asked: Callable[[torch.dtype], AbstractContextManager[Any]] = lambda dtype: nullcontext()
        self._wide: OperatorRunner | None = None  # runs all of an operator in the dtype of the run

    @property
    def samples(self) -> int:
        """How many sample calls there are."""
        return len(self.given) or len(self.rows)

    def concrete(self, inputs: Inputs, integers: bool = True) -> ConcreteCall:
        """Return the call with its tensors. `integers`: whether integer tensors of samples are drawn anew too."""
        call = self._drawn(inputs, integers)
        call = replace(call, constants=call.constants.union(inputs.without_gradient))
        if inputs.factors:
            pairs = zip(call.tensors, inputs.factors, strict=False)
            scaled = (t * f if t.is_floating_point() or t.is_complex() else t for t, f in pairs)
            call = replace(call, tensors=tuple(scaled))
        return replace(call, tensors=with_sentinels(call.tensors, inputs.sentinels, inputs.seed))

    def exact(self, inputs: Inputs) -> WholeRun:
        """Run the whole operator in float64, and nothing besides. Raises whatever it raises."""
        call = self.concrete(inputs)
        return self._run(self.function(call), call, inputs, torch.float64)

    def _drawn(self, inputs: Inputs, integers: bool) -> ConcreteCall:
        generator = inputs.generator()
        if inputs.sample is None:
            sizes, numbers = dict(inputs.sizes), inputs.whole_numbers
            return from_annotation(self.spec, sizes, inputs.kind, generator, numbers, inputs.flags)
        if self.rows:
            call = builtin_call(self.rows[inputs.sample], inputs.kind, generator)
            if self.spec.random:  # by logical coordinate, so that values are defined
                call = replace(call, compare=True)
            if not inputs.sizes:
                return call
            resized = self._resized(call, inputs)
            both = zip(call.tensors, resized.tensors, strict=True)
            return replace(resized, tensors=tuple(varied(a, b, inputs.kind, generator) for a, b in both))
        call = self._resized(self.given[inputs.sample], inputs) if inputs.sizes else self.given[inputs.sample]
        tensors = tuple(
            refill(t, inputs.kind if integers or t.is_floating_point() else "given", generator) for t in call.tensors
        )
        return replace(call, tensors=tensors, kind=inputs.kind)

    def first_calls(self) -> list[ConcreteCall]:
        """Return a call to look at where none can be run: of the sample inputs, or of the annotation."""
        if self.samples:
            return [self.concrete(Inputs(0, (), "given", self.options.seed))]
        if not isinstance(self.spec.annotation, str):
            return []
        sizes = choose_sizes(parse_checked(self.spec.annotation), (), "distinct")
        return [self.concrete(Inputs(None, tuple(sizes.items()), "normal", self.options.seed))]

    def _resized(self, call: ConcreteCall, inputs: Inputs) -> ConcreteCall:
        outputs = [] if self.spec.random else self._outputs(call)
        bound = bind_call(self.spec, with_outputs(call.call, outputs) if outputs else call.call)
        found = resize(call, bound, dict(inputs.sizes))
        if found is None:
            raise Refusal(f"the sizes {dict(inputs.sizes)} cannot be given to sample {inputs.sample}")
        kept: dict[str, Any] = {"constants": call.constants, "compare": call.compare}
        return replace(found, call=self._with_sizes(found.call, bound.sizes, dict(inputs.sizes)), **kept)

    def _with_sizes(self, call: Call, before: Mapping[str, int], sizes: Mapping[str, int]) -> Call:
        """Return the call with other sizes for identifiers that its integer arguments give the sizes of."""
        given = size_arguments(self.spec, call)
        for position, parameter in enumerate(self.spec.parameters):
            name = parameter.name
            if name in sizes and name in given and given[name] == before.get(name):
                call = call.replace(position, name, sizes[name])
        return call

    def _outputs(self, call: ConcreteCall) -> Any:
        return run_whole(self.function(call), call, torch.Generator()).outputs

    def function(self, call: ConcreteCall) -> Callable[..., Any]:
        """Return the function that runs the whole operator."""
        function = function_of(call.call.operator, self.spec)
        if not self.spec.random:
            return function
        shape = call.call.tensors()[0].shape if call.tensors else call.call.get(0, "size")
        return partial(function, **whole_arguments(shape))

    def prepare(self, inputs: Inputs) -> Prepared:
        """Run the whole operator, once. Raises WholeRaised, and AnnotationError where the annotation does not fit."""
        found = self._prepared.get(inputs)
        if found is None:
            found = self._prepare(inputs)
            if len(self._prepared) >= KEPT:
                self._prepared.pop(next(iter(self._prepared)))
            self._prepared[inputs] = found
        return found

    def _prepare(self, inputs: Inputs) -> Prepared:
        call = self.concrete(inputs)
        dtype: torch.dtype = getattr(torch, inputs.dtype)
        shapes = tuple(tuple(t.shape) for t in call.tensors)
        if self.progress is not None:
            self.progress(f"the whole operator on shapes {', '.join(map(str, shapes))}")
        function = self.function(call)
        described = [(tuple(t.shape), t.dtype) for t in call.tensors]
        tried = False if self.keeps_tensors(function, call) else tried_on_meta(function, call.call, described, {}, {})
        if isinstance(tried, Exception):
            raise WholeRaised(tried, shapes)
        try:
            exact = self._run(function, call, inputs, torch.float64)
        except Exception as error:
            if self.given and inputs.kind != "given" and any(not t.is_floating_point() for t in call.tensors):
                call = self.concrete(inputs, integers=False)  # integers that belong together: an order, offsets
                try:
                    exact = self._run(function, call, inputs, torch.float64)
                except Exception:  # noqa: BLE001 - as above
                    raise WholeRaised(error, shapes) from error
            else:
                raise WholeRaised(error, shapes) from error
        try:
            low = self._run(function, call, inputs, torch.float32 if dtype == torch.float64 else dtype)
        except Exception as error:
            if dtype != torch.float64:
                raise WholeRaised(error, shapes) from error
            low = None
        if dtype == torch.float64 or low is None:
            return Prepared(
                exact, self._signature(exact), float64_bound(low, exact, self._moved(function, call, inputs)), tried
            )
        return Prepared(low, self._signature(low), low_bound(low, exact), tried)

    def keeps_tensors(self, function: Callable[..., Any], call: ConcreteCall) -> bool:
        """Return whether the operator must not, or need not, be tried on the meta device."""
        if self._untried is None:
            described = [(tuple(t.shape), t.dtype) for t in call.tensors]
            checked = True if self.trusted else self._checked(function, call)
            # what takes long is run as it is: the time limit of the operator is for that
            self._untried = checked is not False or remembers(
                lambda: tried_on_meta(function, call.call, described, {}, {}),
                lambda: run_whole(function, call, torch.Generator()),
            )
        return self._untried

    def _checked(self, function: Callable[..., Any], call: ConcreteCall) -> bool | None:
        """Return whether the call runs only kernels that check their sizes; None where that takes too long.

        Runs in a child process, since these shapes may be the wrong ones.
        """
        args, kwargs = with_tensors(call.call, call.tensors, {})

        def run() -> None:
            if not runs_checked(lambda: function(*args, **kwargs)):
                raise ValueError("a kernel that is not known to check sizes")

        return succeeds(run)

    def _run(self, function: Callable[..., Any], call: ConcreteCall, inputs: Inputs, dtype: torch.dtype) -> WholeRun:
        cotangents = torch.Generator().manual_seed(inputs.seed + 1)
        factor = inputs.factors[-1] if inputs.factors else 1.0
        random = self.options.safeguards.random_cotangents
        with self._asked(dtype):
            return run_whole(function, call, cotangents, dtype, call.constants, random, factor)

    def _moved(
        self, run: Callable[..., Any], call: ConcreteCall, inputs: Inputs, units: float = 1.0, draw: int = 0
    ) -> WholeRun | None:
        """Return the run with every floating input moved by `units` of rounding, up or down as a `draw` says."""
        generator = torch.Generator().manual_seed(inputs.seed + 3 + 1000 * draw)
        unit = units * torch.finfo(torch.float64).eps

        ids = {index for index, _ in inputs.sentinels}  # beside an id is another one

        def nudged(index: int, tensor: torch.Tensor) -> torch.Tensor:
            if index in ids or not tensor.is_floating_point():
                return tensor
            signs = torch.randint(0, 2, tuple(tensor.shape), generator=generator) * 2 - 1
            return tensor * (1 + unit * signs.double())

        try:
            tensors = tuple(nudged(i, t) for i, t in enumerate(call.tensors))
            return self._run(run, replace(call, tensors=tensors), inputs, torch.float64)
        except Exception:  # noqa: BLE001 - nothing is known of its rounding then
            return None

    def _signature(self, whole: WholeRun) -> Signature:
        call = with_outputs(whole.concrete.call, whole.outputs)
        bound = bind_call(self.spec, call)
        return Signature(call, self.spec, bound, tuple(frozenset(s) for s in linear_sets(self.spec, call)))

    def refusal(self, signature: Signature, case: SplitCase) -> str | None:
        """Return why a case is not legal; None if it is."""
        for choice, parts in zip(case.choices, case.parts, strict=True):
            reason = explain_illegal_choice(signature, choice, parts)
            if reason is not None:
                return reason
        contiguous = [c.identifier for c in case.choices if isinstance(c, Split)]
        if len(set(contiguous)) < len(contiguous) and contiguous[0] in self.spec.contiguous:
            return f"`{contiguous[0]}` can be split by one axis only"
        return None

    def partition(self, signature: Signature, case: SplitCase) -> Partition | str:
        """Return the partition, or why there is none."""
        key = self._key(case)
        found = self._partitions.get(key)
        if found is None:
            sized = case.with_sizes({} if signature.bound is None else signature.bound.sizes)
            found = sized if isinstance(sized, str) else self.refusal(signature, sized) or self._make(signature, sized)
            self._partitions[key] = found
        return found

    def _key(self, case: SplitCase) -> Any:
        """Return the cache key of a partition, which depends on shapes but not on values."""
        inputs = case.inputs
        return inputs.sample, inputs.sizes, inputs.flags, case.choices, case.parts, case.uneven

    def _make(self, signature: Signature, case: SplitCase) -> Partition | str:
        states_in, states_out = states_of(signature, case.choices)
        shapes = [t.shape for t in signature.call.tensors()]
        shapes_out = [() if o is None else o.shape for o in signature.call.outputs]
        for states, shape in zip((*states_in, *states_out), (*shapes, *shapes_out), strict=True):
            reason = explain_illegal(states, case.parts, shape)
            if reason is not None:
                return reason
        try:
            return make_partition(signature, case.choices, case.parts)
        except Refusal as refusal:
            return Declined(refusal)

    def run(self, case: SplitCase) -> CaseResult:
        """Run one case, without narrower dtypes inside the operator where what differs may be their rounding. Raises
        WholeRaised and AnnotationError."""
        found = self._run_case(case)
        apart = [m.difference.relative for m in found.compared.mismatches] if found.compared is not None else []
        if not apart:
            return found
        little = all(value < NARROW for value in apart) and case.inputs.dtype in ("float64", "float32")
        if little and self._wide is not self:
            if self._wide is None:
                self._wide = copy(self)
                self._wide._prepared, self._wide._wide = {}, self._wide
                self._wide._asked = lambda dtype: AskedDtypes(dtype_name(dtype))
            with suppress(Exception):  # it may insist on the dtype that it asked for
                return self._wide.run(case)
        rounding = self._rounding(case.inputs)
        if not all(value <= rounding for value in apart):
            return found
        reason = f"rounding of its inputs changes its result by {rounding / NOISE_FACTOR:.1g}"
        return replace(found, compared=None, refused=f"{reason}, which no wrong one can be told from")

    def _rounding(self, inputs: Inputs) -> float:
        """Return up to which difference a result that differs may be rounding. Of few values one run tells too little,
        and a move of one unit is often lost in what follows: some runs, moved by as many units as may be rounding."""
        prepared = self.prepare(inputs)
        exact, call, found = prepared.whole, prepared.whole.concrete, [prepared.bound.rounding]
        values = max((o.numel() for o in exact.outputs if o is not None), default=0)
        with suppress(Exception):  # no more is known where it does not run in float32
            most = NOISE_FACTOR * noise(self._run(self.function(call), call, inputs, torch.float32), exact)
            for draw in range(max(VALUES // max(values, 1), 1)) if inputs.dtype == "float64" else ():
                moved = self._moved(self.function(call), call, inputs, NOISE_FACTOR, draw)
                found += [] if moved is None else [min(most, noise(moved, exact))]
        return max(filter(isfinite, found))

    def _run_case(self, case: SplitCase) -> CaseResult:
        prepared = self.prepare(case.inputs)
        partition = self.partition(prepared.signature, case)
        if isinstance(partition, str):
            return CaseResult(case, prepared.signature, refused=partition)
        generator = torch.Generator().manual_seed(case.inputs.seed + 2)
        if self.progress is not None:
            shapes = ", ".join(str(tuple(t.shape)) for t in prepared.whole.concrete.tensors)
            self.progress(f"shards of a call on shapes {shapes}, {case.split_in_words}")
        try:
            if prepared.on_meta and not partition.communicates:
                self._preflight(prepared, partition, case)
            with self._asked(prepared.whole.dtype):
                guards = self.options.safeguards
                compared = compare_partition(prepared.whole, partition, generator, prepared.bound, guards)
        except ShardRaised as raised:
            return CaseResult(case, prepared.signature, raised=raised)
        return CaseResult(case, prepared.signature, compared)

    def _preflight(self, prepared: Prepared, partition: Partition, case: SplitCase) -> None:
        """Try the shards' shapes once. Raises ShardRaised."""
        key = self._key(case)
        raised = None if key in self._tried else raised_on_meta(self.spec, prepared.whole, partition)
        if raised is not None:
            raise raised
        self._tried.add(key)
