"""A compiled program on disk, and the user's operators that it calls."""
