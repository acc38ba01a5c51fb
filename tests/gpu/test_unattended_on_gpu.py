"""Messages that nobody waits for, on a real GPU: the same bits as if everything were waited for.

The host runs far ahead of a GPU that is made to sleep in every step, so that whatever is used too early, or written
over too soon, shows.
"""

from __future__ import annotations

import torch
from test_auto_one_rank import one_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, ASLEEP = 12, 20_000_000  # cycles: some ten milliseconds


class Wide(nn.Module):
    """Several buckets, two of which are alike, with large and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self.last = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.last(x)


def trained(spec: str, attended: bool, bad_step: int = -1) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int]:
    """Return parameters and memories after some steps, and how many steps nobody has waited for."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Wide().cuda(), bucket_cap_mb=1, find_unused_parameters=attended)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = gradwire.ddp.attach(model, spec, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(64, 512, generator=generator).cuda(), torch.randint(10, (64,), generator=generator).cuda())
        for _ in range(STEPS)
    ]
    unattended = 0
    for step, (x, y) in enumerate(batches):
        torch.cuda._sleep(ASLEEP)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (loss * torch.inf if step == bad_step else loss).backward()
        if attended:
            torch.cuda.synchronize()
        unattended += not handle.gradients.exchange._is_settled
        if step != bad_step:  # as a GradScaler would skip it
            optimizer.step()
    memory = handle.state_dict()["memory"]
    handle.detach()
    return [p.detach().cpu() for p in model.parameters()], {name: m.cpu() for name, m in memory.items()}, unattended


def check(spec: str, bad_step: int = -1) -> None:
    expected, memory, none = trained(spec, True, bad_step)
    found, kept, some = trained(spec, False, bad_step)
    assert none == 0 and some >= STEPS - 4, (none, some)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), spec
    assert all(torch.equal(kept[name], memory[name]) for name in memory), spec
    assert all(bool(m.isfinite().all()) for m in kept.values())


def test_the_same_bits_as_attended() -> None:
    with one_rank():
        for spec in ("co3", "ecq", "topk:p=0.01", "sbc:p=0.01", "stc:p=0.01,mask=off"):
            check(spec)


def test_a_step_that_is_not_finite() -> None:
    with one_rank():
        check("co3", bad_step=7)
        check("sbc:p=0.01", bad_step=8)
