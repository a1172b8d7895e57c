"""What a step takes: predicted by a cost model, and measured on this machine."""
