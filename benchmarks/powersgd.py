"""PowerSGD (arXiv 1905.13727) of several workers in one process: what trainings with frames are compared with.

With error feedback and warm start; matrices, and convolutions as matrices, alone. Its factors count in fp32, as
PyTorch's hook sends them.
"""

from __future__ import annotations

import torch


class PowerSGD:
    """Two products with a low rank, each averaged; the rest stays in the error memory of each worker."""

    def __init__(self, rank: int, workers: int):
        self.rank, self.bytes = rank, 0
        self.errors: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]
        self.bases: dict[str, torch.Tensor] = {}

    def average(self, gradients: list[dict[str, torch.Tensor]], step: int = 0) -> dict[str, torch.Tensor]:
        mean, workers = {}, len(gradients)
        for name, first in gradients[0].items():
            rows, columns = len(first), first.numel() // max(1, len(first))
            if first.dim() < 2 or self.rank * (rows + columns) >= first.numel():
                mean[name] = sum(g[name] for g in gradients) / workers
                self.bytes += 4 * first.numel() * workers
                continue
            corrected = [g[name].flatten(1) + self.errors[w].get(name, 0) for w, g in enumerate(gradients)]
            basis = self.bases.get(name)
            if basis is None:
                basis = torch.randn(columns, self.rank, generator=torch.Generator().manual_seed(0)).to(first.device)
            left = torch.linalg.qr(sum(u @ basis for u in corrected) / workers)[0]
            basis = self.bases[name] = sum(u.t() @ left for u in corrected) / workers
            product = left @ basis.t()
            for w, u in enumerate(corrected):
                self.errors[w][name] = u - product
            mean[name] = product.view_as(first)
            self.bytes += 4 * self.rank * (rows + columns) * workers
        return mean
