"""Parameters of the recipe whose words can be summed without decoding them, and how its converter is built."""

from __future__ import annotations

from gradwire.catalogue.spec import Parameter, Values, corrector, decay, one_of, share, word_or
from gradwire.convert.conversion import Converter
from gradwire.convert.homomorphic import Homomorphic
from gradwire.errors import SpecError
from gradwire.homomorphic.grid import BITS

HOMOMORPHIC_PARAMETERS = {
    "p": Parameter("0.01", word_or("all", share)),
    "bits": Parameter("32", one_of(*map(str, BITS))),
    "rounding": Parameter("nearest", one_of("nearest", "stochastic")),
    "decay": decay("1"),
    "rounds": corrector("auto", one_of("auto", "1", "2")),
}


def build_homomorphic(v: Values) -> Converter:
    """Build the converter to integer sums; SpecError if something would be lost for good."""
    if not v["decay"] and (v["rounding"] != "stochastic" or v["p"] != "all"):
        raise SpecError(
            "homomorphic: without an error memory, what the grid does not hold would be lost: decay=0 needs "
            "rounding=stochastic and p=all, which lose nothing on average"
        )
    p = None if v["p"] == "all" else float(v["p"])
    return Homomorphic(p, int(v["bits"]), str(v["rounding"]))
