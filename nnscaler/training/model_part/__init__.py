"""A part of a model on many ranks, as a module of an eager model."""
