"""The kernels of structured frames: native code against the reference, bit for bit where a decoder depends on it."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import kernels
from gradwire.convert.tensor_view import cosine_matrix
from support.cases import for_each
from support.helpers import BACKENDS, bits, gradient, use_backend
from support.plain_decoder import plain_cosine

FLOAT_MAX = torch.finfo(torch.float32).max
AXES = [(2,), (3,), (16,), (1, 3), (3, 3), (7, 7), (5, 3), (3, 3, 3), (16, 16), (2, 1, 4), (16, 16, 16)]


def numbers(count: int, seed: int, odd: bool = False) -> torch.Tensor:
    """Numbers of many magnitudes; odd ones also at both ends of fp32, infinite, and zeros of both signs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-20, 20, count)
    if odd:
        extremes = rng.choice([0.0, -0.0, 1e-45, -1e-39, FLOAT_MAX, -FLOAT_MAX, np.inf, -np.inf], count)
        x = np.where(rng.random(count) < 0.2, extremes, x)
    return torch.from_numpy(x.astype(np.float32))


def all_alike(call, *, threads: bool = True) -> list:
    """Call it on every backend, with one thread and with two; all must return the same bytes."""
    found, before = [], torch.get_num_threads()
    try:
        for name in BACKENDS:
            for number in (1, 2) if threads and name != "reference" else (1,):
                torch.set_num_threads(number)
                with use_backend(name):
                    found.append((name, number, call()))
    finally:
        torch.set_num_threads(before)
    assert all(result == found[0][2] for _, _, result in found), [f[:2] for f in found if f[2] != found[0][2]]
    return found[0][2]


# ── what decoders depend on ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("inverse", [False, True])
@for_each("axes", AXES)
@for_each("many", [1, 15, 17, 40])
def test_every_backend_transforms_alike(axes, many, inverse):
    size, matrices = int(np.prod(axes)), [cosine_matrix(n) for n in axes]
    many = many if size < 1000 else min(many, 3)

    def transformed() -> bytes:
        x = numbers(many * size, many)
        kernels.transform_kernels(x, matrices, inverse)
        return bits(x)

    all_alike(transformed)


@for_each("axes", AXES)
def test_a_transform_comes_back(axes):
    """It is orthonormal, along the axes it says: one basis function is one coefficient."""
    x = gradient(6 * int(np.prod(axes)), 1, scale=1.0)
    matrices, y = [cosine_matrix(n) for n in axes], x.clone()
    kernels.transform_kernels(y, matrices, False)
    assert float(y.double().square().sum()) == pytest.approx(float(x.double().square().sum()), rel=1e-5)
    kernels.transform_kernels(y, matrices, True)
    torch.testing.assert_close(y, x, rtol=0, atol=1e-4 * float(x.abs().max()))
    frequency = [min(i + 1, n - 1) for i, n in enumerate(axes)]
    wave = torch.ones(())
    for k, matrix in zip(frequency, matrices, strict=True):
        wave = wave[..., None] * matrix[k]
    wave = wave.reshape(-1).clone()
    kernels.transform_kernels(wave, matrices, False)
    place = int(np.ravel_multi_index(frequency, axes))
    expected = torch.zeros(len(wave))
    expected[place] = 1.0
    torch.testing.assert_close(wave, expected, rtol=0, atol=1e-5)


@st.composite
def views(draw: st.DrawFn) -> dict:
    """Scales of a view and a number of entries, of which the last row may be cut off."""
    shape = draw(
        st.sampled_from([(1, 1, 1), (9, 16, 1), (40, 7, 9), (5, 300, 1), (64, 1, 25), (3, 2, 49), (300, 3, 1)])
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tops = draw(st.tuples(*[st.sampled_from([0, 1, 5, 63])] * 3))
    scales = tuple(rng.integers(0, top + 1, n).astype(np.int16) for n, top in zip(shape, tops, strict=True))
    count = int(np.prod(shape)) - draw(st.integers(0, max(0, shape[1] * shape[2] - 1)))
    return {"scales": scales, "base": draw(st.sampled_from([0, 3, 60, 255])), "count": count,
            "classes": draw(st.sampled_from([1, 2, 7, 32])), "rng": rng}  # fmt: skip


@given(views())
def test_every_backend_splits_and_merges_alike(view):
    """Classes are as the page says; symbols go to their class in order, and come back, in parts too."""
    scales, base, count, classes = view["scales"], view["base"], view["count"], view["classes"]
    sums = (scales[0][:, None, None].astype(int) + scales[1][:, None] + scales[2] - base).ravel()[:count]
    of_entry = np.array([min(classes - 1, max(0, total)) for total in sums])
    symbols = view["rng"].integers(0, 200, count).astype(np.uint8)
    zeros = view["rng"].integers(0, 50, classes).astype(np.uint8)
    counts = kernels.class_counts(scales, base, classes, count)
    assert counts.tolist() == np.bincount(of_entry, minlength=classes).tolist()
    width = len(scales[1]) * len(scales[2])
    middle = len(scales[0]) // 2 * width

    def both() -> tuple[bytes, bytes, bytes]:
        streams = kernels.split_classes(torch.from_numpy(symbols), scales, base, counts)
        positions = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        parts = [
            kernels.merge_classes(streams, positions, zeros, scales, base, first, number)
            for first, number in ((0, min(middle, count)), (middle, count - middle))
            if number > 0
        ]
        return streams.tobytes(), bits(torch.cat(parts)), positions.tobytes()

    streams, merged, _ = all_alike(both, threads=False)
    assert streams == symbols[np.argsort(of_entry, kind="stable")].tobytes()
    assert merged == (symbols + zeros[of_entry]).tobytes()


@given(
    st.sampled_from([(1, 1), (3, 5), (70, 33), (9, 2100), (300, 17)]), st.sampled_from([1, 2, 5, 32]),
    st.integers(0, 2**32), st.sampled_from([1.0, -1.0]), st.booleans(),
)  # fmt: skip
def test_every_backend_predicts_alike(shape, rank, seed, sign, odd):
    rows, width = shape
    first = rows // 3
    left = numbers(rows * rank, seed, odd).reshape(rows, rank)
    right = torch.from_numpy(np.random.default_rng(seed).integers(-127, 128, (rank, width)).astype(np.int8))
    start = numbers((rows - first) * width, seed + 1)

    def predicted() -> bytes:
        x = start.clone()
        kernels.add_prediction(x, (left, right), first, sign)
        return bits(torch.where(x.isnan(), torch.nan, x))  # which NaN it is, is not said

    predicted_bits = all_alike(predicted)
    i, q = rows - 1, width - 1
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        total = np.float32(0)
        for t in range(rank):
            total += np.float32(left[i, t]) * np.float32(right[t, q])
        last = np.float32(start[-1]) + np.float32(sign) * total
    if not np.isnan(last):
        assert predicted_bits[-4:] == last.tobytes()


@given(st.sampled_from([(4, 5, (3, 3)), (7, 3, (5,)), (2, 30, (2, 2, 2)), (60, 33, ()), (1, 70, ())]),
       st.sampled_from([0, 1, 3]), st.integers(0, 2**32), st.booleans(), st.booleans())  # fmt: skip
def test_every_backend_rebuilds_alike(shape, rank, seed, odd, without_symbols):
    """Values, outliers, prediction and transform; no result is infinite, no number at all, or −0."""
    rows, columns, axes = shape
    width, rng = columns * int(np.prod(axes, dtype=int)), np.random.default_rng(seed)
    count = rows * width - (0 if rank or axes else width // 2)
    values = numbers(255, seed, odd).clamp(-FLOAT_MAX, FLOAT_MAX)
    symbols = None if without_symbols else torch.from_numpy(rng.integers(0, 255, count).astype(np.uint8))
    positions = torch.from_numpy(np.flatnonzero(rng.random(count) < 0.05).astype(np.int64))
    apart = numbers(len(positions), seed + 1, odd).clamp(-FLOAT_MAX, FLOAT_MAX)
    prediction = None
    if rank:
        right = torch.from_numpy(rng.integers(-127, 128, (rank, width)).astype(np.int8))
        prediction = numbers(rows * rank, seed + 2, odd).reshape(rows, rank), right
    matrices = [cosine_matrix(n) for n in axes]

    def rebuilt() -> bytes:
        out = torch.full((count,), torch.nan)
        kernels.rebuild(out, symbols, values, (positions, apart), prediction, 0, width, matrices)
        return bits(out)

    result = np.frombuffer(all_alike(rebuilt), dtype=np.float32)
    assert np.isfinite(result).all() and not (np.signbit(result) & (result == 0)).any()


# ── numbers of the transform ──────────────────────────────────────────────────────────────────────


def test_cosines_are_the_nearest_fp32_whatever_the_library_says():
    """Every entry is the fp32 number next to D(k, m), and far from the middle between two.

    Its fp64 value would have to be off by 2⁻⁴⁴ of itself, five hundred times its rounding, before another fp32 were
    next. An entry that is 0 is just that.
    """
    for n in range(1, 17):
        matrix = cosine_matrix(n)
        assert (matrix.shape, matrix.dtype) == ((n, n), torch.float32)
        for k in range(n):
            for m in range(n):
                found, exact = float(matrix[k, m]), plain_cosine(n, k, m)
                if abs(exact) < Decimal("1e-40"):
                    assert found == 0.0
                    continue
                assert found == float(np.float32(float(exact)))
                above = float(np.nextafter(np.float32(found), np.float32(np.inf)))
                below = float(np.nextafter(np.float32(found), np.float32(-np.inf)))
                for other in (above, below):
                    middle = (Fraction(found) + Fraction(other)) / 2
                    distance = abs(Fraction(exact) - middle)
                    assert distance > Fraction(abs(exact)) / 2**44, (n, k, m)


# ── fits ──────────────────────────────────────────────────────────────────────────────────────────


def of_threads(call) -> list[np.ndarray]:
    """Its results on every backend, which have the same bits with any number of threads."""
    results, before = [], torch.get_num_threads()
    try:
        for name in BACKENDS:
            found = []
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                with use_backend(name):
                    found.append([np.asarray(array) for array in call()])
            for other in found[1:]:
                assert all(a.tobytes() == b.tobytes() for a, b in zip(found[0], other, strict=True)), name
            results.append(found[0])
    finally:
        torch.set_num_threads(before)
    return results


@for_each("shape", [(1, 1, 1), (300, 200, 1), (40, 30, 9), (5, 70_000, 1), (4000, 16, 1), (17, 3, 49)])
def test_energies_of_rows_columns_and_coefficients(shape):
    count = int(np.prod(shape)) - (shape[1] // 2 if shape[2] == 1 else 0)
    x = gradient(count, 5, scale=1.0)
    padded = np.zeros(int(np.prod(shape)))
    padded[:count] = x.double().square().numpy()
    exact = padded.reshape(shape)
    for rows, columns, coefficients in of_threads(lambda: kernels.axis_energies(x, shape)):
        np.testing.assert_allclose(rows, exact.sum((1, 2)), rtol=1e-12)
        np.testing.assert_allclose(columns, exact.sum((0, 2)), rtol=1e-12)
        np.testing.assert_allclose(coefficients, exact.sum((0, 1)), rtol=1e-12)


@for_each("shape", [(20, 16), (300, 200), (17, 1000), (2000, 33), (64, 20_000)])
@for_each("directions", [1, 7, 16])
def test_projections(shape, directions):
    """fp32 sums of n products are off by at most n·2⁻²⁴ of the sum of their magnitudes."""
    rows, width = shape
    x = gradient(rows * width, 2, scale=1.0)
    wide, exact = gradient(width * directions, 3).reshape(width, -1), x.reshape(shape).double()
    for (found,) in of_threads(lambda: [kernels.project_rows(x, wide)]):
        assert found.shape == (rows, directions)
        bound = width * 2.0**-24 * (exact.abs() @ wide.double().abs()).numpy()
        assert (np.abs(found - (exact @ wide.double()).numpy()) <= bound + 1e-30).all()


@for_each("shape", [(20, 16), (300, 200), (17, 1000), (2000, 33), (64, 20_000)])
@for_each("directions", [1, 16])
def test_projections_there_and_back(shape, directions):
    """Errors as above, of both sums one after the other."""
    rows, width = shape
    x, wide = gradient(rows * width, 2, scale=1.0), gradient(width * directions, 3).reshape(width, -1)
    exact = x.reshape(shape).double()
    there = (exact @ wide.double()).numpy()
    bound = width * 2.0**-24 * (exact.abs() @ wide.double().abs())
    far = (exact.abs().t() @ (bound + len(exact) * 2.0**-24 * torch.from_numpy(np.abs(there)))).numpy()
    for left, right in of_threads(lambda: kernels.project_both(x, wide)):
        assert (np.abs(left - there) <= bound.numpy() + 1e-30).all()
        assert (np.abs(right - (exact.t() @ torch.from_numpy(there)).numpy()) <= far + 1e-30).all()


@for_each("shape", [(20, 16), (700, 150), (33, 2000)])
@for_each("rank", [1, 5])
def test_what_a_prediction_leaves_is_measured_and_sampled_without_making_it(shape, rank):
    rows, width = shape
    x, rng = numbers(rows * width, 1), np.random.default_rng(rank)
    right = torch.from_numpy(rng.integers(-127, 128, (rank, width)).astype(np.int8))
    prediction = numbers(rows * rank, 2).reshape(rows, rank), right
    rest = x.clone()
    with use_backend("reference"):
        kernels.add_prediction(rest, prediction, 0, -1.0)
    exact = rest.double().square().reshape(shape).numpy()
    for found in of_threads(lambda: kernels.measure_remainder(x, prediction)):
        for energies, expected in zip(found, (exact.sum(1), exact.sum(0), exact.sum()), strict=True):
            np.testing.assert_allclose(energies.squeeze(), expected, rtol=1e-12)
    sample = all_alike(lambda: bits(kernels.sample_remainder(x, prediction)))
    assert sample == bits(kernels.sample_remainder(rest, None))
    assert len(sample) == 4 * (rows * width if rows * width <= 1 << 16 else 16384)


@for_each("period", [98, 64, 2500])
def test_samples_see_all_places_of_a_period_alike(period):
    """Also where it is as long as a stratum, as 98 is here: each is drawn about as often as any other."""
    x = (torch.arange(1024 * 98) % period).float()
    times = torch.bincount(kernels.sample_remainder(x, None).long(), minlength=period).double()
    mean = 16384 / period
    assert len(times) == period and abs(float(times[0]) / mean - 1) < 5 / math.sqrt(mean)
    assert float((times / mean - 1).square().mean()) < 16 / mean


@given(views(), st.sampled_from([1, 7, 31, 127]), st.sampled_from([0, 3, 10_000]), st.booleans())
def test_every_backend_quantizes_by_class_alike(view, largest, capacity, odd):
    """Symbols, streams, counts and outliers are those of one step after the other; so is what is rebuilt of them."""
    scales, base, count, classes = view["scales"], view["base"], view["count"], view["classes"]
    x = numbers(count, largest, odd)
    x = torch.where(x.isfinite(), x, 1.0)
    values = torch.arange(-largest, largest + 1) * 0.25

    def quantized() -> tuple[bytes, ...]:
        symbols, streams = torch.empty(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
        outliers, counts = kernels.quantize_classes(
            x, None, 0.25, 0.4, values, capacity, scales, base, classes, symbols, streams
        )
        return bits(symbols), bits(streams), counts.tobytes(), *map(bits, outliers)

    symbols, streams, counts, *_ = all_alike(quantized)
    expected = kernels.grid_quantize(x, None, None, 0.0, 0.25, 0.4, values, capacity)[0]
    totals = np.frombuffer(counts, dtype=np.int64).reshape(classes, -1).sum(1)
    assert symbols == bits(expected)
    assert streams == kernels.split_classes(expected, scales, base, totals).tobytes()


@given(st.sampled_from([(40, 70, ()), (300, 33, ()), (12, 10, (3, 3)), (700, 40, (5,)), (600, 700, ())]),
       st.sampled_from([0, 1, 4]), st.sampled_from([7, 15, 31, 127]), st.sampled_from([0, 3, 10_000]), st.booleans(),
       st.integers(0, 2**32))  # fmt: skip
def test_every_backend_keeps_what_symbols_leave_out_alike(shape, rank, largest, capacity, in_place, seed):
    """In the pass that quantizes: the source, or x itself, less what a decoder makes of symbols and outliers."""
    rows, columns, axes = shape
    width, rng = columns * int(np.prod(axes, dtype=int)), np.random.default_rng(seed)
    count, matrices = rows * width, [cosine_matrix(n) for n in axes]
    x, scales = gradient(count, seed % 1000, scale=1.0), tuple(rng.integers(0, 4, n) for n in (rows, columns, 1))
    scales = *(s.astype(np.int16) for s in scales[:2]), np.zeros(width // columns, dtype=np.int16)
    values = (torch.arange(-largest, largest + 1) + torch.sign(torch.arange(-largest, largest + 1)) / 8) * 0.125
    prediction = None
    if rank:
        right = torch.from_numpy(rng.integers(-127, 128, (rank, width)).astype(np.int8))
        prediction = gradient(rows * rank, 1, scale=0.01).reshape(rows, rank), right
    memory = gradient(count, 7)

    def kept() -> tuple[bytes, ...]:
        symbols, streams = torch.empty(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
        before = memory.clone()
        out = before if in_place else torch.empty(count)
        source = (x, before, 0.9) if axes else None
        outliers, _ = kernels.quantize_classes(
            x, prediction, 0.125, 0.4, values, capacity, scales, 3, 5, symbols, streams,
            kernels.Kept(out, source, matrices, 0.125),
        )  # fmt: skip
        return bits(symbols), bits(streams), *map(bits, outliers), bits(out)

    symbols, _, positions, multiples, left = all_alike(kept)
    rest = x.clone()
    if rank:
        kernels.add_prediction(rest, prediction, 0, -1.0)
    expected, outliers = kernels.grid_quantize(rest, None, None, 0.0, 0.125, 0.4, values, capacity)
    assert (symbols, positions, multiples) == (bits(expected), *map(bits, outliers))
    apart = outliers[0], (outliers[1] + outliers[1].sign() / 8) * 0.125
    sent = torch.empty(count)
    kernels.rebuild(sent, expected, values, apart, prediction, 0, width, matrices)
    assert left == bits((kernels.compensate(x, memory, 0.9) if axes else x) - sent)


@for_each("axes", [(), (3,), (2, 2), (3, 3), (4, 4), (5, 5)])
@for_each("rank", [0, 3])
@for_each("how", [(1.0, False), (1.0, True), (0.25, True)])
def test_values_by_class_are_those_of_rows_in_order(axes, rank, how):
    """Of a whole tensor in one call, on every instruction set: what `rebuild` makes of merged symbols."""
    (weight, accumulate), kernel = how, int(np.prod(axes)) if axes else 1
    shape, matrices, rng = (700, 40, kernel), [cosine_matrix(n) for n in axes], np.random.default_rng(0)
    count = int(np.prod(shape))
    scales = tuple(rng.integers(0, 4, n).astype(np.int16) for n in shape)
    symbols, zeros = rng.integers(0, 9, count).astype(np.uint8), np.zeros(6, dtype=np.uint8)
    streams = kernels.split_classes(torch.from_numpy(symbols), scales, 2, kernels.class_counts(scales, 2, 6, count))
    values, positions = torch.linspace(-1, 1, 9), torch.tensor([0, 77, count - 1])
    outliers = positions, torch.tensor([5.0, -6.0, 7.0])
    factors = (
        torch.from_numpy(rng.integers(-127, 128, (shape[0], rank)).astype(np.int8)),
        torch.from_numpy(rng.integers(-127, 128, (rank, shape[1] * kernel)).astype(np.int8)),
        (0.5, 2.0**-7, 3e-5)[:rank],
    )
    before = gradient(count, 3)
    prediction = (factors[0].float() * torch.tensor(factors[2]), factors[1]) if rank else None
    with use_backend("reference"):
        expected = torch.empty(count)
        kernels.rebuild(
            expected, torch.from_numpy(symbols), values, outliers, prediction, 0, shape[1] * kernel, matrices
        )
    expected = before + expected * weight if accumulate else expected * weight
    threads = torch.get_num_threads()
    try:
        for name in BACKENDS:
            for number in (1, 2):
                torch.set_num_threads(number)
                out = before.clone()
                with use_backend(name):
                    done = kernels.rebuild_classes(
                        out, streams, zeros, scales, 2, values, outliers, factors, matrices, weight, accumulate
                    )
                assert done == (name != "reference")
                assert not done or bits(out) == bits(expected), (name, number)
    finally:
        torch.set_num_threads(threads)
