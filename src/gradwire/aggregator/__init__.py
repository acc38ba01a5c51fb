"""The aggregator: a program that adds up the words of several workers on their way (docs/aggregator.md).

`server.py` is its main loop. An engine serves the packets of data: `userspace_engine.py` by a UDP socket and native
code, `xdp/` inside the kernel. `registry.py` is the control plane: jobs, joining and sessions. `packet/` has the packet
format.
"""
