"""The tensors that a rank holds between steps, and their checkpoints."""
