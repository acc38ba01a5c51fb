"""gradwire: communication-efficient distributed training for PyTorch."""

import importlib
from typing import TYPE_CHECKING

from . import backward, dcp, ddp, fsdp
from .budget import allocate
from .catalogue import codec, recipe, recipes
from .codecs import Codec, decode
from .data_parallel import DataParallel
from .errors import AggregateError, CheckpointError, FrameError, GradwireError, SpecError
from .local_sgd import LocalSGD

if TYPE_CHECKING:
    from . import flower
else:

    def __getattr__(name):
        """`gradwire.flower` needs Flower, which not everybody has: it is imported when it is asked for."""
        if name == "flower":
            return importlib.import_module(".flower", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "AggregateError",
    "CheckpointError",
    "Codec",
    "DataParallel",
    "FrameError",
    "GradwireError",
    "LocalSGD",
    "SpecError",
    "allocate",
    "backward",
    "codec",
    "dcp",
    "ddp",
    "decode",
    "flower",
    "fsdp",
    "recipe",
    "recipes",
]
