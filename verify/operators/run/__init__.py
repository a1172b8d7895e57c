"""Verify many operators: found by name, in child processes, from a cache of passes, with findings that replay."""
