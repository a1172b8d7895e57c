"""Annotations of operators that are layers of models."""
