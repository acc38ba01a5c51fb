"""One byte budget for a whole model: `allocate` gives every layer the rate at which a bit buys the same everywhere.

The least total squared error Σ D_i at Σ R_i = R has the same slope −dD_i/dR_i = λ in all layers that get any bits
(Shoham and Gersho 1988): were it smaller in one than in another, moving a bit would help. So:
1. measure rate and distortion of each layer on a ladder of steps, and keep the lower convex hull;
2. along it, the rate at a given slope; bisect the slope until the bytes add up to the budget;
3. write real frames, and correct for what they really take.
Small tensors are one layer, because in training they share frames.
"""

from __future__ import annotations

import glob
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch

from gradwire import kernels
from gradwire.catalogue.parse_recipe import recipe
from gradwire.catalogue.spec_by_name import SMALL
from gradwire.codecs import CONVERTIBLE, Codec
from gradwire.convert.grid_fit import SIDE
from gradwire.convert.grid_search import SHIFTS, Curve
from gradwire.convert.minifloat import round_step
from gradwire.correct.complex_pairs import as_reals
from gradwire.errors import GradwireError

LEAST_RATE, MOST_RATE = 0.001, 8.0
STRIDE = 1 / 8  # of log₂ of the step
ENOUGH = 0.975  # of the budget
REACHED = 0.8  # of a rate, by gradients like those that follow


@dataclass
class Layer:
    """Tensors that share a frame, and how much one more bit lowers their squared error."""

    names: list[str]
    tensor: torch.Tensor
    segments: tuple[int, ...]
    slopes: np.ndarray  # −dD/dR, descending
    rates: np.ndarray  # bits an entry where the curve has these slopes, ascending

    def rate(self, slope: float) -> float:
        """Return the bits an entry at which one more bit lowers the squared error by `slope`."""
        if not len(self.slopes) or slope >= self.slopes[0]:
            return LEAST_RATE
        if slope < self.slopes[-1]:
            return MOST_RATE
        bits = float(np.interp(-math.log(slope), -np.log(self.slopes), self.rates))
        return min(max(bits + 8 * SIDE / self.tensor.numel(), LEAST_RATE), MOST_RATE)

    def frame_bytes(self, codec: Codec) -> int:
        """Encode the layer with this codec and return the length of the frame in bytes."""
        out = torch.empty(codec.max_frame_bytes(self.tensor) + 12 * len(self.segments), dtype=torch.uint8, device="cpu")
        return codec.encode_into(self.tensor, out, segments=self.segments)


def allocate(
    gradients: Mapping[str, torch.Tensor], budget: int, *, floor: float = LEAST_RATE, decay: float = 0.9
) -> dict[str, str]:
    """A spec for `ddp.attach` with which the frames of these gradients take at most `budget` bytes, and nearly that.

    The gradients are by parameter name, as `{n: p.grad for n, p in model.named_parameters()}` after a backward pass
    that nothing has compressed: decoded means have few different values, which look cheap.
    Layers in which a bit buys little may get next to nothing; `floor` is the rate, in bits an entry, of which none
    gets less. What is left of the budget beyond a rate of 8 is not used.
    """
    _check_arguments(gradients, budget, floor, decay)
    if not LEAST_RATE <= floor <= MOST_RATE:
        raise GradwireError(f"floor is a rate from {LEAST_RATE} to {MOST_RATE:g} bits an entry, not {floor}")
    if gradients and all(name.startswith("module.") for name in gradients):  # as DDP's own named_parameters have it
        gradients = {name.removeprefix("module."): gradient for name, gradient in gradients.items()}
    layers = _layers(gradients)
    chosen, lengths = [floor] * len(layers), [layer.frame_bytes(_codec(floor, decay)) for layer in layers]
    if budget < sum(lengths):
        raise GradwireError(f"a budget of {budget} bytes is impossible: these gradients take at least {sum(lengths)}")
    low, high = -400.0, 400.0  # of ln λ: too cheap, too dear
    for _ in range(40):
        middle = (low + high) / 2
        rates = [max(floor, float(f"{layer.rate(math.exp(middle)):.4g}")) for layer in layers]
        found = [layer.frame_bytes(_codec(rate, decay)) for layer, rate in zip(layers, rates, strict=True)]
        if sum(found) <= budget:
            high, chosen, lengths = middle, rates, found
            if sum(found) >= ENOUGH * budget or all(
                r >= MOST_RATE or not len(x.slopes) for x, r in zip(layers, rates, strict=True)
            ):
                break
        else:
            low = middle
    _warn_of_few_values(layers, chosen, lengths)
    return {
        glob.escape(name): str(recipe(f"ecq:rate={rate},decay={decay}"))
        for layer, rate in zip(layers, chosen, strict=True)
        for name in layer.names
    }


def _warn_of_few_values(layers: list[Layer], rates: list[float], lengths: list[int]) -> None:
    """Warn where a rate is not reached, so that gradients with more different values take more than the budget."""
    for layer, rate, length in zip(layers, rates, lengths, strict=True):
        bits = 8 * length / layer.tensor.numel()
        if len(layer.slopes) and bits < REACHED * rate:
            warnings.warn(
                f"the gradient of {layer.names[0]!r} has so few different values that it takes {bits:.2g} bits an "
                f"entry at a rate of {rate:g}, and others will take more than the budget: if it is a decoded mean, "
                "measure gradients that nothing has compressed, of a backward pass before attach or under no_sync()",
                stacklevel=3,
            )
            return


def _check_arguments(gradients: object, budget: object, floor: object, decay: object) -> None:
    if not isinstance(gradients, Mapping):
        raise GradwireError(
            f"allocate takes gradients by parameter name, not {type(gradients).__name__}: pass "
            "{n: p.grad for n, p in model.named_parameters() if p.requires_grad} after a backward pass"
        )
    unnamed = [name for name in gradients if not isinstance(name, str)]
    if unnamed:
        raise GradwireError(f"gradients are by the names of their parameters, which are strings, not {unnamed[0]!r}")
    for argument, value, example in (
        ("budget", budget, "a number of bytes, such as 5000"),
        ("floor", floor, "a rate in bits an entry, such as 0.1"),
        ("decay", decay, "a number from 0 to 1, such as 0.9"),
    ):
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise GradwireError(f"{argument} is {example}, not {value!r}")


def _codec(rate: float, decay: float) -> Codec:
    return recipe(f"ecq:rate={rate},decay={decay}").codec


def _layers(gradients: Mapping[str, torch.Tensor]) -> list[Layer]:
    small: dict[str, torch.Tensor] = {}
    layers = []
    for name, gradient in gradients.items():
        if gradient is None:
            raise GradwireError(f"{name!r} has no gradient: run a backward pass first, and leave out what is frozen")
        if not isinstance(gradient, torch.Tensor) or gradient.dtype.to_real() not in CONVERTIBLE:
            raise GradwireError(f"the gradient of {name!r} is not a tensor of a float dtype")
        if gradient.layout != torch.strided:
            raise GradwireError(f"the gradient of {name!r} is sparse: give it the recipe 'none', and leave it out here")
        entries = as_reals(gradient.detach())
        if not math.isfinite(kernels.absmax(entries.reshape(-1).float())):
            raise GradwireError(f"the gradient of {name!r} holds a NaN or an infinity: take that of another step")
        if entries.numel() < SMALL:
            small[name] = entries.reshape(-1).float().cpu()
        else:
            layers.append(_layer([name], entries, ()))
    if any(part.numel() for part in small.values()):
        layers.append(_layer(list(small), torch.cat(list(small.values())), tuple(t.numel() for t in small.values())))
    elif layers:  # parameters without entries, for which any recipe will do
        layers[0].names.extend(small)
    if not layers:
        raise GradwireError("there are no gradients to share the budget")
    return layers


def _layer(names: list[str], tensor: torch.Tensor, segments: tuple[int, ...]) -> Layer:
    segments = tuple(n for n in segments if n)
    flat = tensor.reshape(-1).float().cpu().contiguous()
    scale = 1.0
    if segments:  # each has its own step, in units of its root mean square
        norms = [part.double().square().mean().sqrt().float() for part in flat.split_with_sizes(list(segments))]
        scale = float(flat.double().square().mean())
        flat = torch.cat(
            [
                part / norm if norm else part
                for part, norm in zip(flat.split_with_sizes(list(segments)), norms, strict=True)
            ]
        )
    sample = kernels.sample(flat, None, 0.0).numpy()
    points = sorted(_points(Curve(sample))) if sample.any() else []
    hull = _hull([(0.0, float((sample.astype(np.float64) ** 2).sum())), *points])
    rates, errors = hull[:, 0] / len(sample), hull[:, 1] * (scale / len(sample) * flat.numel())
    slopes = -np.diff(errors) / (np.diff(rates) * flat.numel())
    return Layer(names, tensor, segments, slopes, (rates[1:] + rates[:-1]) / 2)


def _points(curve: Curve) -> Iterator[tuple[float, float]]:
    """(bits, squared error) of many grids."""
    log_step = math.log2(2 * curve.top)
    while log_step > -126:
        log_step -= STRIDE
        grids = [curve.measure(round_step(2.0 ** min(log_step, 126.0)), shift) for shift in SHIFTS]
        found = [grid for grid in grids if grid is not None]
        yield from ((grid.bits, grid.error) for grid in found)
        if not found or min(grid.bits for grid in found) > MOST_RATE * curve.count:
            return
        if found[0].error <= 1e-7 * curve.energy:
            return


def _hull(points: list[tuple[float, float]]) -> np.ndarray:
    """The lower convex hull of points sorted by rate, as far as the error falls."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        if hull and y >= hull[-1][1]:
            continue
        while hull and x <= hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return np.array(hull)
