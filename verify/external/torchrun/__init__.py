"""Verify an unmodified script that torchrun starts, against the same script on one rank."""
