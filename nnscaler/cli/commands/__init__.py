"""The commands of `nnscaler`, one file each."""
