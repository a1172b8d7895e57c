"""Train a program: optimizers, data, checkpoints, and the loop around them."""
