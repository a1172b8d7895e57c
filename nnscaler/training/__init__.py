"""Train with a program: engine, data, checkpoints, and the run of a file."""
