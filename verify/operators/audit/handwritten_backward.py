"""Find the parts of a backward that a person has written, and test them in narrow dtypes.
Torch's own derivatives are taken for right. What is looked for: nodes of an `autograd.Function` in the graph that one
run records (`torch.library`'s `register_autograd` makes such nodes too), C++ functions of that kind, and hooks on
tensors and on what is saved for backward. A `detach` or `no_grad` leaves no trace and is no backward: it says what is
a constant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from op_registry.source_location import SourceLocation, definition_of
from op_registry.spec import OperatorSpec

from nnscaler.is_user_file import beside
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of, outputs_of, with_tensors
from verify.evidence.oracle.run_whole_operator import as_leaves, draw_cotangent, gradients_of
from verify.operators.audit.central_differences import moved_from

Way = Literal["autograd.Function", "register_autograd", "C++ autograd function", "tensor hook", "saved tensor hook"]


@dataclass(frozen=True, slots=True)
class Handwritten:
    """A backward that is written by hand.

    name            of the `autograd.Function` or the torch.library operator
    way             in which it is written
    where           the place of its backward
    function_class  of an `autograd.Function` that a person wrote as such; else None
    """

    name: str
    way: Way
    where: SourceLocation | None = None
    function_class: type[torch.autograd.Function] | None = None

    def __str__(self) -> str:
        return f"a {self.way}" if self.way.endswith("hook") else f"`{self.name}`"


def handwritten(
    spec: OperatorSpec, concrete: ConcreteCall, function: Callable[..., Any] | None = None
) -> tuple[Handwritten, ...]:
    """Run the operator once in float64, and list what it finds, each thing once.

    Raises whatever the operator raises. `function`: what to run instead of the operator's own callable.
    """
    function = plain(function or function_of(concrete.call.operator, spec))
    leaves = as_leaves(concrete.tensors, torch.float64, concrete.constants)
    args, kwargs = with_tensors(concrete.call, [t.clone() for t in leaves], {})
    hooks = _Hooks()
    with torch.enable_grad(), hooks, _saved_values_seen(hooks.found):
        outputs = outputs_of(function(*args, **kwargs))
    found = dict.fromkeys(h for node in nodes_of(outputs) if (h := _of_node(node)) is not None)
    return (*found, *dict.fromkeys(hooks.found))


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under `torch.compile`."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def nodes_of(outputs: Sequence[Tensor | None]) -> Iterator[Any]:
    """Yield every node of the graph behind these tensors, once."""
    waiting = [o.grad_fn for o in outputs if o is not None and o.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions if following is not None]


def _of_node(node: Any) -> Handwritten | None:
    if isinstance(node, BackwardCFunction):
        cls: Any = vars(type(node))["_forward_cls"]
        backward = cls.backward if cls.vjp is torch.autograd.Function.vjp else cls.vjp
        registered = _of_library(backward)
        if registered is not None:
            return None if registered.where is None else registered  # without one, it raises
        return Handwritten(cls.__name__, "autograd.Function", definition_of(backward, keyword=True), cls)
    name = node.name()
    if name.startswith("torch::autograd::CppNode"):
        return Handwritten(name.removeprefix("torch::autograd::CppNode").strip("<>"), "C++ autograd function")
    return None


def _of_library(backward: Any) -> Handwritten | None:
    """Return the operator of torch.library whose backward torch has wrapped in this function."""
    code = getattr(backward, "__code__", None)
    if code is None or not code.co_filename.endswith("autograd.py") or "make_autograd_impl" not in code.co_qualname:
        return None
    held = dict(zip(code.co_freevars, (c.cell_contents for c in backward.__closure__ or ()), strict=True))
    if "info" not in held or "op" not in held:
        return None
    return Handwritten(str(held["op"]), "register_autograd", definition_of(held["info"]._backward_fn, keyword=True))


_GRAD_FN = inspect.getattr_static(Tensor, "grad_fn").__get__


class _Hooks(TorchFunctionMode):
    """Sees tensors being given hooks. Whoever asks for `grad_fn` is taken to hook the node."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Handwritten] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook or func == _GRAD_FN:
            hook = args[1] if func is Tensor.register_hook and len(args) > 1 else None
            self.found.append(Handwritten("hook", "tensor hook", definition_of(hook, keyword=True)))
        return func(*args, **(kwargs or {}))


@contextmanager
def _saved_values_seen(found: list[Handwritten]) -> Iterator[None]:
    """Note what packs values for backward inside, other than torch's own (checkpoints, values kept on the CPU)."""
    enter = saved_tensors_hooks.__enter__

    def noted(hooks: saved_tensors_hooks) -> None:
        where = definition_of(hooks.pack_hook, keyword=True)
        if where is None or not where.file.startswith(_TORCH):
            found.append(Handwritten("hook", "saved tensor hook", where))
        enter(hooks)

    with patch.object(saved_tensors_hooks, "__enter__", noted):
        yield


_TORCH = beside(torch.__file__)


# Test a hand-written backward in narrow dtypes: its gradients in float32 and bfloat16 against those in float64.
# Differences show nothing in these dtypes, but the formula is the same one: with inputs that every dtype can
# represent, and outputs that agree, gradients agree up to rounding. How much rounding can do is measured: the
# float64 run is repeated with every intermediate result rounded to the narrow dtype.

LIMITS = ((torch.float32, 0.05), (torch.bfloat16, 0.25))  # of the gradient's norm; a halved gradient is off by 0.5
NOISE = 4.0  # times what rounding alone does
SHARE = 0.1  # outputs agree to this share of the limit, or the dtype is too narrow for these inputs
POINTS = ("shrunk", "grown")


Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The gradient of input `index` in `dtype` is off by `relative` of its norm."""

    index: int
    dtype: torch.dtype
    relative: float


@dataclass(frozen=True)
class _NarrowRun:
    function: Callable[..., Any]
    concrete: ConcreteCall
    wanted: frozenset[int]
    seed: int


@dataclass(frozen=True)
class _Reference:
    """The float64 run at one point: its inputs, which every dtype can represent, outputs and gradients."""

    tensors: tuple[Tensor, ...]
    outputs: Outputs
    gradients: Outputs


def deviation(
    function: Callable[..., Any], concrete: ConcreteCall, wanted: Sequence[int], seed: int
) -> Deviation | None:
    """Return the worst deviation beyond the limit at every point; None if there is none, or a dtype cannot be run."""
    subject = _NarrowRun(function, concrete, frozenset(wanted), seed)
    references: dict[str, _Reference] = {}
    for dtype, limit in LIMITS:
        worst: Deviation | None = None
        for way in POINTS:
            try:
                reference = references.get(way) or _reference(subject, way)
                references[way] = reference
                worst = _at(subject, reference, dtype, limit)
            except Exception:  # noqa: BLE001 - kernels need not exist for every dtype
                worst = None
            if worst is None:
                break
        if worst is not None:
            return worst
    return None


def _reference(subject: _NarrowRun, way: str) -> _Reference:
    generator = torch.Generator().manual_seed(subject.seed)
    tensors = tuple(
        moved_from(t, way, generator).to(torch.bfloat16) if t.is_floating_point() else t
        for t in subject.concrete.tensors
    )
    return _Reference(tensors, *_run(subject, tensors, torch.float64))


def _at(subject: _NarrowRun, exact: _Reference, dtype: torch.dtype, limit: float) -> Deviation | None:
    outputs, gradients = _run(subject, exact.tensors, dtype)
    pairs = [(a, b) for a, b in zip(exact.outputs, outputs, strict=False) if a is not None and b is not None]
    if any(not _relative(a, b) <= SHARE * limit for a, b in pairs if a.is_floating_point() and a.numel()):
        return None
    scale = max((float(g.norm()) for g in exact.gradients if g is not None), default=0.0)
    found = [Deviation(i, dtype, _relative(exact.gradients[i], gradients[i], scale)) for i in subject.wanted]
    beyond = [d for d in found if d.relative > limit]
    if not beyond:
        return None
    with _Rounded(dtype):
        _, rounded = _run(subject, exact.tensors, torch.float64)
    noise = {d.index: _relative(exact.gradients[d.index], rounded[d.index], scale) for d in beyond}
    return max((d for d in beyond if d.relative > NOISE * noise[d.index]), key=lambda d: d.relative, default=None)


class _Rounded(TorchDispatchMode):
    """Rounds the float64 results of every operator to another dtype's precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
                tensor.data.copy_(tensor.to(self.dtype))  # `data`: autograd need not know
        return result


def _run(subject: _NarrowRun, tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Outputs, Outputs]:
    """Return outputs and gradients, with the same random numbers and cotangents each time."""
    torch.default_generator.manual_seed(subject.seed)
    cast = [t.to(dtype, copy=True) if t.is_floating_point() else t.clone() for t in tensors]
    leaves = [t.requires_grad_() if i in subject.wanted else t for i, t in enumerate(cast)]
    args, kwargs = with_tensors(subject.concrete.call, [t.clone() for t in leaves], {}, dtype)
    with torch.enable_grad():
        outputs = outputs_of(subject.function(*args, **kwargs))
    generator = torch.Generator().manual_seed(subject.seed)
    cotangents = [None if o is None else draw_cotangent(o, generator) for o in outputs]
    gradients = gradients_of([outputs], [cotangents], [leaves])[0]
    return tuple(None if o is None else o.detach() for o in outputs), gradients


def _relative(exact: Tensor | None, low: Tensor | None, scale: float = 0.0) -> float:
    """Return the norm of the difference, relative to the exact norm or a thousandth of `scale`."""
    if exact is None and low is None:
        return 0.0
    right = torch.zeros_like(low, dtype=torch.float64) if exact is None and low is not None else exact
    found = torch.zeros_like(right) if low is None or right is None else low.to(right.dtype)  # type: ignore[arg-type]
    assert right is not None
    held = torch.isfinite(right)
    gap = float(torch.where(held, found - right, 0.0).norm())
    reference = max(float(torch.where(held, right, 0.0).norm()), 1e-3 * scale)
    return gap / reference if gap and reference else gap
