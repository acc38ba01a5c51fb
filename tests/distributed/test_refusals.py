"""What `attach` refuses, in words that say what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import gradwire


@pytest.mark.usefixtures("alone")
def test_a_model_whose_hook_is_taken_is_refused_in_words() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(gradwire.GradwireError, match=r"has a communication hook already \(allreduce_hook\)"):
        gradwire.ddp.attach(model, "co3")
    mixed = DistributedDataParallel(nn.Linear(3, 3), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(gradwire.GradwireError, match=r"without register_comm_hook or mixed_precision="):
        gradwire.ddp.attach(mixed, "co3")
    again = DistributedDataParallel(nn.Linear(3, 3))
    gradwire.ddp.attach(again, "co3").detach()
    gradwire.ddp.attach(again, "bf16").detach()  # our own hook stays, and is used again


@pytest.mark.usefixtures("alone")
def test_the_python_reducer_is_refused_in_words() -> None:
    """The setting itself would change torch for all tests of this process: here is what it makes of DDP and hooks."""
    model = DistributedDataParallel(nn.Linear(3, 3))
    model._use_python_reducer = True
    with pytest.raises(gradwire.GradwireError, match="optimize_ddp"):
        gradwire.ddp.attach(model, "co3")
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(gradwire.GradwireError, match="optimize_ddp"):
        gradwire.ddp.hook(gradwire.ddp.State("co3"), (torch.zeros(3), parameter))
