"""Find whether an operator depends on earlier calls: it has to be one function of its inputs, whatever came before.

On ranks its first call is of a shard, in a process of its own, and here it is of the whole: a scale that is taken from
the first batch, a table as long as the first one, a size that is asked once. So the file is loaded anew, in a child
process, and the same call compared as the first one and after others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch

import op_registry.register
from op_registry.bind_and_localise_call import bind_call
from op_registry.spec import OperatorSpec

import nnscaler
from nnscaler.is_user_file import is_users
from nnscaler.runtime.tensor_bits_and_differences import difference
from verify.evidence.inputs.concrete_call import ConcreteCall
from verify.evidence.inputs.draw_calls import resize
from verify.evidence.inputs.import_user_code import end_where_loaded_anew, load_anew
from verify.evidence.inputs.meta_preflight import succeeds
from verify.operators.audit.watch_effects_on_tensors import Watched, same, watch

ROUNDING = 1e-9  # relative; threads may add in another order


class _Differs(Exception):
    """The same call gives another result after other calls."""


def depends_on_history(spec: OperatorSpec, concrete: ConcreteCall, seed: int) -> bool:
    """Return whether the operator gives another result after other calls than as the first one of its process.

    False, too, where its file cannot be loaded once more, and for what is made inside a function.
    """
    end_where_loaded_anew()
    found = _address(spec.target)
    if found is None:
        return False
    file, name = found
    others = list(_other_calls(spec, concrete))

    def compare(calls: Sequence[ConcreteCall]) -> Callable[[], None]:
        def run() -> None:
            first, second = (_after(_loaded(file, name), c, concrete, seed) for c in ((), calls))
            if not _equal(first, second):
                raise _Differs

        return run

    return succeeds(compare(others)) is False and succeeds(compare(())) is True


def _address(target: Any) -> tuple[str, str] | None:
    """Return the user's file that a function is in, or an autograd function's `apply`, and its name there."""
    owner = target.__self__ if isinstance(target, MethodType) else inspect.unwrap(target) if callable(target) else None
    name = getattr(owner, "__qualname__", "")
    try:
        file = inspect.getsourcefile(owner) if name and "<" not in name else None  # type: ignore[arg-type]
    except TypeError:
        return None
    if file is None or not is_users(file):
        return None
    return file, f"{name}.{target.__name__}" if isinstance(target, MethodType) else name


def _loaded(file: str, name: str) -> Callable[..., Any]:
    """Return the function of a file that is executed once more, and so are the user's modules that it imports. For
    child processes: nothing is registered in them from here on."""
    for module in (nnscaler, op_registry, op_registry.register):
        vars(module)["register_op"] = lambda *_, **__: lambda target: target
    found: Any = load_anew([file])[0]
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _other_calls(spec: OperatorSpec, concrete: ConcreteCall) -> Iterator[ConcreteCall]:
    """Yield calls on other values: of other sizes, all at once and one by one, and of the same."""

    def moved(call: ConcreteCall) -> ConcreteCall:
        tensors = (t * 3 + 1 if t.is_floating_point() or t.is_complex() else t for t in call.tensors)
        return replace(call, tensors=tuple(tensors))

    try:
        bound = bind_call(spec, concrete.call)
    except Exception:  # noqa: BLE001 - what its outputs say of sizes is not known here
        bound = None
    changes = {} if bound is None else {n: size // 2 if size % 2 == 0 else 2 * size for n, size in bound.sizes.items()}
    for wanted in (changes, *({name: size} for name, size in changes.items())):
        assert bound is not None or not wanted
        call = resize(concrete, bound, wanted) if bound is not None and wanted else None
        if call is not None:
            yield moved(call)
    yield moved(concrete)


def _after(function: Callable[..., Any], calls: Sequence[ConcreteCall], concrete: ConcreteCall, seed: int) -> Watched:
    for call in calls:
        try:
            watch(function, call, torch.Generator().manual_seed(seed))
        except Exception:  # noqa: BLE001 - sizes and values were our choice
            continue
    return watch(function, concrete, torch.Generator().manual_seed(seed))


def _equal(one: Watched, other: Watched) -> bool:
    pairs = [*zip(one.outputs, other.outputs, strict=True), *zip(one.gradients, other.gradients, strict=True)]
    return all(
        same(a, b) or (a is not None and b is not None and difference(a, b).relative <= ROUNDING) for a, b in pairs
    )
