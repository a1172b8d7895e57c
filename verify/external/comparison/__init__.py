"""What ranks computed against what the plain model computes: differences, causes and repairs."""
