"""Specs, `name[:key=value,…]`: what an entry of the catalogue is made of, and how its parameters are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire.codecs import Codec
from gradwire.convert.conversion import Converter
from gradwire.errors import SpecError, unknown_name
from gradwire.small_float_formats import parse_format

Values = dict[str, str | float]
Parser = Callable[[str], str | float]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a recipe: its default as text, and the function that reads its text."""

    default: str
    parse: Parser
    of_corrector: bool = False  # for the training around the codec: no part of the codec's own spec


@dataclass(frozen=True)
class Entry:
    """A line of the catalogue."""

    name: str
    description: str
    paper: str
    build: Callable[[Values], Converter] = field(repr=False)
    parameters: dict[str, Parameter] = field(default_factory=dict, repr=False)

    def read(self, given: dict[str, str]) -> Values:
        """All parameters, those that are not given at their defaults."""
        for key in given:
            if key not in self.parameters:
                raise unknown_name(f"parameter of {self.name}", key, self.parameters or ["none at all"])
        values: Values = {}
        for key, parameter in self.parameters.items():
            try:
                values[key] = parameter.parse(given.get(key, parameter.default))
            except SpecError as error:
                raise SpecError(f"{self.name}: {key}: {error}") from None
        return values

    def spell(self, values: Values) -> str:
        """Write the spec with these values, in the order of the parameters."""
        text = ",".join(f"{key}={value}" for key, value in values.items())
        return f"{self.name}:{text}" if text else self.name

    def codec(self, values: Values) -> Codec:
        """Build the codec; its own spec leaves out the parameters of the training around it."""
        own = {key: values[key] for key, p in self.parameters.items() if not p.of_corrector}
        return Codec(self.spell(own), self.build(values))


def split(spec: str) -> tuple[str, dict[str, str]]:
    """The name, and the parameters as given."""
    name, colon, rest = spec.strip().partition(":")
    given: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value) or key in given:
            raise SpecError(
                f"cannot read {item!r} in the spec of {name!r}: write {name}:key=value,key=value, each key once"
            )
        given[key] = value
    return name, given


# ── parsers of values ─────────────────────────────────────────────────────────────────────────────


def number(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise SpecError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse


def whole(low: int, high: int, step: int = 1) -> Callable[[str], float]:
    """Return a parser of the whole numbers low, low + step, … up to high."""

    def parse(text: str) -> float:
        if not text.isdecimal() or int(text) not in range(low, high + 1, step):
            every = "" if step == 1 else f", in steps of {step}"
            raise SpecError(f"{text!r} is not a whole number from {low} to {high}{every}")
        return int(text)

    return parse


def share(text: str) -> float:
    """Parse a number between 0 and 1, exclusive."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < 1:
        raise SpecError(f"{text!r} is not a number above 0 and below 1: the share of the entries that are sent")
    return value


def one_of(*allowed: str) -> Callable[[str], str]:
    """Return a parser that accepts these words only."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise unknown_name("value", text, allowed)
        return text

    return parse


def word_or(word: str, parse: Parser) -> Parser:
    """Return a parser that accepts one word, and otherwise what `parse` accepts."""

    def parse_other(text: str) -> str | float:
        if text == word:
            return word
        try:
            return parse(text)
        except SpecError as error:
            raise SpecError(f"{error}; or {word}") from None

    return parse_other


def float_format(text: str) -> str:
    """Parse the name of a float format, and return it in its shortest form."""
    return str(parse_format(text))


# ── parameters of the training around a codec ─────────────────────────────────────────────────────


def corrector(default: str, parse: Parser) -> Parameter:
    """Return a parameter of the training around the codec, such as of its error memory."""
    return Parameter(default, parse, of_corrector=True)


def decay(default: str) -> Parameter:
    """Return the parameter that error memory is multiplied by in each step: 0 keeps none, 1 forgets nothing."""
    return corrector(default, number(0, 1))
