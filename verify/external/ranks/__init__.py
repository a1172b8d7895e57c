"""Run a function once for each rank, under torch.distributed: in threads over a simulated backend, or in processes."""
