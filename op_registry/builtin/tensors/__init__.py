"""Annotations of operators that make, move, index and regroup elements."""
