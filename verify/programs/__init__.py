"""Verify a compiled program against its model."""
