"""Operators: what they are called, how they may be split, and how users add their own.

Importing this package is light: torch is imported by `register_op` when it is used.
"""

from op_registry.annotation.bind_sizes import BoundAnnotation, BoundDim, BoundOperand, Factor, bind
from op_registry.annotation.parser import parse
from op_registry.annotation.splits import Shard, shard_of, splittable
from op_registry.annotation.syntax_tree import Annotation, print_annotation
from op_registry.annotation.well_formed import check
from op_registry.bind_and_localise_call import bind_call, linear_sets, localise
from op_registry.call import AxisShard, Call, DType, TensorArgument
from op_registry.errors import AnnotationError, NnscalerError
from op_registry.rank_expression import Expression, block_start, by_index, index, local_size
from op_registry.register import name_of, operator_of, register_op
from op_registry.registry import Registry, default_registry
from op_registry.source_location import SourceLocation
from op_registry.spec import OperatorSpec, Refusal, SchemaParameter

__all__ = [
    "Annotation",
    "AnnotationError",
    "AxisShard",
    "BoundAnnotation",
    "BoundDim",
    "BoundOperand",
    "Call",
    "DType",
    "Expression",
    "Factor",
    "NnscalerError",
    "OperatorSpec",
    "Refusal",
    "Registry",
    "SchemaParameter",
    "Shard",
    "SourceLocation",
    "TensorArgument",
    "bind",
    "bind_call",
    "block_start",
    "by_index",
    "check",
    "default_registry",
    "index",
    "linear_sets",
    "local_size",
    "localise",
    "name_of",
    "operator_of",
    "parse",
    "print_annotation",
    "register_op",
    "shard_of",
    "splittable",
]
