"""gradwire: communication-efficient distributed training for PyTorch."""

from . import ddp
from .budget import allocate
from .catalogue import codec, recipe, recipes
from .codecs import Codec, decode
from .data_parallel import DataParallel
from .errors import AggregateError, FrameError, GradwireError, SpecError
from .local_sgd import LocalSGD

__version__ = "0.1.0"
__all__ = [
    "AggregateError",
    "Codec",
    "DataParallel",
    "FrameError",
    "GradwireError",
    "LocalSGD",
    "SpecError",
    "allocate",
    "codec",
    "ddp",
    "decode",
    "recipe",
    "recipes",
]
