"""A finding as a pytest test that stands alone: it needs torch, pytest and the user's file.

The inputs are written out. The test runs the operator whole and on each shard, and compares what every rank has with
what the annotation says that it has. It fails for the finding's reason, and passes once the operator is right.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from op_registry.spec import OperatorSpec

from nnscaler.runtime.tensor_bits_and_differences import FAMILY_SHARE
from nnscaler.training.functional_optimizer import Update
from verify.evidence.inputs.cut_and_join_operands import Lay, spread
from verify.evidence.oracle.case_runner import OperatorRunner, Prepared
from verify.evidence.oracle.compare_partition import AXES, Partition
from verify.evidence.oracle.enumerate_cases import bases
from verify.evidence.oracle.run_whole_operator import as_leaves
from verify.evidence.oracle.tolerance import Bound
from verify.evidence.split_case import SplitCase
from verify.evidence.verify_op_options import OpOptions
from verify.operators.audit.check_handwritten_derivative import ABOUT
from verify.operators.run.reproduce_token import Token
from verify.operators.run.tensors_as_python_text import NotWritable, call_text, piece_text, tensor_text
from verify.results.finding import Finding

HEADER = '''"""{title}

Written by `nnscaler verify-op --emit-test`. It needs nothing but torch, pytest and the operator's file.
"""

{imports}

BOUND = {bound!r}  # of a tensor's largest value: what rounding may explain
FILL = {fill!r}  # beyond it, numbers that agree fill masked places, and are not among the largest
ALL = None  # the whole of a dim


{load}


def take(x, piece):
    """The piece of a tensor, given by the indices along each dim."""
    for dim, indices in enumerate(piece):
        if indices is not ALL:
            x = x.index_select(dim, torch.tensor(list(indices)))
    return x.detach().contiguous().requires_grad_(x.requires_grad)


def add_up(like, ranks):
    """A tensor from the pieces of all ranks: what lies in one place is added up."""
    whole = torch.zeros_like(like)
    for value, piece in ranks:
        along = [range(n) if indices is ALL else indices for n, indices in zip(like.shape, piece)]
        places = torch.meshgrid(*(torch.tensor(list(a)) for a in along), indexing="ij")
        whole[places] = whole[places] + value if places else whole + value
    return whole


def tensors(result):
    """What the operator returned, as a list."""
    results = result if isinstance(result, (list, tuple)) else [result]
    return [inner for r in results for inner in (r if isinstance(r, (list, tuple)) else [r])]


def gradients(outputs, cotangents, inputs):
    """The gradient of every input that asks for one; zeros where none flows."""
    pairs = [(y, c) for y, c in zip(outputs, cotangents) if c is not None and y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    ends, seeds = zip(*pairs)
    found = iter(torch.autograd.grad(ends, wanted, seeds, materialize_grads=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def agree(found, expected, whole, family=()):
    """Equal up to rounding, relative to the largest value of the whole tensor."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape and found.dtype == expected.dtype
    sizes = whole.detach().abs().flatten()
    if (found == expected)[expected.abs() > FILL].all():
        sizes = sizes[sizes <= FILL]
    largest = max([float(sizes.max()) if len(sizes) else 0.0] + [SHARE * float(g.abs().max()) for g in family])
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND * largest, equal_nan=True)
'''
_NO_TEST = MappingProxyType(
    {"operator_died": "it would end the process that runs pytest", "operator_timed_out": "it would not end"}
)


@dataclass(frozen=True)
class EmittedFinding:
    """A finding, and where it is found again."""

    spec: OperatorSpec
    finding: Finding
    token: Token


def write_tests(wanted: Sequence[EmittedFinding], file: Path, options: OpOptions) -> str:
    """Return the text of a test file for the findings of one operator; `file` is where it will stand.

    Runs the operator, and each test once: it has to fail on the operator as it is. A finding that no test can show is
    named in a comment. Raises NotWritable where none can.
    """
    spec = wanted[0].spec
    names = _Names(wanted[0], file)
    title = f"`{spec.name}` against its annotation."
    bodies: list[str] = []
    problems: list[str] = []
    bounds = [Bound(64 * torch.finfo(torch.float64).eps)]

    def text_of(bodies: Sequence[str]) -> str:
        head = HEADER.format(
            title=title,
            imports=names.imports,
            bound=max(bound.relative for bound in bounds),
            fill=max(bound.fill for bound in bounds),
            load=names.load,
        )
        return "\n\n".join([head.replace("SHARE", repr(FAMILY_SHARE)), *bodies])

    for number, one in enumerate(wanted):
        try:
            body = _test(one, names, options, number, bounds)
        except NotWritable as problem:
            problems.append(f"{one.finding.code}: {problem}")
            continue
        if _passes(text_of([body]), file):
            problems.append(f"{one.finding.code}: a plain call, as a test makes it, is right")
        else:
            bodies.append(body)
    if not bodies:
        raise NotWritable("; ".join(problems))
    return text_of([*bodies, *(f"# No test shows {problem}.\n" for problem in problems)])


def _passes(text: str, file: Path) -> bool:
    """Run the tests of a file's text; return whether none fails."""
    path, modules = list(sys.path), dict(sys.modules)
    scope: dict[str, Any] = {"__name__": file.stem, "__file__": str(file.resolve())}
    try:
        exec(compile(text, str(file), "exec"), scope)
        for test in [value for name, value in scope.items() if name.startswith("test_")]:
            test()
    except Exception:  # noqa: BLE001 - the operator may raise anything
        return False
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - modules.keys():
            del sys.modules[name]
        sys.modules.update(modules)
    return True


class _Names:
    """How the test file gets at the operator."""

    def __init__(self, wanted: EmittedFinding, file: Path) -> None:
        address, spec = wanted.token.address, wanted.spec
        left, double, name = address.partition("::")
        module, colon, member = ("", "", "") if double else address.partition(":")
        imports = ["import torch"]
        lines = ["def load():", '    """The operator."""']
        if double:
            imports = ["import importlib.util", "import sys", "from pathlib import Path", "", *imports]
            relative = os.path.relpath(Path(left).resolve(), file.resolve().parent)
            lines += [
                f"    path = (Path(__file__).parent / {json.dumps(relative)}).resolve()",
                "    sys.path.append(str(path.parent))",
                "    spec = importlib.util.spec_from_file_location(path.stem, path)",
                "    module = importlib.util.module_from_spec(spec)",
                "    sys.modules[path.stem] = module",
                "    spec.loader.exec_module(module)",
            ]
        elif colon:
            lines.append(f"    import {module}")
        lines.append(f"    return {_operator_text(spec, name or member, module or 'module', bool(double or colon))}")
        self.imports = "\n".join(imports)
        self.load = "\n".join(lines)

    def operator(self, name: str, spec: OperatorSpec) -> str:
        """Return the text of an operator that a call names: hooks may run another one on a shard."""
        if name == spec.name:
            return "operator"
        if name.startswith("nnscaler."):
            raise NotWritable(f"its shards run {name}, an operator of the runtime")
        return f"torch.ops.{name}"


def _operator_text(spec: OperatorSpec, member: str, module: str, loaded: bool) -> str:
    if spec.target is None:
        if spec.name.startswith("nnscaler."):
            return f"__import__('nnscaler.runtime.ops').runtime.ops.{spec.name.removeprefix('nnscaler.')}"
        return f"torch.ops.{spec.name}"
    if hasattr(spec.target, "_schema") or hasattr(spec.target, "_opoverload") or hasattr(spec.target, "overloads"):
        return f"torch.ops.{spec.name}"
    if isinstance(spec.target, Update):
        raise NotWritable("the step of an optimizer is made a function by nnscaler; the finding's token runs it again")
    if not loaded:
        raise NotWritable("no text names the operator")
    if spec.qualname != member:  # made inside a function: only the registry has it
        return f"__import__('op_registry').default_registry().lookup({member!r}).target"
    is_class = isinstance(getattr(spec.target, "__self__", None), type)
    return f"{module}.{member}" + (".apply" if is_class else "")


def _test(wanted: EmittedFinding, names: _Names, options: OpOptions, number: int, bounds: list[Bound]) -> str:
    code = wanted.finding.code
    if code in _NO_TEST:
        raise NotWritable(_NO_TEST[code])
    if code == "gradient_is_not_derivative" and ABOUT in wanted.finding.counter_example:
        raise NotWritable("it shows on drawn inputs, about a number in the code; the finding's token runs it again")
    name = re.sub(r"\W+", "_", f"test_{wanted.spec.qualname or wanted.spec.name}_{code}").strip("_").lower()
    head = [f"def {name}{f'_{number}' if number else ''}():", f'    """{wanted.finding.message}."""']
    head[1] = head[1].replace("\\", "\\\\")
    runner = OperatorRunner(wanted.spec, options)
    if wanted.token.case is None:
        body = _of_operator(code, runner, names)
    else:
        prepared = runner.prepare(wanted.token.case.inputs)
        bounds.append(prepared.bound)
        partition = runner.partition(prepared.signature, wanted.token.case)
        if isinstance(partition, str):
            raise NotWritable(partition)
        body = _of_case(wanted.token.case, prepared, partition, names)
    return "\n".join([*head, *(f"    {line}" if line else "" for line in body)]) + "\n"


def _of_case(case: SplitCase, prepared: Prepared, partition: Partition, names: _Names) -> list[str]:
    whole, spec = prepared.whole, partition.signature.spec
    assert spec is not None
    ranks = partition.inputs[0].ranks() if partition.inputs else partition.outputs[0].ranks()
    generator = torch.Generator().manual_seed(case.inputs.seed + 2)
    tensors = as_leaves(whole.concrete.tensors, whole.dtype, whole.without_gradient)
    call = whole.concrete.call
    xs = ", ".join(f"x{i}" for i in range(len(tensors)))
    lines = ["operator = load()", *(f"x{i} = {_leaf_text(t)}" for i, t in enumerate(tensors)), ""]
    text = call_text(call, names.operator(call.operator, spec), {}, whole.dtype)
    lines += [f"def run({xs}):", f"    return tensors({text})", ""]
    lines += ["# The whole operator, and its gradients under these cotangents.", f"ys = run({xs})"]
    for i, cotangent in enumerate(whole.cotangents):
        lines.append(f"c{i} = {'None' if cotangent is None else tensor_text(cotangent)}")
    cs = ", ".join(f"c{i}" for i in range(len(whole.cotangents)))
    lines += [f"gs = gradients(ys, [{cs}], [{xs}])", ""]
    said = " and ".join(f"{choice} in {parts}" for choice, parts in zip(case.choices, case.parts, strict=True))
    lines.append(f"# Every rank ({said}): what it is given, and what it computes.")
    columns = [
        _pieces(t, lay, generator, f"x{i}") for i, (t, lay) in enumerate(zip(tensors, partition.inputs, strict=True))
    ]
    local = partition.call
    for number, rank in enumerate(ranks):
        given = ", ".join(column[number] for column in columns)
        local_text = call_text(local, names.operator(local.operator, spec), _at(rank), whole.dtype)
        run = "run" if local_text == text else f"(lambda {xs}: tensors({local_text}))"
        lines += [f"xs_{number} = [{given}]", f"ys_{number} = {run}(*xs_{number})"]
    lines += ["", "# What the ranks have must be what the annotation says."]
    for i, (expected, lay) in enumerate(zip(whole.outputs, partition.outputs, strict=True)):
        if expected is not None and whole.concrete.compare:
            lines += _compared(lay, expected, f"ys[{i}]", [f"ys_{n}[{i}]" for n in range(len(ranks))], "")
    if partition.has_maxima:
        return lines
    cotangents = [
        ["None"] * len(ranks) if c is None else _pieces(c, lay, generator, f"c{i}")
        for i, (c, lay) in enumerate(zip(whole.cotangents, partition.output_gradients, strict=True))
    ]
    for number in range(len(ranks)):
        given = ", ".join(column[number] for column in cotangents)
        lines.append(f"gs_{number} = gradients(ys_{number}, [{given}], xs_{number})")
    lines.append("family = [g for g in gs if g is not None and g.numel()]")
    for i, (tensor, lay) in enumerate(zip(tensors, partition.input_gradients, strict=True)):
        if tensor.requires_grad:
            lines += _compared(lay, tensor, f"gs[{i}]", [f"gs_{n}[{i}]" for n in range(len(ranks))], ", family")
    return lines


def _at(rank: Sequence[int]) -> dict[str, int]:
    """Return a rank's coordinates by axis."""
    return dict(zip(AXES, rank, strict=False))


def _leaf_text(tensor: Tensor) -> str:
    return tensor_text(tensor) + (".requires_grad_()" if tensor.requires_grad else "")


def _pieces(tensor: Tensor, lay: Lay, generator: torch.Generator, name: str) -> list[str]:
    """Return the text of each rank's input: pieces by their indices, partial sums written out."""
    if lay.summed:
        asks = ".requires_grad_()" if tensor.requires_grad else ""
        return [f"{tensor_text(piece)}{asks}" for piece in spread(tensor.detach(), lay, generator)]
    return [f"take({name}, {piece_text(lay, rank, tensor.shape)})" for rank in lay.ranks()]


def _compared(lay: Lay, expected: Tensor, whole: str, parts: Sequence[str], family: str) -> list[str]:
    """Return assertions on one tensor: pieces one by one; sums after adding up what copies there are of them."""
    pieces = [piece_text(lay, rank, expected.shape) for rank in lay.ranks()]
    if "max" in lay.held:
        raise NotWritable("partial maxima have no short test")
    if not lay.summed:
        rows = zip(parts, pieces, strict=True)
        return [f"agree({part}, take({whole}, {piece}), {whole}{family})" for part, piece in rows]
    groups: dict[tuple[int, ...], list[str]] = {}
    for rank, part, piece in zip(lay.ranks(), parts, pieces, strict=True):
        copy = tuple(r for r, held in zip(rank, lay.held, strict=True) if held == "copy")
        groups.setdefault(copy, []).append(f"({part}, {piece})")
    return [f"agree(add_up({whole}, [{', '.join(group)}]), {whole}, {whole}{family})" for group in groups.values()]


def _of_operator(code: str, runner: OperatorRunner, names: _Names) -> list[str]:
    """Return a test of the operator itself."""
    write: dict[str, Callable[[str, str], list[str]]] = {
        "gradient_is_not_derivative": _gradcheck,
        "input_mutated": _not_mutated,
        "not_repeatable": lambda _, text: _repeatable(text),
    }
    if code not in write:
        raise NotWritable("it is about no single call")
    prepared = runner.prepare(bases(runner)[0].inputs)
    call = prepared.whole.concrete
    tensors = as_leaves(call.tensors, prepared.whole.dtype, call.constants)
    text = call_text(call.call, names.operator(call.call.operator, runner.spec), {}, prepared.whole.dtype)
    xs = ", ".join(f"x{i}" for i in range(len(tensors)))
    lines = ["operator = load()", *(f"x{i} = {_leaf_text(t)}" for i, t in enumerate(tensors))]
    return [*lines, *write[code](xs, text)]


def _gradcheck(xs: str, text: str) -> list[str]:
    return [f"torch.autograd.gradcheck(lambda {xs}: {text}, [{xs}])"]


def _not_mutated(xs: str, text: str) -> list[str]:
    return [
        f"before = [x.detach().clone() for x in [{xs}]]",
        text,
        f"for x, old in zip([{xs}], before):",
        "    assert torch.equal(x.detach(), old)",
    ]


def _repeatable(text: str) -> list[str]:
    return [f"for one, two in zip(tensors({text}), tensors({text})):", "    assert torch.equal(one, two)"]
