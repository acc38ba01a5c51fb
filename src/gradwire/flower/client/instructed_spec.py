"""The recipes that a client uses when the server's adaptive rate chooses them: `spec_for`."""

from __future__ import annotations

import glob
import math

from gradwire import kernels
from gradwire.catalogue.parse_recipe import recipe
from gradwire.catalogue.spec_by_name import Spec
from gradwire.errors import SpecError
from gradwire.flower.shared.adaptive_rate import LONGEST_INSTRUCTION, FedDQ, parse
from gradwire.flower.shared.update import STATISTICS, Tensors

# With fewer bits, nothing but noise is left of most tensors; with more, there are more levels than a frame can have.
LEAST_BITS, MOST_BITS = 2, 8


def spec_for(instruction: str, differences: Tensors) -> Spec:
    """Return the spec of an update under the server's instruction.

    An instruction is a recipe, which is used as it is, or FedDQ's resolution, which gives each tensor its own number
    of levels. Raises a SpecError if it is neither.
    """
    if not isinstance(instruction, str) or len(instruction) > LONGEST_INSTRUCTION:
        raise SpecError("the server's instruction is not a spec such as 'qsgd:levels=5' or 'feddq:resolution=0.005'")
    if instruction.partition(":")[0].strip() != "feddq":
        recipe(instruction)
        return instruction
    rate = parse(instruction)
    assert isinstance(rate, FedDQ)
    by_tensor = {
        glob.escape(name): _levels(2 * kernels.absmax(t.detach().reshape(-1).float()), rate.resolution)
        for name, t in differences.items()
        if t.numel()
    }
    return {**dict.fromkeys(STATISTICS, "bf16"), **by_tensor, "*": _levels(0.0, rate.resolution)}


def _levels(span: float, resolution: float) -> str:
    """Return the recipe of a tensor with entries from −span/2 to span/2: the largest odd number of levels, one of them
    zero, that FedDQ's bits have room for.

    The paper has 2^bits levels from the least to the greatest entry. A level at zero is worth more than the last one:
    most entries are close to it, and would otherwise be sent as half a step up or down.
    """
    ratio = span / resolution if math.isfinite(span) else 0.0  # encoding refuses what is not finite
    bits = math.ceil(math.log2(ratio)) if ratio > 1 else 0
    return f"qsgd:levels={2 ** min(max(bits, LEAST_BITS), MOST_BITS) - 1},bucket=0"
