"""From a PyTorch module to a graph."""

from nnscaler.tracing.interpret import run_graph
from nnscaler.tracing.trace import Traced, trace

__all__ = ["Traced", "run_graph", "trace"]
