"""Python text of the calls in a generated program: their arguments, layouts, conversions, functions and origins."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch._library.custom_ops import OPDEFS

from op_registry.call import AxisArgument, Call, DType, TensorArgument
from op_registry.infer_torch_schema import is_factory, is_one_operator, schema_of
from op_registry.rank_expression import Coefficient, Expression
from op_registry.registry import default_registry

from nnscaler.ir.conversion_table_and_paths import ConversionStep
from nnscaler.layout import Axis, Invariant, Layout, Partial, Prefix, Replicated, Sharded, local_outer


def literal(value: Any, variables: Sequence[str]) -> str:
    """Write one argument; `variables[i]` is the text of the call's i-th tensor."""
    match value:
        case TensorArgument(index=index):
            return variables[index]
        case DType(name=name):
            return f"dtypes.{name}"
        case AxisArgument(name=name):
            return f"self.{name}"
        case Expression():
            return expression(value)
        case bool() | None | str():
            return repr(value)
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case int() | float() | complex():
            return repr(value)
        case list():
            return "[" + ", ".join(literal(v, variables) for v in value) + "]"
        case tuple():
            inside = ", ".join(literal(v, variables) for v in value)
            return f"({inside},)" if len(value) == 1 else f"({inside})"
    raise AssertionError(f"no text for an argument of type {type(value).__name__}: {value!r}")


def expression(value: Expression) -> str:
    """Write an expression of the rank's place: `5 + 20 * self.tp.index`, `(7, 7, 6)[self.tp.index]`."""
    terms = [_term(f"self.{axis}.index", factor) for axis, factor in value.terms]
    if value.constant or not terms:
        terms.insert(0, str(value.constant))
    return " + ".join(terms)


def _term(index: str, factor: Coefficient) -> str:
    if isinstance(factor, tuple):
        return f"{factor}[{index}]"
    return index if factor == 1 else f"{factor} * {index}"


def arguments(call: Call, variables: Sequence[str]) -> list[str]:
    """Write all arguments of a call, positional ones first."""
    positional = [literal(v, variables) for v in call.args]
    return [*positional, *(f"{k}={literal(v, variables)}" for k, v in call.kwargs.items())]


# How a tensor lies on a mesh, in the few words of a comment.
# `(24/dp/micro, 16, 144/3*tp), sum over sp`: a logical shape; dp and then micro-batches cut 24, tp cuts each of 3
# equal blocks of 144, and every rank along sp holds a term of the sum. `251/tp{126 125}`: the ranks' parts are
# unequal.


def layout_text(shape: Sequence[int], layout: Layout, axes: Sequence[Axis]) -> str:
    """Write the layout of a tensor of logical `shape`; axes of size 1 are left out."""
    states = [(axis.name, axis.size, state) for axis, state in zip(axes, layout, strict=True) if axis.size > 1]
    dims = [str(size) for size in shape]
    cuts = sorted((s.outer, name, parts, s) for name, parts, s in states if isinstance(s, Sharded))
    inside = [1] * len(shape)
    for outer, name, parts, state in cuts:
        gap = outer // inside[state.dim]
        dims[state.dim] += f"/{gap}*{name}" if gap > 1 else f"/{name}"
        if state.sections:
            dims[state.dim] += "[" + " ".join(map(str, state.sections)) + "]"
        if state.sizes:
            dims[state.dim] += "{" + " ".join(map(str, state.sizes)) + "}"
        inside[state.dim] = outer * parts
    for name, _, prefix in states:
        if isinstance(prefix, Prefix):
            dims[prefix.dim] += f"<{name}"
    text = f"({', '.join(dims)})"
    for reduction in ("sum", "max"):
        over = [name for name, _, state in states if state == Partial(reduction)]
        if over:
            text += f", {reduction} over {' '.join(over)}"
    deferred = [name for name, _, state in states if isinstance(state, Replicated)]
    return text + (f", gradient: sum over {' '.join(deferred)}" if deferred else "")


# A conversion as a call of the runtime's function for its row.


def conversion_text(move: ConversionStep, sizes: Sequence[int], value: str, axis: str, target: str) -> str:
    """`comm.shard(x, self.tp, dim=0, outer=3)`; `sizes` are those of all axes, `axis` is the text of the move's,
    `target` the variable that it makes: what slices keep is kept under its name."""
    ends = move.source[move.axis], move.target[move.axis]
    prefix = next((state for state in ends if isinstance(state, Prefix)), None)
    if prefix is not None:
        cut = [f"dim={prefix.dim}", *([f"sizes={prefix.sizes}"] if prefix.sizes else [])]
        kept = [f'"{target}"'] if prefix is ends[1] else []
        return f"comm.{move.row.function}({', '.join([value, axis, *kept, *cut])})"
    return f"comm.{move.row.function}({', '.join([value, axis, *_cut(move, sizes)])})"


def local_state_text(layout: Layout, sizes: Sequence[int], axis: int) -> str:
    """Write the state on an axis, in the local coordinates that the other axes leave: `Sharded(1, outer=3)`."""
    state = layout[axis]
    if isinstance(state, Sharded):
        return str(replace(state, outer=local_outer(layout, sizes, axis)))
    return repr(state)


def _cut(move: ConversionStep, sizes: Sequence[int]) -> list[str]:
    """Return where the dim is cut, in the local coordinates that the other axes leave."""
    before, after = move.source[move.axis], move.target[move.axis]
    if isinstance(before, Sharded) and isinstance(after, Sharded):
        outers = tuple(local_outer(layout, sizes, move.axis) for layout in (move.source, move.target))
        cut = [str(before.dim), str(after.dim), *([f"outers={outers}"] if outers != (1, 1) else [])]
        return [*cut, f"sizes={(before.sizes, after.sizes)}"] if before.sizes or after.sizes else cut
    if isinstance(before, Partial) and isinstance(after, Invariant):
        return [] if before.reduction == "sum" else [f'"{before.reduction}"']
    state, layout = (before, move.source) if isinstance(before, Sharded) else (after, move.target)
    if not isinstance(state, Sharded):
        return []
    if state.sections:
        return [f"dim={state.dim}", f"sections={state.sections}"]
    outer = local_outer(layout, sizes, move.axis)
    cut = [f"dim={state.dim}"] + ([f"outer={outer}"] if outer > 1 else [])
    return [*cut, f"sizes={state.sizes}"] if state.sizes else cut


# The names of operators in a rank program.


def is_builtin(operator: str) -> bool:
    """Return whether a program can name an operator without loading anything of the user's."""
    return operator.startswith(("aten.", "nnscaler."))


@cache
def function_text(operator: str) -> str:
    """Return the text that calls an operator: `aten.linear`, `aten.add.Tensor`, `ops.ce_max`, `user.my_op`."""
    namespace, _, rest = operator.partition(".")
    if namespace == "nnscaler" and rest:
        return f"ops.{rest}"
    if namespace == "aten" and rest:
        name, _, overload = rest.partition(".")
        return f"aten.{name}" if overload == "default" and is_one_operator(f"aten.{name}") else operator
    return f"user.{user_name(operator)}"


def user_name(operator: str) -> str:
    """Return the attribute under which a program reaches an operator that is not built in."""
    return re.sub(r"\W", "_", operator)


def needs_device(operator: str) -> bool:
    """Return whether the operator takes its device from the rank; all others take it from their arguments."""
    return operator.startswith("aten.") and is_factory(operator)


def returns_sequence(operator: str, outputs: int) -> bool:
    """Return whether the operator's result has to be unpacked."""
    if outputs != 1:
        return True
    found = schema_of(operator)
    return found is not None and len(found.returns) == 1 and "List" in str(found.returns[0].type)


# Locate the operators that are not built in, for rank processes.

Origin = tuple[str, str]  # a file, or the dotted name of an installed module; and the qualified name in it


def operator_origins(operators: Iterable[str], functions: Mapping[str, Callable[..., Any] | type]) -> dict[str, Origin]:
    """Return, by operator, the origin from which a process can load it.

    That is the place of its registration, of the `autograd.Function` that it stands for, or of the `torch.library`
    definition that some package made. Operators that a process cannot load are left out.
    """
    registry = default_registry()
    found: dict[str, Origin] = {}
    for operator in sorted({o for o in operators if not is_builtin(o)}):
        spec = registry.lookup(operator)
        definition = OPDEFS.get("::".join(operator.split(".")[:2]))
        if spec is not None and spec.where is not None:
            found[operator] = (spec.where.file, spec.qualname or "")
        elif operator in functions:
            found[operator] = origin_of(functions[operator])
        elif definition is not None:
            found[operator] = origin_of(definition._init_fn)
    return found


def operator_files(origins: Mapping[str, Origin]) -> dict[str, str]:
    """Return, by name as it stands in rank programs, the file of operators.

    The programs name no folder of this machine, except where two files have one name: a program must not take the one
    for the other.
    """
    files = sorted({file for file, _ in origins.values() if file.endswith(".py")})
    names = [Path(file).name for file in files]
    return {name if names.count(name) == 1 else file: file for name, file in zip(names, files, strict=True)}


def written_origins(origins: Mapping[str, Origin]) -> dict[str, Origin]:
    """Return the origins as they stand in rank programs."""
    names = {file: name for name, file in operator_files(origins).items()}
    return {operator: (names.get(file, file), qualname) for operator, (file, qualname) in origins.items()}


def origin_of(thing: Callable[..., Any] | type) -> Origin:
    """Return the module's name where the module belongs to a package, whose relative imports need it; else its file."""
    module = sys.modules.get(thing.__module__)
    private = thing.__module__.startswith("_nnscaler_user")  # a model file: the runtime's loader named it
    if module is not None and getattr(module, "__package__", None) and not private:
        return thing.__module__, thing.__qualname__
    try:
        return inspect.getsourcefile(thing) or "", thing.__qualname__
    except TypeError:
        return "", thing.__qualname__
