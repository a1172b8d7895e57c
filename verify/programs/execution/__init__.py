"""Run a program on ranks, and record what its variables hold."""
