"""Top-k: the k largest magnitudes with their values, as fp32, fp16, bf16, or converted as CO3 does (`minifloat`).

With momentum correction, factor masking, clipping and a warm-up around it, this is DGC (arXiv 1712.01887).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import torch

from gradwire import kernels
from gradwire.convert.conversion import Conversion, in_host_memory, limit_to
from gradwire.convert.minifloat import Minifloat
from gradwire.convert.sparse import Sparse
from gradwire.convert.sparse_values import BF16, DTYPES, FP16, FP32, SMALL_FLOATS, received
from gradwire.small_float_formats import parse_format

CASTS = {"fp32": FP32, "fp16": FP16, "bf16": BF16}


class TopK(Sparse):
    """The largest magnitudes with their values: "fp32", "fp16", "bf16", or a small float format."""

    def __init__(
        self, p: float = 0.01, k: int | None = None, values: str = "bf16", positions: str = "auto",
        threshold: float | None = None,
    ):  # fmt: skip
        super().__init__(p, k, positions, threshold)
        self.cast = CASTS.get(values)
        self.small = None if values in CASTS else Minifloat(parse_format(values))

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        chosen, values = self.select(conversion)
        if self.cast is not None:
            cast = limit_to(values, DTYPES[self.cast])
            raw, sent = in_host_memory(cast.view(torch.uint8)).tobytes(), received(cast, conversion.dtype)
            return self.write(conversion, out, chosen, self.cast, raw, sent)
        assert self.small is not None
        if not chosen.numel():
            return self.write(conversion, out, chosen, SMALL_FLOATS, b"", None)
        # The values are converted like a tensor of their own, whose error memory then holds what was not sent.
        left, coded = torch.empty_like(values), torch.empty(5 * values.numel() + 512, dtype=torch.uint8, device="cpu")
        part = Conversion(values, values.to(conversion.dtype), None, left)
        length = self.small.encode(part, coded)
        raw = coded[:length].numpy().tobytes()
        if conversion.memory_out is not None:
            kernels.replace(conversion.memory_out, chosen, left)
        return self.write(conversion, out, chosen, SMALL_FLOATS, raw, None)


def whole_model_threshold(tensors: Iterable[torch.Tensor], p: float) -> float:
    """Return the ⌈p·d⌉-th largest magnitude over several tensors, d entries in all, for a converter's threshold.

    If fewer entries than that are not zero, the result is 0, and all of these are sent. The result is exact, and no
    more than the entries in question are kept in memory.
    """
    flat = [t.detach().reshape(-1).float().cpu() for t in tensors if t.numel()]
    count = math.ceil(Fraction(repr(p)) * sum(t.numel() for t in flat))
    kept, low = torch.empty(0, dtype=torch.float32, device="cpu"), 1
    for tensor in flat:
        done, _, values = kernels.select(tensor, None, None, 1.0, min(count, tensor.numel()), low)
        if done < tensor.numel():
            raise ValueError("a tensor holds a NaN or an infinity: there is no threshold")
        kept = torch.cat([kept, values.abs()])
        if kept.numel() >= count:
            kept = torch.topk(kept, count).values
            low = int(kept[-1:].view(torch.int32))  # smaller entries of the next tensors do not matter
    return float(kept[-1]) if count and kept.numel() == count else 0.0
