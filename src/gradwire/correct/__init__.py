"""Correctors: what was not sent is not lost."""
