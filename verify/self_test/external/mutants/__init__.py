"""Mistakes in right programs, as rows."""
