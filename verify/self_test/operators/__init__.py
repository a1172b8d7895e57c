"""Self-test of verify-op: wrong annotations and operators that it must refute, right ones that it must not."""
