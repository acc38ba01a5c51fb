"""gradwire: communication-efficient distributed training for PyTorch."""

import importlib
from typing import TYPE_CHECKING

from gradwire import backward, dcp, ddp, fsdp
from gradwire._version import __version__
from gradwire.catalogue.all_recipes import codec, recipe, recipes
from gradwire.catalogue.budget import allocate
from gradwire.codecs import Codec, decode
from gradwire.data_parallel import DataParallel
from gradwire.errors import AggregateError, CheckpointError, FrameError, GradwireError, SpecError
from gradwire.local_sgd.local_sgd import LocalSGD

if TYPE_CHECKING:
    from gradwire import flower
else:

    def __getattr__(name):
        """`gradwire.flower` needs Flower, which not everybody has: it is imported when it is asked for."""
        if name == "flower":
            return importlib.import_module(".flower", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AggregateError",
    "CheckpointError",
    "Codec",
    "DataParallel",
    "FrameError",
    "GradwireError",
    "LocalSGD",
    "SpecError",
    "__version__",
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
