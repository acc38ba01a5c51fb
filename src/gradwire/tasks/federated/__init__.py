"""The tasks of `gradwire.tasks` with a server and many clients, as apps for Flower.

`settings` says what a run does and needs no Flower; `apps` makes a server app and a client app for one or more runs.
"""
