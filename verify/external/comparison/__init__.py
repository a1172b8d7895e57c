"""Compare what the ranks computed with the plain model: differences, causes and repairs."""
