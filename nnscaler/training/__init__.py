"""From a compiled program to a training run: the engine of a rank, optimizers, data, checkpoints and the trainer."""
