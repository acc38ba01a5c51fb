"""Sums of compressed gradients that need no decompression on the way (docs/homomorphic.md).

`grid` turns entries into integers, `plan` says how long index and sketch are, `code` encodes and decodes words.
"""
