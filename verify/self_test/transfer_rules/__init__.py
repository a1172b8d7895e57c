"""Self-test of the transfer rules: each one against torch, on arbitrary states."""
