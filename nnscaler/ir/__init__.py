"""The intermediate representation: graphs, meshes, layouts, placements."""

from nnscaler.ir.graph import Graph, LogicalTensor, Operation, Region, Role, Slot, as_call
from nnscaler.ir.invariants import InternalError, check_graph
from nnscaler.ir.placement import (
    Choice,
    PartitionedGraph,
    Placement,
    RunInvariant,
    RunPartial,
    RunReplicated,
    Split,
    Stage,
)
from nnscaler.ir.text import print_graph
from nnscaler.layout import MICRO, Axis, DeviceMesh, Invariant, Layout, Partial, Replicated, Sharded, State

__all__ = [
    "Axis",
    "Choice",
    "DeviceMesh",
    "Graph",
    "InternalError",
    "Invariant",
    "Layout",
    "LogicalTensor",
    "MICRO",
    "Operation",
    "Partial",
    "PartitionedGraph",
    "Placement",
    "Region",
    "Replicated",
    "Role",
    "RunInvariant",
    "RunPartial",
    "RunReplicated",
    "Sharded",
    "Slot",
    "Split",
    "Stage",
    "State",
    "as_call",
    "check_graph",
    "print_graph",
]
