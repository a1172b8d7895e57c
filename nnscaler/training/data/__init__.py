"""Samples of a run: their order, the batches that are made of them, and what reads them."""
