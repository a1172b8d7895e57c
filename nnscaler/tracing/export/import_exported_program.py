"""Read an exported program into a graph: regions are inlined, devices dropped, tied parameters merged."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from op_registry.call import DType, dtype_name, instances_in
from op_registry.register import operator_of
from op_registry.source_location import SourceLocation

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import LOSS, Graph, LogicalTensor, Operation, Region, Role, Slot
from nnscaler.tracing.export.loss_module import PREFIX, Results
from nnscaler.tracing.export.recompute_regions import checkpoint_of
from nnscaler.tracing.export.user_source_locations import location_of_trace, module_of
from nnscaler.tracing.graph_builder import RawGraph, TensorName, fresh_name, make_operation, storage_of, written_inputs

_IGNORED = (
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten._assert_async.msg",
    "aten._assert_async.default",
    "aten.sym_constrain_range_for_size.default",
    "aten.sym_constrain_range.default",
)
_MARK = "nnscaler_layer."  # `repeated_layers.follow_calls` leaves operators without results
_COPY = "aten.lift_fresh_copy.default"
_PLACE_KEYWORDS = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
_PLACE_TYPES = (torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Imported:
    """`state`: parameters, buffers and lifted constants by name in the model (every name of a tied one)."""

    raw: RawGraph
    state: Mapping[str, Tensor]


def import_program(
    program: ExportedProgram, module: nn.Module, input_names: Sequence[str], results: Results
) -> Imported:
    """Turn the exported results of `module` into a graph that may still hold in-place operators.

    Raises NnscalerError "trace_failed" for what a graph cannot hold: shapes and numbers that depend on data,
    and control-flow operators of torch.
    """
    importer = _Importer(type(module).__name__)
    arguments = importer.read_signature(program, module, input_names)
    result = importer.walk(program.graph_module, arguments, Region())
    named = dict(zip(results.tensors, result, strict=True))
    loss = None if results.loss is None else named.pop(LOSS)
    if results.loss is not None and not isinstance(loss, TensorName):
        raise NnscalerError("no_loss", "the loss does not depend on any tensor")
    outputs = tuple((name, value.name) for name, value in named.items() if isinstance(value, TensorName))
    assert len(outputs) == len(named), named
    graph = Graph(
        importer.name,
        importer.tensors,
        tuple(importer.operations),
        loss.name if isinstance(loss, TensorName) else "",
        outputs=outputs,
        structure=results.rest.structure,
    )
    return Imported(RawGraph(graph, importer.storages), importer.state)


@dataclass(frozen=True, slots=True)
class _FromData:
    """A number that the model read from a tensor. It may be asserted and branched on, but not used."""

    operator: str
    where: SourceLocation | None


@dataclass
class _Importer:
    name: str
    tensors: dict[str, LogicalTensor] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    storages: dict[str, int] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _merged: dict[int, int] = field(default_factory=dict)  # storage -> the one that it really is

    # ---- stored tensors and inputs ----

    def read_signature(self, program: ExportedProgram, module: nn.Module, input_names: Sequence[str]) -> list[Any]:
        """Define the stored tensors and inputs; gives the values of the program's placeholders, in order."""
        self._taken.update(input_names)
        nodes = [node for node in program.graph_module.graph.nodes if node.op == "placeholder"]
        left_out = _sparse_buffers(program)
        stored = self._define_state(module, left_out)
        names = iter(input_names)
        values: list[Any] = []
        inputs: list[tuple[str, Tensor]] = []
        for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
            if _model_name(spec) in left_out:
                values.append(None)
                continue
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                name = stored[_model_name(spec)]
            elif spec.kind == InputKind.CONSTANT_TENSOR:
                name = self._define_constant(program.constants[str(spec.target)])
                if all(str(user.target) == _COPY for user in node.users):
                    values.append(
                        TensorName(name)
                    )  # export gives the copy the memory of the constant, which nobody writes
                    continue
            elif spec.kind == InputKind.USER_INPUT:
                name = next(names)
                inputs.append((name, node.meta["val"]))
            else:
                raise NnscalerError("trace_failed", f"the model holds an object that is not a tensor: {spec.target}")
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                self.storages[name] = storage_of(value)
            values.append(TensorName(name))
        for name, value in inputs:
            shape, dtype = _shape(value, None), dtype_name(value.dtype)
            self.tensors[name] = LogicalTensor(name, shape, dtype, "input", fqns=(name,))
        return values

    def _define_state(self, module: nn.Module, left_out: frozenset[str]) -> dict[str, str]:
        """Parameters, then buffers; gives the tensor's name for every name in the model."""
        fqns: dict[int, list[str]] = {}
        found: dict[int, tuple[Tensor, Role]] = {}
        kinds: tuple[tuple[Any, Role], ...] = (
            (module.named_parameters(remove_duplicate=False), "parameter"),
            (module.named_buffers(remove_duplicate=False), "buffer"),
        )
        for named, role in kinds:
            for fqn, tensor in named:
                if fqn in left_out:
                    continue
                found.setdefault(id(tensor), (tensor, role))
                fqns.setdefault(id(tensor), []).append(fqn)
                self.state[fqn] = tensor
        names: dict[str, str] = {}
        for key, (tensor, role) in found.items():
            name = self._fresh(fqns[key][0].replace(".", "_"))
            self._define_leaf(name, tensor, role, tuple(fqns[key]))
            names.update(dict.fromkeys(fqns[key], name))
        return names

    def _define_constant(self, tensor: Tensor) -> str:
        number = sum(t.role == "constant" for t in self.tensors.values())
        fqn = f"_constants.{number}"
        name = self._fresh(f"constant_{number}")
        self.state[fqn] = tensor
        self._define_leaf(name, tensor, "constant", (fqn,))
        return name

    def _define_leaf(self, name: str, tensor: Tensor, role: Role, fqns: tuple[str, ...]) -> None:
        needs_grad = role == "parameter" and tensor.requires_grad
        self.tensors[name] = LogicalTensor(name, tuple(tensor.shape), dtype_name(tensor.dtype), role, needs_grad, fqns)

    def _fresh(self, name: str) -> str:
        return fresh_name(name, self._taken)

    # ---- nodes ----

    def walk(self, module: fx.GraphModule, arguments: Sequence[Any], region: Region) -> Any:
        """Import the nodes of a (sub)graph called with `arguments`; gives its result, tensors as `TensorName`s."""
        values: dict[fx.Node, Any] = {}
        remaining = iter(arguments)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = self._attribute(module, str(node.target))
            elif node.op == "call_function":
                values[node] = self._call(node, values, region)
            elif node.op == "output":
                return _plain(node.args[0], values)
        raise AssertionError("a graph without an output")

    def _attribute(self, module: fx.GraphModule, target: str) -> Any:
        value: Any = module
        for part in target.split("."):
            value = getattr(value, part)
        return TensorName(self._define_constant(value)) if isinstance(value, Tensor) else value

    def _call(self, node: fx.Node, values: dict[fx.Node, Any], region: Region) -> Any:
        target: Any = node.target
        name = operator_of(target) or str(target)
        if name in _IGNORED:
            return None
        args = [_plain(a, values) for a in node.args]
        kwargs = {k: _plain(v, values) for k, v in node.kwargs.items() if k not in _PLACE_KEYWORDS}
        if target is operator.getitem:
            return args[0][args[1]]
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *operands = args
            return self.walk(body, operands, replace(region, grad_enabled=enabled))
        if name == "wrap_with_autocast":
            _device, dtype, enabled, _cache, body, *operands = args
            cast = None
            if enabled:
                cast = dtype.name if isinstance(dtype, DType) else "bfloat16"
            return self.walk(body, operands, replace(region, autocast=cast))
        if not isinstance(target, torch._ops.OpOverload):
            return self._compute(node, args, kwargs)
        return self._operation(node, name, args, kwargs, region)

    def _compute(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a Python function of the trace when all of its arguments are known."""
        target: Any = node.target
        unknown = next(instances_in([args, kwargs], _FromData), None)
        if unknown is not None:
            return unknown
        if any(instances_in([args, kwargs], TensorName)) or getattr(target, "__module__", "") != "_operator":
            raise NnscalerError(
                "trace_failed",
                f"the graph has no place for {getattr(target, '__name__', target)}",
                where=_where(node),
                help="put the function that uses it behind an operator of your own: @nnscaler.register_op",
            )
        return target(*args, **kwargs)

    def _operation(self, node: fx.Node, name: str, args: list[Any], kwargs: dict[str, Any], region: Region) -> Any:
        value = node.meta.get("val")
        where = _where(node)
        if isinstance(value, int | float | bool):
            return value
        unknown = next(instances_in([args, kwargs], _FromData), None)
        if unknown is not None:
            raise NnscalerError(
                "trace_failed",
                f"a number that {unknown.operator} reads from a tensor is used",
                where=unknown.where or where,
                help="numbers are fixed in a trace; keep it a tensor, or register the function that uses it",
            )
        chosen = self._fresh(node.name)
        outputs: tuple[str | None, ...] = ()
        result: Any = None
        if isinstance(value, Tensor):
            outputs = (self._define(chosen, value, where),)
            result = TensorName(chosen)
        elif isinstance(value, list | tuple):
            outputs = tuple(
                self._define(self._fresh(f"{chosen}_{_letters(i)}"), v, where) if isinstance(v, Tensor) else None
                for i, v in enumerate(value)
            )
            result = tuple(None if o is None else TensorName(o) for o in outputs)
        elif not name.startswith(_MARK):
            return _FromData(name, where)
        path, kind = module_of(node.meta, PREFIX)
        region = replace(region, recompute=checkpoint_of(node))
        made = make_operation(chosen, name, args, kwargs, outputs, region=region)
        self.operations.append(replace(made, where=where, module=path, module_type=kind))
        self._same_memory(made)
        return result

    def _define(self, name: str, value: Tensor, where: SourceLocation | None) -> str:
        self.tensors[name] = LogicalTensor(name, _shape(value, where), dtype_name(value.dtype))
        self.storages[name] = self._storage(value)
        return name

    def _storage(self, value: Tensor) -> int:
        storage = storage_of(value)
        return self._merged.get(storage, storage)

    def _same_memory(self, operation: Operation) -> None:
        """Put the result of an in-place operator where its input lies, also when export says otherwise."""
        for position in written_inputs(operation.operator)[:1]:
            argument, result = operation.args[position : position + 1], operation.outputs[:1]
            if result and result[0] is not None and argument and isinstance(argument[0], Slot):
                storage = self.storages[operation.inputs[argument[0].index]]
                self._merged[self.storages[result[0]]] = storage
                self.storages[result[0]] = storage


def _model_name(spec: InputSpec) -> str:
    return str(spec.target).removeprefix(PREFIX + ".")


def _sparse_buffers(program: ExportedProgram) -> frozenset[str]:
    """Return the buffers that a program does without: sparse ones that nothing reads and no checkpoint has.

    Raises NnscalerError "trace_failed" for any other parameter or buffer that is not dense.
    """
    found = set()
    nodes = [node for node in program.graph_module.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or not isinstance(value, Tensor):
            continue
        if value.layout == torch.strided:
            continue
        if node.users or spec.persistent is not False:
            message = f"{_model_name(spec)!r} is a tensor of layout {value.layout}; a program holds dense ones"
            raise NnscalerError("trace_failed", message, help="keep it dense: register_buffer(name, tensor.to_dense())")
        found.add(_model_name(spec))
    return frozenset(found)


def _letters(number: int) -> str:
    """a, b, ... z, aa, ab, ...: numbers would read like fx's own names."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("a") + digit) + text
    return text


def _where(node: fx.Node) -> SourceLocation | None:
    return location_of_trace(node.meta.get("stack_trace") or "")


def _shape(value: Tensor, where: SourceLocation | None) -> tuple[int, ...]:
    shape = [s if isinstance(s, int) else s.node.maybe_as_int() for s in value.shape]  # some the model itself checks
    if None in shape:
        raise NnscalerError(
            "trace_failed",
            f"a tensor's shape depends on data: {tuple(str(s) for s in value.shape)}",
            where=where,
            help="shapes are fixed by the sample batch; mask instead of selecting, or register the function",
        )
    return tuple(map(int, shape))


def _plain(value: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Turn an fx argument into `TensorName`s for nodes, `DType`s, and None for what says where or how memory lies."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, list | tuple):
        return tuple(_plain(v, values) for v in value)
    if isinstance(value, torch.dtype):
        return DType(dtype_name(value))
    if isinstance(value, _PLACE_TYPES):
        return None
    return value
