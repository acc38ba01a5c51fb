"""Updates and downloads keep the shapes of their tensors, for recipes that make use of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

from flwr.serverapp.strategy import FedAvg

from gradwire import flower
from gradwire.flower.shared import update
from gradwire.frame import headers
from support.flower_apps import adding_client, final, run, start_model
from support.frames_seen import frames_seen

Tensors = dict[str, torch.Tensor]


def trained_a_little() -> tuple[Tensors, Tensors]:
    """A small network of convolutions, and what a client's training has changed of it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images = nn.functional.interpolate(torch.randn(8, 3, 4, 4), size=16, mode="bilinear")
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), torch.arange(8)).backward()
        optimizer.step()
    return before, {name: t - before[name] for name, t in model.state_dict().items()}


def test_a_network_of_convolutions_takes_fewer_bytes_than_with_co3() -> None:
    model, changed = trained_a_little()
    lengths, errors = {}, {}
    for spec in ("co3", "structured"):
        data = update.encode(changed, {}, list(model), spec).data
        with frames_seen() as seen:
            after = update.decode(data, model)
        lengths[spec] = len(data)
        missed = sum(float((after[name] - model[name] - t).square().sum()) for name, t in changed.items())
        errors[spec] = missed / sum(float(t.square().sum()) for t in changed.values())
    shapes = {shape for codec, shape in seen if codec == headers.STRUCTURED}
    assert shapes == {(32, 32, 3, 3), (64, 512)}
    assert lengths["structured"] < 0.5 * lengths["co3"], lengths
    assert errors["structured"] < 0.04, errors


def low_rank(client: int, round_: int, model: Tensors) -> Tensors:
    """Changes as a few examples make them: outer products."""
    random = torch.Generator().manual_seed(1000 * client + round_)
    weight = torch.randn(40, 2, generator=random) @ torch.randn(2, 130, generator=random)
    return {"conv.weight": 0.01 * weight}


def test_both_directions_by_messages() -> None:
    found = {}
    for spec in ("co3", "structured"):
        strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0), download=spec)
        with frames_seen() as seen:
            result, _ = run(strategy, adding_client([flower.compress(spec)], change=low_rank), clients=3, rounds=4)
        stats = strategy.stats()["train"]
        found[spec] = stats["upload_bytes"], stats["download_bytes"]
        assert not stats["rejected"] and torch.isfinite(final(result)["conv.weight"]).all()
    of_weight = [codec for codec, shape in seen if shape == tuple(start_model()["conv.weight"].shape)]
    assert set(of_weight) == {headers.STRUCTURED} and len(of_weight) > 4 * 3, "updates, and steps of the model"
    assert all(ours < theirs for ours, theirs in zip(found["structured"], found["co3"], strict=True)), found
