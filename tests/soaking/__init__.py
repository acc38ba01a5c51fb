"""The soak (tests/soak.py): short trainings in real processes, to which everything happens that happens to trainings.

`episodes` has the kinds of episodes and is the place to begin; an episode runs a `training` in `rank` processes with
`faults`, attempt after attempt, until it has come to its end, and compares every step with an undisturbed run.
"""
