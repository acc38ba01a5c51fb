"""gradwire: communication-efficient distributed training for PyTorch."""

import importlib
from typing import TYPE_CHECKING

from gradwire import backward, dcp, ddp, fsdp
from gradwire._version import __version__
from gradwire.catalogue.all_recipes import recipes
from gradwire.catalogue.budget import allocate
from gradwire.catalogue.parse_recipe import codec, recipe
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec_by_name import Spec
from gradwire.codecs import Codec, decode
from gradwire.data_parallel import DataParallel
from gradwire.engine.handle import Handle
from gradwire.errors import AggregateError, CheckpointError, FrameError, GradwireError, SpecError
from gradwire.local_sgd.local_sgd import LocalSGD

if TYPE_CHECKING:
    from gradwire import flower as flower
    from gradwire import torchft as torchft
else:

    def __getattr__(name):
        """Import `gradwire.flower` and `gradwire.torchft` when they are used: not everybody has what they need."""
        if name in ("flower", "torchft"):
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# `flower` and `torchft` are missing here on purpose: `from gradwire import *` would fail where these are not installed.
__all__ = [
    "AggregateError",
    "CheckpointError",
    "Codec",
    "DataParallel",
    "FrameError",
    "GradwireError",
    "Handle",
    "LocalSGD",
    "Recipe",
    "Spec",
    "SpecError",
    "__version__",
    "allocate",
    "backward",
    "codec",
    "dcp",
    "ddp",
    "decode",
    "fsdp",
    "recipe",
    "recipes",
]
