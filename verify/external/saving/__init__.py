"""Saving and loading: what is loaded elsewhere must be what ranks held."""
