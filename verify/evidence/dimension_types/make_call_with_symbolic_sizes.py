"""A call with a symbol for every identifier: fake tensors of symbolic sizes, and size arguments that follow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from op_registry.annotation.bind_sizes import BoundAnnotation
from op_registry.bind_and_localise_call import size_arguments
from op_registry.call import Call, TensorArgument, map_instances

from nnscaler.ir.operation_annotations import Signature
from nnscaler.is_user_file import beside
from nnscaler.runtime.start_autograd import start_autograd
from verify.evidence.dimension_types.localized_call_as_whole_call import resolved
from verify.evidence.dimension_types.states import Size, size_of
from verify.evidence.inputs.concrete_call import with_tensors

# Record who asked about a size: the operator's own code, or torch's kernels.
# Kernels ask whether a size is 1 to lay out memory and to broadcast. What they compute is the same function of
# their arguments either way (a rule knows the exception, `squeeze`), so that their question is no condition of a
# proof. The same question in the operator's code may lead to anything.

_NUMBERS = torch.__file__  # where SymInt and SymBool are, which Python code asks
_TORCH = beside(_NUMBERS)


class Guards(list[Any]):
    """A list of guards that knows which of them the operator's code asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[bool] = []

    def append(self, guard: Any) -> None:
        """Add a guard, which the code on the stack asks for."""
        super().append(guard)
        self.own.append(_is_asked_from_outside())


def _is_asked_from_outside() -> bool:
    """Return whether a file outside torch called the method of a number. Kernels call into torch's own files."""
    frame = sys._getframe(2)
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_filename == _NUMBERS and caller is not None:
            name = caller.f_code.co_filename
            if not name.startswith(_TORCH) and not name.startswith("<"):
                return True
        if caller is None:
            return False
        frame = caller
    return False


@contextmanager
def sizes_shown_as_numbers() -> Iterator[None]:
    """While open, code outside torch that makes text of a symbol gets that of its number, and asks for it: text is cut
    and compared without a word to the symbol. So does code that reads what only numbers have, as `n.real`."""
    with ExitStack() as stack:
        for kind, number in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
            stack.enter_context(patch.object(kind, "__repr__", _shown_as(kind.__repr__, number)))
            stack.enter_context(patch.object(kind, "__getattr__", _read_of(number), create=True))
        yield


def _shown_as(within_torch: Callable[[Any], str], number: Callable[[Any], object]) -> Callable[[Any], str]:
    def shown(value: Any) -> str:
        asking = sys._getframe(1).f_code.co_filename
        return within_torch(value) if asking.startswith(_TORCH) else repr(number(value))

    return shown


def _read_of(number: Callable[[Any], object]) -> Callable[[Any, str], Any]:
    def read(value: Any, name: str) -> Any:
        asking = sys._getframe(1).f_code.co_filename
        if asking.startswith(_TORCH) or not hasattr(number, name):
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}", name=name, obj=value)
        return getattr(number(value), name)

    return read


# Arguments that list the last sizes of the first tensor.
_TRAILING: Mapping[str, tuple[int, str]] = MappingProxyType(
    {"aten.layer_norm.default": (1, "normalized_shape"), "aten.rms_norm.default": (1, "normalized_shape")}
)


class World:
    """The symbols of one trace, and the mode under which tensors of their sizes are made."""

    def __init__(self) -> None:
        start_autograd()
        self.shape_env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        self.shape_env.guards = self.guards = Guards()
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # entries for symbolic sizes cost more than they save
        self.integers: dict[str, torch.SymInt] = {}
        self.symbols: dict[str, Any] = {}  # of sympy

    def symbol(self, name: str, sample: int) -> torch.SymInt:
        """Return a new symbol of at least 1, whose value in the sample is given."""
        source = ConstantSource(name)
        at_least_one = StrictMinMaxConstraint(vr=ValueRanges(1, int_oo), warn_only=True)
        symbol = self.shape_env.create_symbol(sample, source, DimDynamic.DYNAMIC, at_least_one)
        made = self.shape_env.create_symintnode(symbol, hint=sample, source=source)
        assert isinstance(made, torch.SymInt)
        self.symbols[name], self.integers[name] = symbol, made
        return made

    def tensor(self, sizes: Sequence[int | torch.SymInt], dtype: torch.dtype, gradient: bool) -> Tensor:
        """Return a fake contiguous tensor."""
        with self.mode:
            made = torch.empty(list(sizes), dtype=dtype, device="cpu")
        return made.requires_grad_(gradient)


@dataclass(frozen=True)
class SymbolicCall:
    """A call with symbols for sizes.

    inputs   the tensors, by index
    symbols  identifier -> its sympy symbol, where it has one
    outputs  the sizes that the annotation expects of each output; None where it does not say
    """

    world: World
    inputs: tuple[Tensor, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    symbols: Mapping[str, Any]
    outputs: tuple[tuple[Size, ...] | None, ...]


def make_symbolic(
    signature: Signature,
    call: Call | None,
    tensors: Sequence[Tensor],
    constants: frozenset[int],
    wanted: frozenset[str],
) -> SymbolicCall:
    """Return the call of `signature` on fake tensors; with `call`, that one (with `Follows`) in its stead.

    `wanted`: the identifiers that get symbols; others keep the sample's sizes. `constants`: tensors (by index) without
    gradient.
    """
    bound = signature.bound
    assert bound is not None
    world = World()
    sizes: dict[str, int | torch.SymInt] = dict(bound.sizes)
    for name, size in bound.sizes.items():
        if size > 1 and name in wanted:
            sizes[name] = world.symbol(name, size)
    inputs = []
    for index, (tensor, operand) in enumerate(zip(tensors, bound.inputs, strict=True)):
        shape = tuple(tensor.shape) if operand is None else operand.shape_with(sizes)
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        differentiable = (tensor.is_floating_point() or tensor.is_complex()) and index not in constants
        inputs.append(world.tensor(shape, dtype, differentiable))
    outputs = [None if o is None else o.shape_with(sizes) for o in bound.outputs]
    sized = with_symbols(signature, sizes, outputs) if call is None else resolved(call, sizes.__getitem__)
    args, kwargs = with_tensors(sized, inputs, {})
    expected = tuple(None if o is None else tuple(map(size_of, o)) for o in outputs)
    return SymbolicCall(world, tuple(inputs), tuple(args), kwargs, world.symbols, expected)


def with_symbols(
    signature: Signature,
    sizes: Mapping[str, int | torch.SymInt],
    outputs: Sequence[tuple[int | torch.SymInt, ...] | None],
) -> Call:
    """Return the call with symbols for its size arguments: those which `op_registry.bind_call` would make a shard's."""
    spec, call = signature.spec, signature.call
    assert spec is not None
    if spec.shape_argument is not None:
        position, name, output = spec.shape_argument
        given, sized = call.get(position, name), outputs[output]
        if isinstance(given, list | tuple) and sized is not None:
            call = call.replace(position, name, list(sized))
        elif given is not None and sized is not None and len(sized) == 1:
            call = call.replace(position, name, sized[0])
    if call.operator in _TRAILING:
        position, name = _TRAILING[call.operator]
        given = call.get(position, name)
        operand = signature.bound.inputs[0] if signature.bound is not None else None
        if operand is not None:
            call = call.replace(position, name, list(operand.shape_with(sizes)[-len(given) :]))
    positions = {p.name: i for i, p in enumerate(spec.parameters)}
    for name in size_arguments(spec, call):
        if name in sizes:
            call = call.replace(positions.get(name, len(call.args)), name, sizes[name])
    return call


def resized(signature: Signature, bound: BoundAnnotation, sizes: Mapping[str, int]) -> Call:
    """Return the call with other sizes of identifiers, and the arguments that the record declares as sizes following
    them."""
    outputs = [None if o is None else o.shape_with(sizes) for o in bound.outputs]
    call = with_symbols(signature, sizes, outputs)
    shapes = [
        t.shape if o is None else tuple(int(s) for s in o.shape_with(sizes))
        for t, o in zip(signature.call.tensors(), bound.inputs, strict=True)
    ]

    def convert(value: Any) -> Any:
        return map_instances(value, TensorArgument, lambda t: TensorArgument(t.index, shapes[t.index], t.dtype))

    return Call(call.operator, convert(call.args), {k: convert(v) for k, v in call.kwargs.items()})
