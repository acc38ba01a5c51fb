"""Loops over many cases that read as parameters do, and say which cases failed.

    @for_each("spec", SPECS)
    @for_each("dtype", FLOATS)
    def test_zeros_stay_zero(backend, spec, dtype): ...

is one test (for each backend) that runs every case, also after one has failed, and lists those that did by name:
`co3, float16`. `pytest -k zeros --case float16` runs the cases alone whose names contain that text.

Of combinations, the quick tier takes a diagonal on which every value of every argument occurs; the rest has the others.

Where cases share nothing and are few, or need a tmp_path or a monkeypatch of their own, pytest.mark.parametrize is
the better choice.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch

SHOWN = 20  # failed cases whose errors are shown; all are counted
wanted = ""  # of the option --case
DIAGONAL, OTHERS = "diagonal", "others"
part = ""  # of the combinations that the test now running is to take; all of them if it is neither of the two


class Axis(NamedTuple):
    """Names of arguments, and for each case its name and their values."""

    arguments: tuple[str, ...]
    cases: list[tuple[str, tuple[Any, ...]]]


def for_each(
    arguments: str | tuple[str, ...], values: Iterable[Any], ids: Iterable[str] | Callable[[Any], str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test with each of these values. Several of them on top of each other are all combinations."""
    names = tuple(name.strip() for name in arguments.split(",")) if isinstance(arguments, str) else arguments
    values = list(values)
    if callable(ids):
        ids = [ids(value) for value in values]
    named = [None] * len(values) if ids is None else list(ids)
    cases = []
    for value, name in zip(values, named, strict=True):
        parts = (value,) if len(names) == 1 else tuple(value)
        assert len(parts) == len(names), value
        cases.append((name or ", ".join(map(name_of, parts)), parts))
    axis = Axis(names, cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        axes = [axis, *getattr(test, "axes", [])]
        inner = getattr(test, "inner", test)

        @functools.wraps(inner)
        def loop(**fixtures: Any) -> None:
            run_all(inner, axes, fixtures)

        loop.axes, loop.inner = axes, inner  # type: ignore[attr-defined]
        looped = {name for axis in axes for name in axis.arguments}
        given = inspect.signature(inner)
        kept = [parameter for name, parameter in given.parameters.items() if name not in looped]
        loop.__signature__ = given.replace(parameters=kept)  # type: ignore[attr-defined]
        return loop

    return decorate


def run_all(test: Callable[..., None], axes: list[Axis], fixtures: dict[str, Any]) -> None:
    """Call the test with every combination; one AssertionError for all that failed."""
    failures: list[tuple[str, Exception]] = []
    count = 0
    for places in itertools.product(*(range(len(axis.cases)) for axis in axes)):
        combination = [axis.cases[place] for axis, place in zip(axes, places, strict=True)]
        name = ", ".join(text for text, _ in combination)
        if wanted not in name or (part and (part == DIAGONAL) != on_diagonal(places, axes)):
            continue
        count += 1
        arguments: dict[str, Any] = {}
        for axis, (_, values) in zip(axes, combination, strict=True):
            arguments |= zip(axis.arguments, values, strict=True)
        try:
            test(**fixtures, **arguments)
        except Exception as error:
            failures.append((name, error))
    if not count:
        pytest.skip(f"no case contains {wanted!r}" if wanted else "no cases")
    if failures:
        lines = [f"  {name}: {type(error).__name__}: {first_line(error)}" for name, error in failures[:SHOWN]]
        rest = [f"  … and {len(failures) - SHOWN} more"] if len(failures) > SHOWN else []
        text = "\n".join([f"{len(failures)} of {count} cases failed; the first is above", *lines, *rest])
        raise AssertionError(text) from failures[0][1]


def is_split(test: Callable[..., None]) -> bool:
    """Whether the quick tier takes some of its cases and leaves the others to the rest."""
    return sum(len(axis.cases) > 1 for axis in getattr(test, "axes", [])) > 1


def on_diagonal(places: tuple[int, ...], axes: list[Axis]) -> bool:
    """Whether the places are (n, n, …), where shorter axes start again from their beginning."""
    longest = max(range(len(axes)), key=lambda i: len(axes[i].cases))
    return all(place == places[longest] % len(axis.cases) for place, axis in zip(places, axes, strict=True))


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def name_of(value: Any) -> str:
    """How a value is called in the names of cases."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return f"{name_of(value.dtype)} tensor of shape {tuple(value.shape)}"
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
