"""Regions for coshard (Lin et al., nnScaler, OSDI 2024): pairs of weights in layers, found from annotations.

A region is what lies between the weights that read the residual stream and the one that adds to it: attention with its
projections, an MLP. Megatron cuts it over ranks, coshard in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation, element_bytes
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.placement import Chunk, Split
from nnscaler.planning.constraints.megatron import Roles, roles_of
from nnscaler.transform.chunked_regions import ChunkedRegion, choose_pieces
from nnscaler.transform.complete_plan import follow_batch
from nnscaler.transform.plan import ChunkStep, Plan
from nnscaler.transform.select_operations import Layer, layers_of

AXIS = "co"
LARGE = 0.5  # of the bytes that the region with most writes, from which on a region is cut


def coshard_steps(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, pieces: int, first: int = 0
) -> list[ChunkStep]:
    """Return a step for each of the `first` pairs of weights in layers; 0: for those that write at least half as many
    bytes as the one that writes most.

    `plan`: its mesh and micro-batches. Raises NnscalerError("plan_illegal") where no pair can be cut into as many
    pieces.
    """
    roles = roles_of(graph, signatures)
    regions = [region for layer in layers_of(graph) for region in _regions(graph, layer, roles)]
    written = [sum(_written(graph, op) for op in region) for region in regions]
    large = [r for r, size in zip(regions, written, strict=True) if size >= LARGE * max(written)]
    axes = tuple(axis for axis in plan.device_axes[0] if axis[0] in plan.data_axes)
    made, axes = follow_batch(graph, signatures, plan, axes)
    steps: list[ChunkStep] = []
    for region in regions[:first] if first else large:
        for identifier in _identifiers(region, roles, signatures):
            step = ChunkStep(tuple(op.name for op in region), AXIS, identifier, pieces)
            chunk = ChunkedRegion(Chunk(f"{AXIS}_{len(steps)}", AXIS, True), step, tuple(region))
            try:
                pieced = choose_pieces(graph, signatures, (AXIS, pieces), (chunk,), made, axes)
            except NnscalerError:
                continue
            cut = ((pieced[op.name], roles.cut[op.name]) for op in region if op.name in roles.cut)
            if all(isinstance(choice, Split) and choice.identifier in wanted for choice, wanted in cut):
                steps.append(step)
                break
    if not steps:
        raise NnscalerError(
            "plan_illegal",
            f"coshard: none of {len(regions)} pairs of weights in layers can be cut into {pieces} pieces",
            help="take as many pieces as divide the heads; or write a plan with chunk steps: docs/coshard.md",
        )
    return steps


def _regions(graph: Graph, layer: Layer, roles: Roles) -> Iterator[Sequence[Operation]]:
    """Yield the operations of each pair of weights of a layer, in order: from its columns to its rows."""
    inside = frozenset(layer.operations)
    for name in layer.operations:
        if name not in roles.cut or name in roles.columns:
            continue
        found = {name}
        waiting = [graph.by_name[name]]
        while waiting:
            op = waiting.pop()
            for tensor in () if op.name in roles.columns else op.inputs:
                producer = graph.producers.get(tensor)
                here = producer is not None and producer.name in inside and producer.name not in roles.whole
                if producer is not None and here and producer.name not in found:
                    found.add(producer.name)
                    waiting.append(producer)
        yield [op for op in graph.operations if op.name in found]


def _identifiers(region: Sequence[Operation], roles: Roles, signatures: Mapping[str, Signature]) -> Iterator[str]:
    """Yield what may be cut, as chunk steps say it: columns first, then identifiers of products without a parameter."""
    for op in region:
        if op.name in roles.columns:
            yield from (f"{op.name}:{identifier}" for identifier in sorted(roles.cut[op.name]))
            break
    product = next((op for op in region if signatures[op.name].flops and op.name not in roles.cut), None)
    if product is not None:
        yield from (f"{product.name}:{identifier}" for identifier in signatures[product.name].identifiers)


def _written(graph: Graph, op: Operation) -> int:
    outputs = [graph.tensors[name] for name in op.outputs if name is not None]
    return sum(tensor.elements * element_bytes(tensor.dtype) for tensor in outputs)
