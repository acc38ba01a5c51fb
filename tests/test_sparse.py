"""Sparse codecs: what they choose, what they send, and what stays behind."""
