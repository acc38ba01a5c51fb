"""The kernels of `reference` by the native module, for CPU tensors; the same bytes.

What it does not cover (operations that cost nothing, tensors of another dtype) stays with the reference.
"""

from gradwire.kernels.cpu.coders import *  # noqa: F403
from gradwire.kernels.cpu.grid import *  # noqa: F403
from gradwire.kernels.cpu.homomorphic import *  # noqa: F403
from gradwire.kernels.cpu.instruction_sets import *  # noqa: F403
from gradwire.kernels.cpu.levels import *  # noqa: F403
from gradwire.kernels.cpu.positions import *  # noqa: F403
from gradwire.kernels.cpu.quantize import *  # noqa: F403
from gradwire.kernels.cpu.rows import *  # noqa: F403
from gradwire.kernels.cpu.sketch import *  # noqa: F403
from gradwire.kernels.cpu.sparse import *  # noqa: F403
