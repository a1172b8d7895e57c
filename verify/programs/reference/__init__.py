"""The reference: the untraced eager model on the whole batch."""
