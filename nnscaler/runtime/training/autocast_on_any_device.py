"""Apply autocast on the device on which a model's code runs, whatever device the model names.

A model that is written for GPUs says `torch.autocast("cuda", torch.bfloat16)`. Where it is traced, verified or run on a
CPU, torch switches such a region off, and a program made there would have no bfloat16 in it. So wherever we run a
model's code, autocast has no device of its own: a region that names one is a region of the device that runs it, and
`torch.is_autocast_enabled("cuda")` inside gives the answer that it would give there.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.utils._python_dispatch import TorchDispatchMode

from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.torch_compile import unseen

# The dtypes of a rank program under the precision that it runs in.
# `dtypes.float32` in a program is torch.float32 unless its executor was given another precision; "float64" then
# maps every floating dtype to float64, so that a program can be compared exactly.

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def dtype_named(name: str, precision: str | None = None) -> torch.dtype:
    """Return the torch dtype called `name`, mapped to `precision` when it is floating.

    Raises ProgramError if none is.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProgramError(f"no dtype is called {name!r}")
    return in_precision(dtype, precision)


def in_precision(dtype: torch.dtype, precision: str | None) -> torch.dtype:
    """`dtype`, or the dtype that takes its place in a run of this precision."""
    if precision is None or not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    target = dtype_named(precision)
    return _COMPLEX.get(target, dtype) if dtype.is_complex else target


_current_precision: ContextVar[str | None] = ContextVar("precision", default=None)


class AskedDtypes(TorchDispatchMode):
    """While open, whatever code asks for a floating dtype gets that of a precision, in its backward too. Operators of
    users compute in float32 inside, which an exact run would take for an error."""

    def __init__(self, precision: str = "float64") -> None:
        super().__init__()
        self._precision = precision

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {key: self._meant(value) for key, value in (kwargs or {}).items()}
        return func(*map(self._meant, args), **named)

    def _meant(self, value: Any) -> Any:
        return in_precision(value, self._precision) if isinstance(value, torch.dtype) else value


@contextmanager
def precision_of_run(precision: str | None, asked: bool = False) -> Iterator[None]:
    """`dtypes` mean this precision inside, in this thread; in an exact run so do the dtypes that code has `asked`
    for."""
    token = _current_precision.set(precision)
    try:
        with AskedDtypes() if asked and precision == "float64" else nullcontext():
            yield
    finally:
        _current_precision.reset(token)


def dtype_of_run(name: str) -> torch.dtype:
    """Return the dtype in the precision of the run. What is compiled is compiled in one precision."""
    return dtype_named(name, _current_precision.get())


class Dtypes:
    """`dtypes.<name>`: the torch dtype of that name in the precision of the run."""

    def __getattr__(self, name: str) -> torch.dtype:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return dtype_of_run(name)
        except ProgramError as error:
            raise AttributeError(str(error)) from None


dtypes = Dtypes()


_ASKED = ("cuda", "cpu")  # devices that code asks for whatever device it runs on


class AutocastUnknown(Exception):
    """A region of another device was made before our code ran, and torch does not say whether it was wanted."""


@dataclass
class Regions:
    """The regions that were entered while `autocast_on` is open.

    device         the device that runs
    named          (device, dtype) of each region that names another device -> file and line where it is first entered
    switched_off   (device, device around it) of each disabled region that names another device than the enabled one
                   around it -> its place
    """

    device: str
    named: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    switched_off: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)


_current: ContextVar[Regions | None] = ContextVar("autocast", default=None)
_lock = threading.Lock()
_open = ExitStack()
_users = 0
_thread = threading.local()


@contextmanager
def autocast_on(device: str) -> Iterator[Regions]:
    """Make autocast of any device that of `device`, in this thread and while open.

    Raises AutocastUnknown from a region that cannot be read.
    """
    regions = Regions(device)
    _install()
    token = _current.set(regions)
    try:
        yield regions
    finally:
        _current.reset(token)
        _remove()


def _install() -> None:
    """Patch torch for the first user; ranks of a simulator are threads of one process."""
    global _users  # noqa: PLW0603 - torch's own class is what is shared
    with _lock:
        _users += 1
        if _users == 1:
            cls: Any = autocast_mode.autocast
            for owner, name, made in (
                (cls, "__init__", _init),
                (cls, "__enter__", _enter),
                (cls, "__exit__", _exit),
                (autocast_mode, "_cast", _cast),
            ):
                real = getattr(owner, name)
                setattr(owner, name, unseen(made(real)))  # a region that a graph ends in is entered in Python
                _open.callback(setattr, owner, name, real)


def _remove() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users == 0:
            _open.close()


def _init(real: Callable[..., None]) -> Callable[..., None]:
    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        regions = _current.get()
        if regions is not None and regions.device != "cuda" and dtype == torch.float64:
            enabled = False  # of an exact run: torch would switch it off with a warning that the user cannot act on
        if regions is None or device_type == regions.device:
            real(self, device_type, dtype, enabled, cache_enabled)
            return
        if dtype is None and autocast_mode.is_autocast_available(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        real(self, regions.device, dtype, enabled, cache_enabled)
        self._nnscaler_named = device_type

    return init


def _enter(real: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        regions = _current.get()
        if regions is None:
            return real(self)
        region = self if self.device == regions.device else _made_again(self, regions)
        named = getattr(region, "_nnscaler_named", region.device)
        if region._enabled and named != regions.device:
            dtype = str(region.fast_dtype).removeprefix("torch.")
            regions.named.setdefault((named, dtype), _place(sys._getframe(1)))
        elif named != regions.device and torch.is_autocast_enabled(regions.device):
            around = getattr(_entered()[-1][1], "_nnscaler_named", regions.device) if _entered() else regions.device
            if around != named:
                regions.switched_off.setdefault((named, around), _place(sys._getframe(1)))
        asked = [
            d for d in dict.fromkeys((*_ASKED, named)) if d != regions.device and autocast_mode.is_autocast_available(d)
        ]
        before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in asked]
        _entered().append((self, region, before))
        for device in asked:
            torch.set_autocast_enabled(device, region._enabled)
            torch.set_autocast_dtype(device, region.fast_dtype)
        real(region)
        return self

    return enter


def _exit(real: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *error: Any) -> Any:
        entered = _entered()
        last = next((i for i in reversed(range(len(entered))) if entered[i][0] is self), None)
        if last is None:
            return real(self, *error)
        _, region, before = entered.pop(last)
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        return real(region, *error)

    return leave


def _entered() -> list[tuple[Any, Any, list[tuple[str, bool, torch.dtype]]]]:
    """Return the regions that this thread is in.

    Each is the region that was entered, the region of this device, and torch's earlier answers for other devices.
    """
    if not hasattr(_thread, "entered"):
        _thread.entered = []
    found: list[tuple[Any, Any, list[tuple[str, bool, torch.dtype]]]] = _thread.entered
    return found


def _cast(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the cast of `custom_fwd(device_type="cuda", cast_inputs=...)`, which casts tensors of that device alone."""

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        regions = _current.get()
        return real(value, device_type if regions is None else regions.device, dtype)

    return cast


def _made_again(region: Any, regions: Regions) -> Any:
    """Return the region of this device for one that was made, for another, before `autocast_on` was open: a
    decorator."""
    enabled = bool(region._enabled) or _was_wanted(region)
    made = autocast_mode.autocast(regions.device, region.fast_dtype, enabled, region._cache_enabled)
    made._nnscaler_named = region.device  # type: ignore[attr-defined]
    return made


def _was_wanted(region: Any) -> bool:
    """Return whether the region was made with `enabled=True`: torch switches it off on a machine without such a device.

    Raises AutocastUnknown where that is not written in the decorator of the function that is called.
    """
    if region.device != "cuda" or not torch.cuda.amp.common.amp_definitely_not_available():
        return False  # the user's own word
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "decorate_autocast":
        on_the_way = frame.f_globals.get("__name__", "").startswith(("torch.", __name__))
        frame = frame.f_back if on_the_way else None
    wanted = None if frame is None else _decorated(frame.f_locals.get("func"))
    if wanted is None:
        message = f'a region of torch.autocast("{region.device}") is made outside of forward'
        raise AutocastUnknown(f"{message}, and torch has switched it off on this machine")
    return wanted


def _decorated(function: Any) -> bool | None:
    """Return the literal `enabled` of the only autocast among the function's decorators; None where it is no
    literal."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return None
    defined = tree.body[0]
    found = [
        call
        for call in getattr(defined, "decorator_list", ())
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "autocast"
    ]
    if len(found) != 1 or any(isinstance(a, ast.Starred) for a in found[0].args):
        return None
    given = {k.arg: k.value for k in found[0].keywords}
    of_device = bool(found[0].args) and "device_type" not in given and not isinstance(_literal(found[0].args[0]), bool)
    place = 2 if of_device or "device_type" in given else 0  # torch.cuda.amp.autocast(enabled, dtype)
    value = given.get("enabled", found[0].args[place] if len(found[0].args) > place else ast.Constant(True))
    written = _literal(value)
    return written if isinstance(written, bool) and None not in given else None


def _literal(value: ast.expr) -> Any:
    return value.value if isinstance(value, ast.Constant) else None


def _place(frame: FrameType) -> tuple[str, int]:
    """Return file and line of the model's code that enters a region; of a decorated function its first line."""
    found = frame
    while found.f_globals.get("__name__", "").startswith(("torch.", "contextlib")) and found.f_back is not None:
        function = found.f_locals.get("func") if found.f_code.co_name == "decorate_autocast" else None
        if inspect.isfunction(function):
            return function.__code__.co_filename, function.__code__.co_firstlineno
        found = found.f_back
    return found.f_code.co_filename, found.f_lineno
