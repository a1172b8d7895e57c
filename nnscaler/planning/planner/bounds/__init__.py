"""Lower bounds of configurations that are not solved for all of their layers."""
