"""gradwire: communication-efficient distributed training for PyTorch."""

from . import dcp, ddp, fsdp
from .budget import allocate
from .catalogue import codec, recipe, recipes
from .codecs import Codec, decode
from .data_parallel import DataParallel
from .errors import AggregateError, CheckpointError, FrameError, GradwireError, SpecError
from .local_sgd import LocalSGD

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
    "codec",
    "dcp",
    "ddp",
    "decode",
    "fsdp",
    "recipe",
    "recipes",
]
