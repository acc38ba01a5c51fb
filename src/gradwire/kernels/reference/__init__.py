"""The definition of every kernel, in plain torch, numpy and Python; tensors are flat.

The native kernels (`cpu`) must give the same results bit for bit, errors included; the tests compare them.
"""

from .dense import *  # noqa: F403
from .grid import *  # noqa: F403
from .homomorphic import *  # noqa: F403
from .levels import *  # noqa: F403
from .sparse import *  # noqa: F403
