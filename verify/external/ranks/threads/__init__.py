"""Ranks as threads, over a simulated backend of torch.distributed."""
