"""Ranks as processes that talk over gloo."""
