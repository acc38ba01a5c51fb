"""Callbacks of frameworks in a program that was started alone: they say so, and the training goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from gradwire.errors import GradwireError

pytestmark = pytest.mark.thorough  # the frameworks take half a minute to import


def lightning_starts(processes: int) -> Any:
    pytest.importorskip("lightning")
    from gradwire.integrations.lightning import Compress

    compress = Compress("co3")
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=nn.Linear(2, 2)), world_size=processes)
    compress.on_train_start(trainer, None)
    assert compress.state_dict() == {}
    return compress


def trainer_starts(processes: int) -> Any:
    pytest.importorskip("transformers")
    from gradwire.integrations.transformers import Compress

    compress = Compress(SimpleNamespace(model_wrapped=nn.Linear(2, 2)), "co3")
    args = SimpleNamespace(world_size=processes, save_only_model=False)
    compress.on_train_begin(args, SimpleNamespace(global_step=0), None)
    compress.on_save(args, SimpleNamespace(global_step=1), None)
    return compress


@pytest.mark.parametrize("start", [lightning_starts, trainer_starts])
def test_one_process_is_told_and_left_alone(start: Any) -> None:
    with pytest.warns(UserWarning, match="there is one process"):
        assert start(1).handle is None
    with pytest.raises(GradwireError, match="leave the callback out"):
        start(2)
