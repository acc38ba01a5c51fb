"""What outlives a process: the states of all ranks as one, and the checkpoint file of a run."""
