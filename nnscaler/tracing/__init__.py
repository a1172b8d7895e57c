"""From a PyTorch module to a graph."""

from nnscaler.tracing.trace import Traced, trace

__all__ = ["Traced", "trace"]
