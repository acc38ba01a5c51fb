"""The same tasks with many clients and a server, as apps for Flower.

`settings` knows nothing of Flower; `FederatedRun` (in `run`) has the apps, which any engine of Flower's runs.
"""
