"""From a spec such as "co3:format=fp8,decay=0.9" to its recipe: a codec, and what the training around it does."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from gradwire.catalogue.all_recipes import CATALOGUE
from gradwire.catalogue.dense_parameters import DITHERED_RATE
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec import Values, split
from gradwire.codecs import Codec
from gradwire.errors import SpecError, unknown_name


def recipe(spec: str) -> Recipe:
    """Parse a spec `name[:key=value,…]`; SpecError says what is wrong with it and what is allowed."""
    if not isinstance(spec, str):
        raise SpecError(f"a spec is a string such as 'co3:format=fp4', not {type(spec).__name__}")
    return _recipe(spec)


@lru_cache(maxsize=1024)
def _recipe(spec: str) -> Recipe:
    name, written = split(spec)
    if name == "auto":
        raise SpecError(
            "auto is a choice among recipes, made while training: it is for gradwire.ddp.attach and "
            "gradwire.DataParallel, and not part of a dict; elsewhere choose a recipe, such as co3"
        )
    if name not in CATALOGUE:
        raise unknown_name("recipe", name, CATALOGUE)
    entry = CATALOGUE[name]
    values = _settled(entry.read(written), written)
    small = str(values.get("small", "same"))
    last = f"stc:p={values['flush']},decay={values['decay']},small={small}" if values.get("flush", "0") != "0" else None
    return Recipe(
        entry.spell(values), entry.codec(values), entry, values,
        None if small == "same" else recipe(small), recipe(last) if last else None,
    )  # fmt: skip


def _settled(values: Values, written: Collection[str]) -> Values:
    """Let defaults give way to what the user has written, which must not contradict itself.

    A warm-up leads from start down to p, and from warmup_sync up to sync_every.
    """
    if values.get("rounding") == "stochastic" and values.get("rate", "auto") != "auto":
        return _without_noise(values, written)
    if "warmup_sync" not in values:
        return values
    start, every_first = max(values["start"], values["p"]), min(values["warmup_sync"], values["sync_every"])
    if "start" in written and values["warmup"] and start != values["start"]:
        raise SpecError(f"start={values['start']} is below p={values['p']}: a warm-up begins with more entries than p")
    if "warmup_sync" in written and every_first != values["warmup_sync"]:
        raise SpecError(
            f"warmup_sync={values['warmup_sync']} is above sync_every={values['sync_every']}: exchanges are more "
            "frequent during warm-up, not less"
        )
    return {**values, "start": start, "warmup_sync": every_first}


def _without_noise(values: Values, written: Collection[str]) -> Values:
    """Turn the error memory off where stochastic rounding is so coarse that the memory would grow without end."""
    if float(values["rate"]) >= DITHERED_RATE or not values["decay"]:
        return values
    if "decay" in written:
        raise SpecError(
            f"ecq: at rates below {DITHERED_RATE} stochastic rounding adds more noise than an error memory can take: "
            "use decay=0, or rounding=nearest"
        )
    return {**values, "decay": 0.0}


def codec(spec: str) -> Codec:
    """Return the stateless part of a recipe; parameters of the training around it are accepted without effect."""
    return recipe(spec).codec
