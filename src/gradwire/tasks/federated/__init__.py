"""The same tasks with many clients and a server, as apps for Flower.

`settings` knows nothing of Flower; `apps` makes a pair of apps of one `FederatedRun` or several.
"""
