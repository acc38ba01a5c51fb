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
else:

    def __getattr__(name):
        """Import `gradwire.flower` when it is first used, because it needs Flower, which not everybody has."""
        if name == "flower":
            return importlib.import_module(".flower", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# `flower` is missing here on purpose: `from gradwire import *` would otherwise fail where Flower is not installed.
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
