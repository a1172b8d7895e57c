"""Verify parallel programs that this compiler did not write, against the plain eager model."""
