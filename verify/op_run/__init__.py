"""Verifying many operators: which ones, in child processes, from a cache of passes, with findings that replay."""
