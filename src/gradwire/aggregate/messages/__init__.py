"""Named tensors as one message and back: how they are cut, coded and counted."""
