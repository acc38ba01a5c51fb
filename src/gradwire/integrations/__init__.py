"""Callbacks for training frameworks, one file for each; import the one you use: they import their frameworks."""
