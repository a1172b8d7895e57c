"""Compare a traced graph with its module."""
