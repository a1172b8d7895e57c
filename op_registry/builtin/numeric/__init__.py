"""Annotations of elementwise operators, reductions, scans, products and transforms."""
