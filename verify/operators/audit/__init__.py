"""Audit an operator as it is: its derivative, its side effects, its registration, its narrow dtypes."""
