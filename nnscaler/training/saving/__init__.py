"""Checkpoints of a training run, weights into and out of an engine, and exports for others."""
