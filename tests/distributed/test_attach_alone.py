"""A script that was started alone, where no framework wraps the model: `attach` says so and leaves it alone."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwire
from gradwire import GradwireError, SpecError

DGC = "dgc:warmup=0,p=0.1,small=same"


def trained(spec: str | None) -> tuple[dict[str, torch.Tensor], gradwire.Handle | None]:
    """A few steps of SGD with momentum, some of them before the model is attached."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = None
    for step in range(4):
        if step == 2 and spec is not None:
            with pytest.warns(UserWarning, match="there is one process.*attach does nothing"):
                handle = gradwire.ddp.attach(model, spec, optimizer=optimizer)
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return model.state_dict(), handle


@pytest.mark.parametrize("spec", ["co3", DGC, "auto"])
def test_attach_leaves_a_model_alone(spec: str) -> None:
    plain, _ = trained(None)
    found, handle = trained(spec)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in found.items())
    assert isinstance(handle, gradwire.Handle)
    figures = handle.stats()
    assert (figures["steps"], figures["frame_bytes"], figures["ratio"]) == (0, 0, 1.0)
    assert handle.recipe and handle.aggregate
    handle.log_to(lambda *_: pytest.fail("there is nothing to log"), every=1)
    handle.detach()


def test_memories_of_several_ranks_outlive_it(tmp_path: Path) -> None:
    """They go through a run in one process, and are loaded again by as many ranks as there were."""
    of_ranks = [{"steps": 7, "memory": {"0.weight": torch.full((30, 20), float(rank))}} for rank in range(2)]
    saved = {"format": gradwire.checkpoints.rank_states.FORMAT, "ranks": of_ranks}
    _, handle = trained("co3")
    assert handle is not None
    assert handle.all_ranks.state_dict()["ranks"][0]["memory"] == {}
    handle.all_ranks.load_state_dict(copy.deepcopy(saved))
    torch.save(handle.all_ranks.state_dict(), tmp_path / "state.pt")
    [state] = torch.load(tmp_path / "state.pt", weights_only=True)["ranks"]
    assert state["steps"] == 7
    assert torch.equal(state["memory"]["0.weight"], torch.full((30, 20), 0.5))


def test_mistakes_are_found_all_the_same() -> None:
    model = nn.Linear(20, 30)
    with pytest.warns(UserWarning), pytest.raises(SpecError, match="unknown recipe 'co4'"):
        gradwire.ddp.attach(model, "co4")
    with pytest.warns(UserWarning), pytest.raises(SpecError, match="pass optimizer="):
        gradwire.ddp.attach(model, DGC)
    with pytest.warns(UserWarning, match="one process"), pytest.warns(UserWarning, match="matches no parameter"):
        gradwire.ddp.attach(model, {"layers.*": "co3", "*": "none"})


def test_one_of_several_processes_is_told_to_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings(), pytest.raises(GradwireError, match="needs a DistributedDataParallel model"):
        warnings.simplefilter("error")
        gradwire.ddp.attach(nn.Linear(3, 3), "co3")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(GradwireError, match="needs a DistributedDataParallel model, got str"):
        gradwire.ddp.attach("model", "co3")  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_process() -> None:
    with pytest.warns(UserWarning, match="there is one process"):
        gradwire.ddp.attach(nn.Linear(3, 3), "co3")
