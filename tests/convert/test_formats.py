"""Small float formats: their values, and rounding to the nearest of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import SpecError, kernels
from gradwire.convert.minifloat import values
from gradwire.small_float_formats import PRESETS, SPECIALS, Format, parse_format
from support.cases import for_each
from support.plain_coders import FORMAT_NAMES
from support.plain_decoder import FORMATS, plain_magnitudes

COUNTS = {"fp4": 11, "fp8": 247, "e2m1": 15, "e4m3": 253, "e5m2": 247, "e4m3b10": 239}
CUSTOM = (
    "e1m2b0", "e1m0b0f", "e3m0b3", "e3m2b3n", "e2m3b-5f", "e4m3b40", "e6m1b31", "ue4m2b7", "ue2m2b0f"
)  # fmt: skip


@st.composite
def formats(draw: st.DrawFn) -> Format:
    sign, exponent = draw(st.integers(0, 1)), draw(st.integers(1, 6))
    mantissa = draw(st.integers(0, min(6, 8 - sign - exponent)))
    bias, special = draw(st.integers(-20, 64)), draw(st.sampled_from(SPECIALS))
    codes = (2**exponent - (special == "exponent")) * 2**mantissa - (special == "code")
    if not 2 <= codes <= 255:
        special, mantissa = "exponent", max(mantissa, 1)
    return Format(sign, exponent, mantissa, bias, special)


def nearest_symbols(fmt: Format, y: np.ndarray) -> np.ndarray:
    """By comparing with all magnitudes; ties go to the even multiple of the spacing."""
    m = fmt.magnitudes
    a = np.abs(y.astype(np.float64)) if fmt.sign else np.maximum(y.astype(np.float64), 0)
    upper = np.clip(np.searchsorted(m, a), 1, len(m) - 1)
    lower = upper - 1
    to_upper, to_lower = m[upper] - a, a - m[lower]
    lower_is_even = m[lower] / (m[upper] - m[lower]) % 2 == 0
    index = np.where((to_lower < to_upper) | ((to_lower == to_upper) & lower_is_even), lower, upper)
    return fmt.zero_symbol + np.where(y < 0, -index, index)


def telling_inputs(fmt: Format, seed: int = 0) -> torch.Tensor:
    """Values, midpoints, the neighbours of both, what is beyond the range, and noise of all sizes."""
    m = fmt.magnitudes
    points = np.concatenate([m, (m[1:] + m[:-1]) / 2]).astype(np.float32)
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    rng = np.random.default_rng(seed)
    noise = fmt.largest * 2.0 ** rng.uniform(-2 - 2 * len(m).bit_length(), 1, 300)
    beyond = fmt.largest * np.array([1.01, 1.5, 4, 1e4]), [1e-44, 1e-39, 1e-30, 3e38]
    everything = np.clip(np.concatenate([points, up, down, noise, *beyond]), 0, 3.4e38).astype(np.float32)
    return torch.from_numpy(np.concatenate([everything, -everything]))


def check_nearest(fmt: Format, u: torch.Tensor, step: float = 1.0) -> None:
    with np.errstate(over="ignore"):
        y = u.numpy() * (np.float32(1) / np.float32(step))
    np.testing.assert_array_equal(kernels.to_symbols(u, step, fmt).numpy(), nearest_symbols(fmt, y))


@for_each("name", COUNTS)
def test_number_of_values(name):
    fmt = parse_format(name)
    assert fmt.symbols == len(fmt.levels) == len(np.unique(fmt.levels)) == COUNTS[name]


def test_values_of_the_four_bit_formats():
    assert parse_format("fp4").levels.tolist() == [-3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3]
    assert parse_format("e2m1").magnitudes.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize(
    "name, smallest, largest",
    [("fp8", 2.0**-16, 57344), ("e5m2", 2.0**-16, 57344), ("e4m3", 2.0**-9, 448), ("e4m3b10", 2.0**-12, 30)],
)
def test_range_of_the_eight_bit_formats(name, smallest, largest):
    fmt = parse_format(name)
    assert (fmt.magnitudes[1], fmt.largest) == (smallest, largest)


@for_each("number, name", list(enumerate(FORMAT_NAMES)))
def test_presets_are_the_formats_numbered_on_the_wire(number, name):
    assert list(PRESETS)[number] == name
    assert PRESETS[name].magnitudes.tolist() == plain_magnitudes(*FORMATS[number])


@given(formats())
def test_levels_of_any_format(fmt):
    special = SPECIALS.index(fmt.special)
    magnitudes = plain_magnitudes(fmt.sign, fmt.exponent, fmt.mantissa, fmt.bias, special)
    assert fmt.magnitudes.tolist() == magnitudes
    assert fmt.levels[fmt.zero_symbol] == 0
    assert np.all(np.diff(fmt.levels) > 0)
    assert np.array_equal(fmt.levels, -fmt.levels[::-1]) if fmt.sign else fmt.levels.tolist() == magnitudes
    assert fmt.levels.astype(np.float32).astype(np.float64).tolist() == fmt.levels.tolist()


@given(formats())
def test_the_name_of_a_format_rebuilds_it(fmt):
    assert parse_format(str(fmt)) == fmt


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_conversion_is_torchs_cast(backend, name, dtype):
    fmt, limit = parse_format(name), torch.finfo(dtype).max
    every_bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    u = torch.cat([every_bf16[every_bf16.isfinite()], telling_inputs(fmt)])
    ours = values(fmt, 1.0, torch.float32)[kernels.to_symbols(u, 1.0, fmt).int()]
    assert torch.equal(ours, u.clamp(-limit, limit).to(dtype).float())


@for_each("name", [*COUNTS, *CUSTOM])
def test_rounds_to_the_nearest_value(backend, name):
    fmt = parse_format(name)
    check_nearest(fmt, telling_inputs(fmt))
    for step in (2.0**-126, 1.7e-30, 3e-4, 1.0, 37.0, 2.0**126):
        check_nearest(fmt, telling_inputs(fmt) * min(step, 1e30 / fmt.largest), step)


@given(fmt=formats(), seed=st.integers(0, 2**32), log_step=st.floats(-60, 60))
def test_rounds_to_the_nearest_value_of_any_format(backend, fmt, seed, log_step):
    check_nearest(fmt, telling_inputs(fmt, seed), 1.0)
    check_nearest(fmt, telling_inputs(fmt, seed), float(np.float32(2.0**log_step)))


@given(fmt=formats(), seed=st.integers(0, 2**64 - 1))
def test_stochastic_rounding_takes_a_neighbour(backend, fmt, seed):
    u = telling_inputs(fmt, 1)
    levels = torch.from_numpy(fmt.levels)
    got = levels[kernels.to_symbols(u, 1.0, fmt, seed).long()]
    inside = u.double().clamp(float(levels[0]), float(levels[-1]))
    above = torch.searchsorted(levels, inside)
    exact = levels[above] == inside
    assert torch.equal(got[exact], inside[exact])
    near = (got == levels[above]) | (got == levels[(above - 1).clamp(min=0)])
    assert bool(near.all())


@pytest.mark.parametrize("name", ["ue4m2b7", "ue2m2b0f"])
def test_unsigned_formats_send_negative_entries_as_zero(backend, name):
    fmt = parse_format(name)
    assert fmt.zero_symbol == 0
    assert kernels.to_symbols(torch.tensor([-0.0, -1e-30, -1.0, -3e38]), 1.0, fmt).tolist() == [0, 0, 0, 0]


def test_minus_zero_is_zero(backend):
    for name in COUNTS:
        fmt = parse_format(name)
        assert kernels.to_symbols(torch.tensor([-0.0, 0.0]), 1.0, fmt).tolist() == [fmt.zero_symbol] * 2


@for_each("name", ["e0m1b0", "e7m0b0", "e1m7b0", "e5m3b0", "ue6m3b0", "e2m1b65", "e2m1b-65", "e1m0b0", "ue1m0b0n"])
def test_formats_that_cannot_be(name):
    with pytest.raises(SpecError, match="no such float format"):
        parse_format(name)


@for_each("name", ["", "fp5", "e4m3b", "e4m3b7x", "E4M3", "e4m3 b7", "ee4m3b7", "e4m3b7 "])
def test_names_that_are_no_formats(name):
    with pytest.raises(SpecError, match=r"unknown format.*allowed: fp4, fp8, e2m1, e4m3, e5m2, e4m3b10"):
        parse_format(name)


@pytest.mark.parametrize("sign", [2, -1])
def test_sign_is_one_bit(sign):
    with pytest.raises(SpecError):
        Format(sign, 2, 1, 1)


@pytest.mark.parametrize("name", ["ue6m2b5f", "ue5m3b5f", "ue2m6b0f"])
def test_at_most_255_symbols(name):
    with pytest.raises(SpecError):
        parse_format(name)


@for_each("name", ["e6m1b-64f", "e6m1b-64", "e6m0b-50", "ue6m2b-64n", "e5m2b-64", "e6m1b64f"])
def test_formats_with_extreme_bias_round_rightly_or_are_refused(backend, name):
    try:
        fmt = parse_format(name)
    except SpecError:
        return
    check_nearest(fmt, telling_inputs(fmt))
