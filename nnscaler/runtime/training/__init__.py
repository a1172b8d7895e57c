"""Run the steps of a program on one rank: executor, gradients, clipping, checkpoints."""
