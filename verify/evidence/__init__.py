"""Decide claims about one call of an operator: tested by the oracle on numbers, then proved."""
