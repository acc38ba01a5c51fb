"""The definition of every kernel, in plain torch, numpy and Python; tensors are flat.

The native kernels (`cpu`) must give the same results bit for bit, errors included; the tests compare them.
"""

from gradwire.kernels.reference.dense import *  # noqa: F403
from gradwire.kernels.reference.grid import *  # noqa: F403
from gradwire.kernels.reference.homomorphic import *  # noqa: F403
from gradwire.kernels.reference.levels import *  # noqa: F403
from gradwire.kernels.reference.sparse import *  # noqa: F403
