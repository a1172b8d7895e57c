"""Compile the forward of stages with torch.compile, around what it cannot look into.

Collectives that are not nodes of a graph (`collectives_in_graphs`) stay as they are written: torch.compile ends a graph
before them and begins another one after them. So every call is made, by the communicator that the executor was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch._guards import TracingContext  # the stack of what is traced; torch has no public way to it

from nnscaler.is_user_file import OURS, beside

Function = Callable[..., Any]
T = TypeVar("T")

_NO_PROGRAMS = (*OURS, beside(torch.__file__))
# Graphs with effects in an order, or Functions of autograd, are kept for the next process where torch is told a version
# of these two.
_KEPT = tuple(f"torch.ops.higher_order.{name}" for name in ("with_effects", "autograd_function_apply"))
_CODE = Path(__file__).parents[1]  # of this package


class GraphNumbers(Generic[T]):
    """Numbers by which operators in graphs find what is no tensor, as long as it is there.

    From zero, and not by `id`: what torch keeps of a graph for the next process, it finds by all constants.
    """

    def __init__(self) -> None:
        self._found: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._lock = Lock()  # simulated ranks are threads

    def of(self, item: T) -> int:
        """Return the number of an object."""
        with self._lock:
            known = (number for number, other in self._found.items() if other is item)
            free = (number for number in count() if number not in self._found)
            number = next(known, None)
            number = next(free) if number is None else number
            self._found[number] = item
        return number

    def __getitem__(self, number: int) -> T:
        return self._found[number]


def _call(function: Function, *arguments: Any) -> Any:
    return function(*arguments)


# What `apart` calls with. Another one comes in when something is compiled: to import the compiler takes seconds.
_call_with: dict[str, Function] = {"apart": _call}


def apart(function: Function, *arguments: Any) -> Any:
    """Call `function(*arguments)` outside of what is compiled."""
    return _call_with["apart"](function, *arguments)


def leave_in_python(functions: Iterable[Any]) -> None:
    """Compile no frames of those of these functions that call something apart.

    Where a stage's graph ends inside of one, torch.compile would compile the function too, once for each kind of
    arguments, until it warns of too many. There is nothing in it but the call.
    """
    import torch._dynamo.eval_frame  # takes seconds

    for function in functions:
        if isinstance(function, FunctionType) and {"apart", "_convert", "_call_with"} & {*function.__code__.co_names}:
            torch._dynamo.eval_frame.skip_code(function.__code__)


def unseen(function: Function) -> Function:
    """Return the function as torch.compile leaves it alone, where something is compiled."""
    return function if _call_with["apart"] is _call else torch.compiler.disable(function)


def place_in_graph() -> str:
    """Return file:line of the rank program that torch.compile reads, "" where that is not known.

    A constant of what is compiled, by `compiled`.
    """
    context = TracingContext.try_get()
    for frame in reversed(TracingContext.extract_stack() if context is not None else ()):
        if not frame.filename.startswith(_NO_PROGRAMS):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def compiled(forward: Function, constant: Iterable[Function], several: bool, operators: Iterable[str] = ()) -> Function:
    """Return a compiled forward. `constant`: functions whose results are constants of it. `several`: other ranks
    compile the same. `operators`: digests of the code of the user's operators that it calls."""
    if _call_with["apart"] is _call:
        _call_with["apart"] = torch.compiler.disable(_call)
    for function in (place_in_graph, *constant):
        torch.compiler.assume_constant_result(function)
    if torch.__version__ < "2.13":
        _correct_fake_attention()
    options: dict[str, Any] = {"unsafe_marked_cacheable_functions": _versions(operators)}
    # What several ranks hold in common must stay equal bit for bit, and kernels that each rank chooses by its own
    # timings sum in orders of their own: none is chosen so.
    options |= {"deterministic": True} if several else {}
    made = torch.compile(forward, dynamic=False, options=options)
    return _static_sizes.around(made) if several and torch.__version__ < "2.12" else made


def _versions(operators: Iterable[str]) -> Mapping[str, str]:
    """Return what torch is told of the code that it runs when it makes a graph, by name of what is kept with it.

    Torch looks for a graph by what its operators are called and given. What they are without values, their derivatives
    (`torch.library`), what bodies of Functions call and torch does not look into, and how the graph is changed before
    it is cut in two (`joint_graphs`), are written in Python, here or by the user, and make another graph of the same.
    """
    version = sha256("\n".join([_digest_of_own_code(), *operators]).encode()).hexdigest()
    return dict.fromkeys(_KEPT, version)


@lru_cache(maxsize=1)
def _digest_of_own_code() -> str:
    files = sorted([*_CODE.glob("*.py"), *(_CODE / "runtime").rglob("*.py")])
    return sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


class _StaticSizes:
    """Keeps sizes static, as `dynamic=False` says, while any thread is in a function that was compiled so.

    torch 2.11 sets it for all threads where a call begins, and takes it back where that call ends: other simulated
    ranks, which are threads, would go on with sizes and graph numbers that are symbols.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = Lock(), 0, True

    def around(self, function: Function) -> Function:
        """Return the function, with the setting off while it runs; as it was when no thread is in one of them."""
        import torch._dynamo.config

        settings: Any = torch._dynamo.config

        def run(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                if not self._inside:
                    self._before, settings.automatic_dynamic_shapes = settings.automatic_dynamic_shapes, False
                self._inside += 1
            try:
                return function(*arguments, **named)
            finally:
                with self._lock:
                    self._inside -= 1
                    if not self._inside:
                        settings.automatic_dynamic_shapes = self._before

        return run


_static_sizes = _StaticSizes()


def _correct_fake_attention() -> None:
    """Let graphs know that attention of float64 on CPUs keeps float64 sums for backward.

    The fake kernel of torch before 2.13 says float32, and the backward that is compiled by it raises.
    """
    import torch._meta_registrations
    from torch._subclasses import fake_impls

    plain = torch._meta_registrations.meta__scaled_dot_product_flash_attention_for_cpu

    def attention(mode: Any, _operator: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        with mode:
            output, sums = plain(query, *rest, **named)
            return output, sums.double() if query.dtype == torch.float64 else sums

    overload = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    fake_impls.op_implementations_dict[overload] = attention
