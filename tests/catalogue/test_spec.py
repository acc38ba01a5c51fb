"""Specs: `name[:key=value,…]`, read, spelled out in full, and refused with what is allowed."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import GradwireError, SpecError
from gradwire.catalogue import meanings
from gradwire.catalogue.all_recipes import CATALOGUE
from gradwire.catalogue.spec_by_name import parse_spec, warn_of_idle_patterns
from support.cases import for_each

MINIFLOAT = ["co3", "gennorm"]


@st.composite
def specs(draw: st.DrawFn) -> str:
    """A valid spec with some of its parameters, in any order."""
    name = draw(st.sampled_from(["none", "fp16", "bf16", *MINIFLOAT]))
    if name not in MINIFLOAT:
        return name
    values = {
        "format": draw(st.sampled_from(["fp4", "fp8", "e4m3", "e5m2", "e3m0b2", "ue3m2b-5", "e2m3b0f", "e3m2b3n"])),
        "coder": draw(st.sampled_from(["raw", "huffman", "rans"])),
        "model": draw(st.sampled_from(["auto", "gennorm", "histogram"])),
        "rounding": draw(st.sampled_from(["nearest", "stochastic"])),
        "decay": str(draw(st.floats(0, 1))),
    }
    keys = draw(st.lists(st.sampled_from(sorted(values)), unique=True))
    return f"{name}:" + ",".join(f"{key}={values[key]}" for key in keys) if keys else name


@given(specs())
def test_canonical_spec_rebuilds_the_recipe(spec):
    recipe = gradwire.recipe(spec)
    again = gradwire.recipe(str(recipe))
    assert (again, str(again)) == (recipe, str(recipe))
    codec = gradwire.codec(spec)
    assert codec == recipe.codec == gradwire.codec(str(codec))
    assert str(gradwire.codec(str(codec))) == str(codec)


def test_defaults_are_spelled_out():
    assert str(gradwire.recipe("co3")) == "co3:format=fp4,coder=rans,model=auto,rounding=nearest,decay=0.9"
    assert str(gradwire.codec("co3")) == "co3:format=fp4,coder=rans,model=auto,rounding=nearest"
    assert str(gradwire.recipe("gennorm")) == "gennorm:format=fp8,coder=huffman,model=auto,rounding=nearest,decay=0.0"
    assert str(gradwire.recipe("none")) == "none"


def test_memory_is_the_recipes_business():
    assert gradwire.recipe("co3").decay == 0.9
    assert gradwire.recipe("co3:decay=0.5").decay == 0.5
    assert gradwire.recipe("co3:decay=0").decay == gradwire.recipe("fp16").decay == gradwire.recipe("none").decay == 0
    assert gradwire.codec("co3:decay=0.5") == gradwire.codec("co3:decay=1")


def test_spaces_and_order_do_not_matter():
    assert gradwire.recipe(" co3: decay = 0.5 , format=fp8 ") == gradwire.recipe("co3:format=fp8,decay=0.5")


def test_formats_with_two_names_are_one():
    assert gradwire.codec("co3:format=e5m2") == gradwire.codec("co3:format=fp8") == gradwire.codec("co3:format=e5m2b15")


def test_recipes_are_described():
    entries = gradwire.recipes()
    assert {"none", "fp16", "bf16", "co3", "gennorm"} <= {entry.name for entry in entries}
    for entry in entries:
        assert entry.description and "\n" not in entry.description
        assert gradwire.recipe(entry.name).codec.encode is not None
    assert "2203.09044" in CATALOGUE["co3"].paper and "2111.07599" in CATALOGUE["gennorm"].paper


@for_each(
    "spec, message",
    [
        ("co4", r"unknown recipe 'co4'; did you mean 'co3'\? \(allowed: none, fp16, bf16, co3, ecq, structured"),
        ("", r"unknown recipe '' \(allowed: none"),
        ("CO3", "unknown recipe 'CO3'"),
        ("xyzzy", r"unknown recipe 'xyzzy' \(allowed: none"),
        ("co3:fromat=fp4", r"unknown parameter of co3 'fromat'; did you mean 'format'\? \(allowed: format, coder"),
        ("none:decay=1", r"unknown parameter of none 'decay' \(allowed: none at all\)"),
        ("fp16:coder=raw", "unknown parameter of fp16 'coder'"),
        ("co3:format=fp5", r"co3: format: unknown format 'fp5'; did you mean 'fp.'\? \(allowed: fp4, fp8, e2m1"),
        ("co3:format=e9m9b1", "co3: format: no such float format: e9m9b1; needs sign 0 or 1"),
        ("co3:coder=hufman", r"co3: coder: unknown value 'hufman'; did you mean 'huffman'\? \(allowed: raw, huff"),
        ("co3:coder=RANS", r"unknown value 'RANS'; did you mean 'rans'\? \(allowed: raw, huffman, rans\)"),
        ("co3:model=normal", r"unknown value 'normal'.*\(allowed: auto, gennorm, histogram\)"),
        ("co3:rounding=up", r"\(allowed: nearest, stochastic\)"),
        ("co3:decay=2", "co3: decay: '2' is not a number from 0 to 1"),
        ("co3:decay=-0.1", "is not a number from 0 to 1"),
        ("co3:decay=nan", "'nan' is not a number from 0 to 1"),
        ("co3:decay=x", "'x' is not a number from 0 to 1"),
        ("co3:", "cannot read '' in the spec of 'co3': write co3:key=value"),
        ("co3:format", "cannot read 'format'"),
        ("co3:format=", "cannot read 'format='"),
        ("co3:=fp4", "cannot read '=fp4'"),
        ("co3:format=fp4,", "cannot read ''"),
        ("co3:format=fp4,format=fp8", "cannot read 'format=fp8'.*each key once"),
        ("co3:format=fp4;decay=1", "unknown format 'fp4;decay=1'"),
        ("none:", "cannot read ''"),
    ],
)
def test_bad_specs_say_what_is_allowed(spec, message):
    for function in (gradwire.recipe, gradwire.codec):
        with pytest.raises(SpecError, match=message):
            function(spec)


@pytest.mark.parametrize("wrong", [None, 5, b"co3", ["co3"], {"*": "co3"}])
def test_specs_are_strings(wrong):
    with pytest.raises(SpecError, match="a spec is a string such as 'co3:format=fp4', not"):
        gradwire.recipe(wrong)


@given(st.text(alphabet="co3nefp16:=,.-mbaydr \x00é", max_size=20))
def test_any_text_is_a_spec_or_a_spec_error(text):
    try:
        recipe = gradwire.recipe(text)
    except SpecError:
        return
    assert gradwire.recipe(str(recipe)) == recipe


def test_errors_have_one_family():
    for error in (SpecError, gradwire.FrameError, gradwire.AggregateError):
        assert issubclass(error, GradwireError)
    assert issubclass(SpecError, ValueError) and issubclass(gradwire.FrameError, ValueError)
    assert issubclass(gradwire.AggregateError, RuntimeError)


def test_patterns_that_match_nothing_are_named() -> None:
    recipes = parse_spec({"layers.*": "co3", "*.bias": "none", "*": "none"})
    with pytest.warns(UserWarning, match=r"'layers\.\*' matches no parameter .* nearest is 'layer\.0\.bias'"):
        warn_of_idle_patterns(recipes, ["layer.0.weight", "layer.0.bias"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_patterns(recipes, ["layers.0.weight", "layers.0.bias", "head.bias"])
        warn_of_idle_patterns(parse_spec("co3"), ["anything"])


def test_patterns_behind_others_that_take_all_of_theirs_are_named() -> None:
    names = ["layers.0.weight", "layers.0.bias", "head.weight"]
    with pytest.warns(UserWarning, match=r"'layers\.\*' has no effect: .* such as '\*', since the first") as caught:
        warn_of_idle_patterns(parse_spec({"*": "none", "layers.*": "co3"}), names)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_patterns(parse_spec({"*.bias": "none", "layers.*": "co3", "*": "none"}), names)
        warn_of_idle_patterns(parse_spec({"*.bias": "none", "layers.0.bias": "none", "*": "co3"}), names)  # the same


def test_every_parameter_says_what_it_means_and_nothing_else_does():
    named = {key for entry in CATALOGUE.values() for key in entry.parameters}
    of_recipes = {f"{entry.name}.{key}" for entry in CATALOGUE.values() for key in entry.parameters}
    assert named <= set(meanings._MEANINGS) <= named | of_recipes
    assert meanings.meaning("adam", "start") != meanings.meaning("dgc", "start")
