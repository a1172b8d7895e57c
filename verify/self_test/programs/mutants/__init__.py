"""Mutation operators: ways to make a right program wrong."""
