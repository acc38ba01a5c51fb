"""The definition of every kernel, in plain torch, numpy and Python; tensors are flat.

The kernels of `cpu` and `cuda` must give the same results bit for bit, errors included; the tests compare them.
"""

from gradwire.kernels.reference.coders import *  # noqa: F403
from gradwire.kernels.reference.generator import *  # noqa: F403
from gradwire.kernels.reference.grid import *  # noqa: F403
from gradwire.kernels.reference.homomorphic import *  # noqa: F403
from gradwire.kernels.reference.levels import *  # noqa: F403
from gradwire.kernels.reference.positions import *  # noqa: F403
from gradwire.kernels.reference.quantize import *  # noqa: F403
from gradwire.kernels.reference.rows import *  # noqa: F403
from gradwire.kernels.reference.sketch import *  # noqa: F403
from gradwire.kernels.reference.sparse import *  # noqa: F403
from gradwire.kernels.reference.streams import *  # noqa: F403
from gradwire.kernels.reference.structure import *  # noqa: F403
