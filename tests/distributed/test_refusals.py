"""What `attach` refuses, in words that say what to do."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire


@pytest.mark.usefixtures("alone")
def test_a_model_whose_hook_is_taken_is_refused_in_words() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(gradwire.GradwireError, match=r"has a communication hook already \(allreduce_hook\)"):
        gradwire.ddp.attach(model, "co3")
    again = DistributedDataParallel(nn.Linear(3, 3))
    gradwire.ddp.attach(again, "co3").detach()
    gradwire.ddp.attach(again, "bf16").detach()  # our own hook stays, and is used again
