"""The other ranks: what they must agree on, whether they are still there, and why one was lost."""
