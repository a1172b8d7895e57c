"""Gradients of a step: added up, summed over ranks in buckets, and clipped."""
