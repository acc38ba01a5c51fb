"""The kernels of `reference`, by the native module, for CPU tensors; the same bytes.

What it does not cover (tensors on other devices, and operations that cost nothing) stays with the reference.
"""

from .dense import *  # noqa: F403
from .grid import *  # noqa: F403
from .homomorphic import *  # noqa: F403
from .levels import *  # noqa: F403
from .sparse import *  # noqa: F403
