"""What is in a frame, how a gradient is distributed, what it costs on the wire: for `gradwire inspect`."""
