"""From a PyTorch module to a graph."""

from nnscaler.tracing.run_graph import run_graph
from nnscaler.tracing.trace import Traced, trace

__all__ = ["Traced", "run_graph", "trace"]
