"""Trace one of many equal layers, and copy it."""
