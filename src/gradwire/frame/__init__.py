"""The frame: its header, its checksum, and the fields it is made of (docs/wire-format.md)."""
