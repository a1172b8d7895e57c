"""Find the parts of a backward that a person has written, rather than torch.

Torch's own derivatives are taken for right. What is looked for: nodes of an `autograd.Function` in the graph that one
run records (`torch.library`'s `register_autograd` makes such nodes too), C++ functions of that kind, and hooks on
tensors and on what is saved for backward. A `detach` or `no_grad` leaves no trace and is no backward: it says what is
a constant.
"""

from __future__ import annotations

import inspect
import sys
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
from torch.utils import checkpoint

from op_registry.source_location import SourceLocation, definition_of
from op_registry.spec import OperatorSpec

from nnscaler.is_user_file import beside
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of, outputs_of, with_tensors
from verify.evidence.oracle.run_whole_operator import as_leaves

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
    """Sees tensors being given hooks. Whoever asks for `grad_fn` is taken to hook the node.

    Checkpoints of torch 2.11 only ask whether there is one. Other files of torch hook it with a function of the user's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Handwritten] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        asks = func == _GRAD_FN and sys._getframe(1).f_code.co_filename != checkpoint.__file__
        if func is Tensor.register_hook or asks:
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
