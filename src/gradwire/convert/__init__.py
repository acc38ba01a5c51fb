"""Lossy converters: tensors to symbols and back. One paper, one file."""
