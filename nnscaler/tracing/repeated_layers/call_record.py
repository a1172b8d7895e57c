"""Record one call of a layer operator by operator, so that two calls can be compared.

Tensors are written as labels: `("made", 7)` for the eighth result inside the call, `("own", "mlp.up.weight", ..)` for a
stored tensor of the layer, `("model", "embed.weight", ..)` for another one of the model, `("given", 0, ..)` for the
first tensor from outside of the call that it reads, `("constant", 0, ..)` for a tensor with data. Two calls whose keys
are equal do the same with tensors that stand at the same places and look the same.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from nnscaler.errors import NnscalerError
from nnscaler.runtime.tensor_bits_and_differences import bits_of

# Describe fake tensors by their visible properties, and make new ones that look the same.


@dataclass(frozen=True, slots=True)
class Look:
    """All that code can ask about a tensor without data. `plain`: `made_like` can make such a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    plain: bool


class CannotStitch(NnscalerError):
    """The layers have to be traced one by one, for the reason given. No user sees it as an error."""

    def __init__(self, reason: str) -> None:
        super().__init__("trace_failed", reason)


def look_of(tensor: Tensor) -> Look:
    """Raises CannotStitch for a size that is not fixed."""
    if tensor._has_symbolic_sizes_strides:
        raise CannotStitch("a layer computes with a size that depends on data")
    fake = isinstance(tensor, FakeTensor)
    strided = tensor.layout == torch.strided and not tensor.is_quantized
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return Look(
        tuple(tensor.shape),
        tensor.stride() if strided else (),
        int(tensor.storage_offset()) if strided else 0,
        tensor.dtype,
        device,
        tensor.requires_grad,
        fake and strided and not (tensor.is_conj() or tensor.is_neg()),
    )


def made_like(look: Look, memory: torch.UntypedStorage | None, mode: FakeTensorMode) -> FakeTensor:
    """Make a fake tensor that looks so, a view of `memory` or with memory of its own.

    It has no history: a leaf, also where it requires a gradient (see `join_history`).
    """
    with in_kernel_invocation_manager(mode):
        if memory is None:
            bare = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device="meta")
        else:
            bare = torch.empty(0, dtype=look.dtype, device="meta")
            bare.set_(memory, look.offset, look.shape, look.stride)
    made = FakeTensor(mode, bare, look.device)
    made.requires_grad_(look.requires_grad)
    return made


def join_history(tensor: Tensor) -> None:
    """Make a leaf that requires a gradient the result of an operator: code may write into it then."""
    if not (isinstance(tensor, FakeTensor) and tensor.requires_grad and tensor.is_leaf):
        return
    recording = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        tensor.requires_grad_(False)
        torch._C._set_grad_enabled(True)
        with tensor.fake_mode:
            source = torch.empty((), dtype=tensor.dtype, device=tensor.fake_device, requires_grad=True)
            tensor.add_(source)
        torch._C._set_grad_enabled(recording)


Label = tuple[Any, ...]
Place = tuple[str, int] | None  # file and line
Innermost = tuple[str, str]  # path and class of the module that runs


@dataclass(frozen=True, slots=True)
class ReturnedTensor:
    """A tensor that an operator returned.

    old      its label before, if the operator wrote into it
    memory   a number for its memory, equal for tensors of the record that share it
    look     its shape, dtype and other properties
    """

    old: Label | None
    memory: int
    look: Look


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operator, or one entry into (exit from) a region.

    function   that is called
    args       positional arguments
    kwargs     keyword arguments
    place      in the model's code
    modules    the stack of modules around it
    notes      the annotations of `torch.fx.traceback.annotate`
    spec       the structure of its result
    leaves     of its result: `ReturnedTensor`s, and values that are no tensors
    first      the number of its first tensor among those made
    quick      whether a result can be made from the looks
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: Place
    modules: Mapping[str, Any]
    notes: Mapping[str, Any]
    spec: TreeSpec | None = None
    leaves: tuple[Any, ...] = ()
    first: int = 0
    quick: bool = False


@dataclass
class Record:
    """`given`: the tensors from outside, in order of first use; `constants`: likewise. `made`: results, in order; None
    for one that is gone, because nobody uses it."""

    path: str
    own: Mapping[int, str]
    model: Mapping[int, str]
    is_given: Callable[[Tensor], bool]
    key: list[Any] = field(default_factory=list)
    steps: list[RecordedCall] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    made: list[Tensor | None] = field(default_factory=list)
    names: dict[Any, int] = field(default_factory=dict)  # that annotations give, such as those of checkpoints
    mode: FakeTensorMode | None = None
    _labels: dict[int, Label] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)  # of memories
    _memories: list[torch.UntypedStorage] = field(default_factory=list)
    _sharers: dict[int, set[int]] = field(default_factory=dict)
    _new: list[tuple[int, int, weakref.ref[Tensor]]] = field(default_factory=list)

    def written(self, step: RecordedCall, innermost: Innermost | None) -> None:
        """Note an operator before it runs: it may write into its arguments."""
        self.settle()
        inside = None
        if innermost is not None:
            path, kind = innermost
            own = path == self.path or path.startswith(self.path + ".")
            inside = (own, path[len(self.path) :] if own else path, kind)
        noted = tuple((k, self.names.setdefault(v, len(self.names))) for k, v in sorted(step.notes.items()))
        self.key.append((step.function, self._freeze(step.args), self._freeze(step.kwargs), inside, step.place, noted))

    def returned(self, step: RecordedCall, result: Any) -> tuple[Tensor, ...]:
        """Note the results of the operator just written. Nothing here may hold on to them: torch copies a new tensor
        that has two owners."""
        flat, spec = tree_flatten(result)
        tensors = tuple(leaf for leaf in flat if isinstance(leaf, Tensor))
        known = len(self._memories)
        leaves = tuple(self._result(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat)
        self.key.append(tuple(leaf if isinstance(leaf, ReturnedTensor) else (type(leaf), leaf) for leaf in leaves))
        first, quick = len(self.made), all(self._is_quick(leaf, known) for leaf in leaves)
        for tensor in tensors:
            self._new.append((len(self.made), id(tensor), weakref.ref(tensor)))
            self._labels[id(tensor)] = ("made", len(self.made))
            self.made.append(None)
        more = (spec, leaves, first, quick)
        self.steps.append(
            RecordedCall(step.function, step.args, step.kwargs, step.place, step.modules, step.notes, *more)
        )
        return tensors

    def settle(self) -> None:
        """Hold the results of the last operator that still live."""
        for number, key, reference in self._new:
            self.made[number] = tensor = reference()
            if tensor is None and self._labels.get(key) == ("made", number):
                del self._labels[key]
        self._new.clear()

    def latest(self) -> dict[int, tuple[Tensor, int]]:
        """Return the tensors made or written, by identity, and the number of the last result that they are."""
        return {id(tensor): (tensor, number) for number, tensor in enumerate(self.made) if tensor is not None}

    def result_like(self, other: RecordedCall, args: Any) -> Any:
        """Return the result of the operator just written without running it, given that it is `other` of a record equal
        so far."""
        assert other.spec is not None and self.mode is not None
        leaves = []
        for leaf in other.leaves:
            if not isinstance(leaf, ReturnedTensor):
                leaves.append(leaf)
            elif leaf.old is not None:
                found = (t for t in tree_leaves(args) if isinstance(t, Tensor) and self._labels[id(t)] == leaf.old)
                leaves.append(next(found))
                if leaf.look.requires_grad:
                    leaves[-1].requires_grad_(True)
            else:
                memory = self._memories[leaf.memory] if leaf.memory < len(self._memories) else None
                leaves.append(made_like(leaf.look, memory, self.mode))
        return tree_unflatten(leaves, other.spec)

    def result_of(self, step: RecordedCall) -> Any:
        """Return the result of a step of this record; what is gone is made again."""
        if step.spec is None:
            return None
        leaves, number = [], step.first
        for leaf in step.leaves:
            if isinstance(leaf, ReturnedTensor):
                tensor = self.made[number]
                if tensor is None:
                    assert self.mode is not None
                    tensor = made_like(leaf.look, self._memories[leaf.memory], self.mode)
                leaves.append(tensor)
                number += 1
            else:
                leaves.append(leaf)
        return tree_unflatten(leaves, step.spec)

    def _result(self, tensor: Tensor) -> ReturnedTensor:
        if isinstance(tensor, FakeTensor):
            self.mode = tensor.fake_mode
        return ReturnedTensor(self._labels.get(id(tensor)), self._memory(tensor), look_of(tensor))

    def _is_quick(self, leaf: Any, known: int) -> bool:
        if not isinstance(leaf, ReturnedTensor):
            return leaf is None
        if not leaf.look.plain:
            return False
        if leaf.old is not None:
            return len(self._sharers[leaf.memory]) == 1
        return leaf.memory < known or leaf.look.offset == 0

    def _memory(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._memories)
            self._memories.append(storage)  # while it lives, its number is not given to another
        self._sharers.setdefault(number, set()).add(id(tensor))
        return number

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            known = self._labels.get(id(value))
            if known is None:
                known = self._labels[id(value)] = self._label(value)
            return known
        if isinstance(value, list | tuple):
            return tuple(self._freeze(v) for v in value)
        if isinstance(value, Mapping):
            return tuple((k, self._freeze(v)) for k, v in sorted(value.items()))
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CannotStitch("a layer computes with a size that is not fixed")
        return (type(value), repr(value) if isinstance(value, float | complex) else value)

    def _label(self, tensor: Tensor) -> Label:
        look = look_of(tensor)
        if self.is_given(tensor):
            self.given.append(tensor)
            return ("given", len(self.given) - 1, look, self._memory(tensor))
        if id(tensor) in self.own:
            return ("own", self.own[id(tensor)], look, self._memory(tensor))
        if id(tensor) in self.model:
            return ("model", self.model[id(tensor)], look, self._memory(tensor))
        if isinstance(tensor, FakeTensor):
            raise CannotStitch("a layer reads a tensor of which torch's tracer does not know where it comes from")
        self.constants.append(tensor)
        return ("constant", len(self.constants) - 1, look, data_of(tensor))


def data_of(tensor: Tensor) -> Any:
    """Return the values of a tensor as something that can be compared; where they cannot be read, the tensor's
    identity."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return id(tensor)
    with unset_fake_temporarily(), torch.no_grad():
        return bytes(bits_of(tensor).cpu().numpy()) if tensor.numel() else b""


class CallPlaces:
    """Where the user's code calls an operator: the last `forward` outside of torch and of this project. Torch's tracer
    notes the functions of that name."""

    def __init__(self, is_library: Callable[[str], bool]) -> None:
        self._is_library = is_library
        self._known: dict[CodeType, bool] = {}

    def here(self) -> Place:
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            library = self._known.get(code)
            if library is None:
                library = code.co_name != "forward" or self._is_library(code.co_filename)
                self._known[code] = library
            if not library:
                return code.co_filename, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return None
