"""The time and memory of a step: predicted by a cost model, and measured on this machine."""
