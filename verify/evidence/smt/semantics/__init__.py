"""Semantics of ATen operators on symbolic elements, one module a family."""
