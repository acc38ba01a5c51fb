"""The few operations everything is made of. `reference` defines them; native code does the same faster.

Import from here: what the native module offers replaces the reference for CPU tensors, and where it is
missing the reference does all the work, with one warning and the same bytes.
"""

from __future__ import annotations

from .reference import *  # noqa: F403
