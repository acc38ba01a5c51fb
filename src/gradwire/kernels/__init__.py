"""The few operations everything is made of. `reference` defines them; `cpu` does the same in native code, and `cuda`
those of rows in Triton.

Import from here: where the native module is missing, the reference does all the work, with one warning and the
same bytes.
"""

from __future__ import annotations

import os
import warnings

from gradwire.kernels.reference import *  # noqa: F403
from gradwire.kernels.rows import Side, join_rows, largest, take_rows  # noqa: F401

if not os.environ.get("GRADWIRE_NO_NATIVE"):
    try:
        from gradwire.kernels.cpu import *  # noqa: F403
    except ImportError:
        warnings.warn(
            "gradwire's native module is not built: everything works, slowly. Install gradwire from its source "
            "folder or a wheel to get it (GRADWIRE_NO_NATIVE=1 silences this).",
            RuntimeWarning,
            stacklevel=2,
        )
