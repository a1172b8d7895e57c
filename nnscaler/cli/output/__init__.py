"""Print and write what commands find."""
