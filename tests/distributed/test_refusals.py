"""What `attach` refuses, in words that say what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import gradwire
from support.cases import for_each


@pytest.mark.usefixtures("alone")
def test_a_model_whose_hook_is_taken_is_refused_in_words() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(gradwire.GradwireError, match=r"has a communication hook already \(allreduce_hook\)"):
        gradwire.ddp.attach(model, "co3")
    if torch.version.cuda is None or torch.cuda.is_available():  # a torch with CUDA asks for a stream of a GPU
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


@for_each(
    "option",
    [{"aggregate": None}, {"aggregate": 5}, {"memory": torch.bfloat16}, {"memory": ["bf16"]}, {"timeout": float("inf")},
     {"timeout": 1e30}, {"timeout": "60"}, {"timeout": float("nan")}],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("alone")
def test_options_of_the_wrong_kind_are_refused_in_words(option: dict[str, object]) -> None:
    [name] = option
    with pytest.raises(gradwire.SpecError, match=f"aggregation|{name}"):
        gradwire.ddp.attach(DistributedDataParallel(nn.Linear(3, 3)), "co3", **option)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_the_longest_timeout_is_taken() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    handle = gradwire.ddp.attach(model, "co3", timeout=10**9)
    model(torch.ones(2, 3)).sum().backward()
    handle.detach()


@pytest.mark.parametrize("group", [5, "gloo", dist.GroupMember.NON_GROUP_MEMBER], ids=["5", "gloo", "not in the group"])
@pytest.mark.usefixtures("alone")
def test_what_is_no_process_group_is_refused_in_words(group: object) -> None:
    """torch gives the last one to ranks that are not in a new group."""
    with pytest.raises(gradwire.AggregateError, match="no process group that this rank is in"):
        gradwire.DataParallel(nn.Linear(3, 3), "co3", process_group=group)  # type: ignore[arg-type]


def test_a_state_of_what_is_no_model_is_refused_in_words() -> None:
    with pytest.raises(gradwire.GradwireError, match=r"model must be a torch\.nn\.Module, got list"):
        gradwire.ddp.State("co3", [nn.Linear(3, 3)])  # type: ignore[arg-type]


def test_patterns_of_names_without_the_model_are_named() -> None:
    """Parameters have numbers then, so that a recipe by name would be used for none of them."""
    with pytest.warns(
        UserWarning, match=r"'layers\.\*' matches no parameter .*give the model, State\(spec, model\)"
    ) as said:
        gradwire.ddp.State({"layers.*": "co3", "parameter0": "fp16", "*": "none"})
    assert len(said) == 1
