"""Samples that others wrote: torch's own `sample_inputs` (OpInfo) of the operators that the registry knows.

Each sample is traced to the calls that a compilation would see (composite operators whole). Those of the operator that
the entry is about are bound, split and compared, forward and backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from op_registry.registry import Registry, default_registry
from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import RunPartial, Split
from verify.evidence.inputs.concrete_call import ConcreteCall, make_call
from verify.evidence.oracle.case_runner import OperatorRunner, WholeRaised
from verify.evidence.oracle.enumerate_cases import leaders_of
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import OpOptions

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

Status = Literal[
    "holds", "refuted", "not bindable", "nothing to split", "empty", "unknown overload", "no call", "excluded"
]
PARTS = (2, 3, 5, 7)  # OpInfo's sizes are small, and 5 more often than not
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)  # the first that the entry has

# Entries whose operators have other names than the entry.
_CALLED = MappingProxyType(
    {
        "T": "numpy_T",
        "__getitem__": "index slice select",
        "__radd__": "add",
        "__rand__": "bitwise_and __and__",
        "__rmatmul__": "matmul",
        "__rmod__": "remainder",
        "__rmul__": "mul",
        "__ror__": "bitwise_or __or__",
        "__rpow__": "pow",
        "__rsub__": "rsub",
        "__rxor__": "bitwise_xor __xor__",
        "double": "to",
        "nn.functional.cross_entropy": "cross_entropy_loss",
        "nn.functional.interpolate": """
            upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
            _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
            adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        """,
        "nn.functional.max_pool1d": "max_pool1d max_pool1d_with_indices",
        "nn.functional.max_pool2d": "max_pool2d max_pool2d_with_indices",
        "nn.functional.max_pool3d": "max_pool3d max_pool3d_with_indices",
        "nn.functional.nll_loss": "nll_loss_nd",
        "nn.functional.softmin": "softmax",
        "nn.functional.unfold": "im2col",
        "norm": "norm linalg_vector_norm linalg_matrix_norm",
        "split": "split split_with_sizes",
    }
)

# Entries that share a name with an annotated operator and are left out.
EXCLUDED = MappingProxyType(
    {
        "nn.functional.dropout": "random; tracing puts nnscaler.dropout in its place",
        "nn.functional.alpha_dropout": "random; tracing puts nnscaler.alpha_dropout in its place",
        "nn.functional.feature_alpha_dropout": "random; tracing puts nnscaler.feature_alpha_dropout in its place",
    }
)


@dataclass(frozen=True, slots=True)
class OpInfoEntry:
    """An entry of torch's table, and the operators (without namespace and overload) that it is about."""

    name: str
    info: OpInfo
    operators: frozenset[str]


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The result of one sample.

    cases        partitions that were run
    comparisons  tensors compared with the whole's, over all cases
    """

    entry: str
    sample: int
    status: Status
    operator: str = ""
    detail: str = ""
    cases: int = 0
    comparisons: int = 0


def known_operators(registry: Registry) -> frozenset[str]:
    """Return the operators of the registry that could be torch's, without namespaces and overloads."""
    return frozenset(name.split(".")[1] for name in registry.names() if name.startswith(("aten.", "nnscaler.")))


def entries(registry: Registry | None = None) -> Iterator[OpInfoEntry]:
    """Yield the entries of torch's table that are about an operator of the registry."""
    from torch.testing._internal.common_methods_invocations import op_db

    known = known_operators(registry or default_registry())
    for info in op_db:
        plain = info.name.removeprefix("nn.functional.").removeprefix("special.").replace(".", "_")
        aliases = {a.name.replace(".", "_") for a in info.aliases}
        names = _CALLED[info.name].split() if info.name in _CALLED else [plain, f"special_{plain}", *aliases]
        shared = known & set(names)
        if shared:
            variant = f"/{info.variant_test_name}" if info.variant_test_name else ""
            yield OpInfoEntry(info.name + variant, info, shared)


def sample_results(entry: OpInfoEntry, limit: int, registry: Registry | None = None) -> Iterator[SampleResult]:
    """Yield the results of at most `limit` samples of one entry, evenly spread, for each of its spellings (aliases)."""
    registry = registry or default_registry()
    if entry.info.name in EXCLUDED:
        yield SampleResult(entry.name, 0, "excluded", detail=EXCLUDED[entry.info.name])
        return
    samples = _samples(entry.info)
    known = known_operators(registry)
    count = min(limit, len(samples))
    chosen = [round(i * (len(samples) - 1) / max(count - 1, 1)) for i in range(count)]
    functions = {str(entry.info.name): entry.info.op}
    functions.update({a.name: a.op for a in entry.info.aliases if a.name.replace(".", "_") in known})
    for number in chosen:
        sample = samples[number]
        for function in functions.values():
            yield _result(entry, number, function, (sample.input, sample.args, sample.kwargs), registry)


def _samples(info: OpInfo) -> list[Any]:
    """Return the entry's samples, in float64 where it has any. torch is seeded, so that they are the same each time."""
    dtype = next((d for d in DTYPES if d in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return []  # an operator of other devices
    wants = info.supports_autograd and dtype.is_floating_point
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return list(info.sample_inputs("cpu", dtype, requires_grad=wants))


def _result(
    entry: OpInfoEntry, number: int, function: Callable[..., Any], arguments: Any, registry: Registry
) -> SampleResult:
    """Return the weakest result of the sample's calls of the entry's operators."""
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
    if any(not t.numel() for t in tensors):
        return SampleResult(entry.name, number, "empty")
    calls = [c for c in traced_calls(function, arguments) if c.call.operator.split(".")[1] in entry.operators]
    found = [replace(check_call(call, registry), entry=entry.name, sample=number) for call in calls]
    if not found:
        return SampleResult(entry.name, number, "no call")
    order = ("refuted", "not bindable", "unknown overload", "empty", "holds", "nothing to split")
    return min(found, key=lambda r: order.index(r.status))


def traced_calls(
    function: Callable[..., Any], arguments: tuple[Any, Sequence[Any], dict[str, Any]]
) -> list[ConcreteCall]:
    """Return the ATen calls that `function(input, *args, **kwargs)` makes, before they are decomposed."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, tree = pytree.tree_flatten(arguments)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in at]

    def of_tensors(*given: Tensor) -> Any:
        values = list(leaves)
        for i, tensor in zip(at, given, strict=True):
            values[i] = tensor
        first, args, kwargs = pytree.tree_unflatten(values, tree)
        return function(first, *args, **kwargs)

    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        recorder = _AtenRecorder(make_fx(of_tensors, pre_dispatch=True)(*tensors))
        recorder.run(*tensors)
    return recorder.calls


class _AtenRecorder(torch.fx.Interpreter):
    """Runs a traced graph, and keeps its ATen calls with their tensors."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.calls: list[ConcreteCall] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one call. Tensors without a gradient (targets, weights of classes) stay so."""
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
            name, plain = str(target), [list(a) if isinstance(a, list) else a for a in args]
            tensors = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
            constants = frozenset(i for i, t in enumerate(tensors) if not t.requires_grad)
            call = make_call(name, plain, kwargs, "given")
            self.calls.append(replace(call, constants=constants, compare="empty" not in name))
        return super().call_function(target, args, kwargs)


class GivenCall(OperatorRunner):
    """Runs cases of one call with the tensors that it was made with."""

    def __init__(self, spec: OperatorSpec, call: ConcreteCall, options: OpOptions) -> None:
        super().__init__(spec, options)
        self.given, self.rows, self.trusted = (call,), (), True


def check_call(call: ConcreteCall, registry: Registry) -> SampleResult:
    """Check every identifier in as few parts as divide it, and in uneven ones; every set of partial sums in 2."""
    name = call.call.operator
    spec = registry.lookup(name)
    if spec is None:
        return SampleResult("", 0, "unknown overload", name)
    if any(not t.numel() for t in call.tensors):
        return SampleResult("", 0, "empty", name)
    runner = GivenCall(spec, call, OpOptions())
    inputs = Inputs(0, (), "given")
    cases = comparisons = 0
    try:
        for case in _cases(inputs, runner.prepare(inputs).signature):
            result = runner.run(case)
            if result.failed:
                why = str(result.raised or (result.compared and result.compared.mismatches[0]))
                text = result.signature.bound.text if result.signature.bound is not None else ""
                return SampleResult("", 0, "refuted", name, f"`{text}`: {case.choices[0]} in {case.parts[0]}: {why}")
            cases += result.compared is not None
            comparisons += result.compared.count if result.compared is not None else 0
    except (AnnotationError, WholeRaised) as error:
        return SampleResult("", 0, "not bindable", name, in_one_line(error, 200))
    return SampleResult("", 0, "holds" if comparisons else "nothing to split", name, "", cases, comparisons)


def _cases(inputs: Inputs, signature: Signature) -> Iterator[SplitCase]:
    bound = signature.bound
    assert bound is not None
    for name in leaders_of(signature):
        together = bound.tied.get(name, (name,))
        parts = next((p for p in PARTS if all(bound.sizes[t] % p == 0 for t in together)), None)
        if parts is not None:
            yield SplitCase(inputs, (Split(name),), (parts,))
        yield SplitCase(inputs, (Split(name),), (2,), uneven=True)
    for slots in signature.linear:
        yield SplitCase(inputs, (RunPartial(slots),), (2,))
