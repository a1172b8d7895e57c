"""Changes of graphs of forward and backward that torch.compile makes of stages, before it cuts them in two."""
