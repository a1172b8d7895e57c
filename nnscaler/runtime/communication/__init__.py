"""Communicators between ranks, and the conversions of layouts that are made of them."""
