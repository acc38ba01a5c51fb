"""The kernels of `reference`, by the native module, for CPU tensors; the same bytes.

What it does not cover (tensors on other devices, and operations that cost nothing) stays with the reference.
"""

from gradwire.kernels.cpu.dense import *  # noqa: F403
from gradwire.kernels.cpu.grid import *  # noqa: F403
from gradwire.kernels.cpu.homomorphic import *  # noqa: F403
from gradwire.kernels.cpu.levels import *  # noqa: F403
from gradwire.kernels.cpu.sparse import *  # noqa: F403
