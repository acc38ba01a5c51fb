"""A byte budget for one client's update: `within` is `update.encode` with a length that is never exceeded.

An update that does not fit is made coarser by the first of these that makes it fit. Each has one setting, which is
adjusted until the real length comes close to the budget:

1. The spec as it is; a budget never makes it finer.
2. Sparse recipes send fewer entries. Dense recipes with an error memory become `ecq`, which has the least error for its
   bytes, if there is at least half a bit for each entry; all tensors get the same error per entry (reverse
   water-filling), and tensors whose entries are smaller than this error wait in the memory.
3. The largest entries of all tensors together are sent as 4-bit floats, in a single frame, down to one entry.
4. Nothing is sent, and the whole update waits in the error memory.

Each of them keeps the decay γ of the recipe that was asked for: sent + memory = d + γ·(memory before) for each tensor.

Recipes without an error memory would lose what is left out, so 3 and 4 are not for them. They get fewer levels, down to
three, or become `ecq` rounded stochastically, which is right on average, down to the rate at which its noise would
exceed the update. What they take then, with integers and running statistics of batch normalization, is the least
possible budget.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from gradwire.catalogue.spec_by_name import Spec
from gradwire.errors import GradwireError, SpecError
from gradwire.flower.client.shorter_update import CannotShorten, ShorterUpdate
from gradwire.flower.shared import update
from gradwire.flower.shared.update import Encoded, Tensors


def within(
    limit: int, differences: Tensors, values: Tensors, names: Sequence[str], spec: Spec, memory: Tensors | None = None,
    steps: int = 0, seed: int = 0, overhead: int = 0,
) -> Encoded:  # fmt: skip
    """Encode an update so that its bytes and those of the message around it, `overhead`, are `limit` at most.

    All other arguments are those of `update.encode`. Raises a GradwireError that names the least possible budget if
    what must be sent does not fit.
    """
    unlimited = update.encode(differences, values, names, spec, memory, steps, seed)
    if len(unlimited.data) + overhead <= limit:
        return unlimited
    shorter = ShorterUpdate(
        limit - overhead, len(unlimited.data), differences, values, names, spec, dict(memory or {}), steps, seed
    )
    try:
        return shorter.encode()
    except CannotShorten as least:
        raise GradwireError(
            f"a budget of {limit} bytes is impossible: a reply takes at least {least.length + overhead}, of which "
            f"{overhead} are metrics and Flower's own bytes, and the rest is what may not wait: {least}. "
            f"Raise the budget"
        ) from None


_UNITS = {"": 1, "B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def parse_bytes(text: str | float) -> int:
    """Parse a number of bytes: "200kB" is 200_000, "200KiB" is 204_800, and a number without a unit counts bytes."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", str(text), re.ASCII)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if isinstance(text, bool) or not match or match[2].lower() not in units:
        raise SpecError(
            f"{text!r} is not a number of bytes: write 200000, 200kB, 1.5MB (1000s) or 200KiB, 1MiB (1024s)"
        )
    count = Fraction(match[1]) * units[match[2].lower()]
    if count.denominator != 1:
        raise SpecError(f"{text!r} is {float(count):g} bytes: a budget is a whole number of them")
    return int(count)
