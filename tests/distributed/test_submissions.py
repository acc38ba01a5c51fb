"""How tensors that are submitted one after the other become messages."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from gradwire.aggregate.messages.known_plans import KnownPlans
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.submissions import ENOUGH, ENOUGH_TO_BEGIN, Submissions


def named(name: str, entries: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.empty(1).expand(entries))]  # takes no memory, whatever its size


def fresh(long: bool) -> Submissions:
    recipes = ModelRecipes("co3")
    found = Submissions(recipes, KnownPlans(recipes))
    if long:
        found.use_long_messages()
    return found


def test_short_messages_go_at_once() -> None:
    waiting = fresh(long=False)
    waiting.add(0, named("a", 10), [], False)
    assert waiting.suffice
    ((key, parts, _),) = waiting.take()
    assert key == ((0,), 0) and [part.name for part in parts] == ["a"]
    assert waiting.take() == []


def test_long_messages_gather_several_submissions() -> None:
    waiting = fresh(long=True)
    sizes = [ENOUGH_TO_BEGIN, ENOUGH // 3, ENOUGH // 3, ENOUGH // 3, ENOUGH // 3, 5, 7]
    sent = []
    for step in range(2):  # the second step as the first
        sent.append([])
        for key, size in enumerate(sizes):
            waiting.add(key, named(f"p{key}", size), [], False)
            if waiting.suffice:
                sent[step] += [[part.name for part in parts] for _, parts, _ in waiting.take()]
        sent[step] += [[part.name for part in parts] for _, parts, _ in waiting.take()]
        waiting.end_step()
    assert sent == [[["p0"], ["p1", "p2", "p3", "p4"], ["p5", "p6"]]] * 2


def test_what_is_cleared_is_not_sent() -> None:
    waiting = fresh(long=True)
    waiting.add(0, named("a", 10), [], False)
    waiting.clear()
    assert waiting.take() == []


def test_lasting_tensors_are_cut_once() -> None:
    waiting, tensor = fresh(long=False), torch.zeros(10)
    lists = []
    for place in (tensor, tensor, tensor, torch.zeros(10)):
        waiting.add(0, [("a", place)], [], True)
        lists.append(waiting.take()[0][1])
        waiting.end_step()
    assert lists[1] is lists[2] and lists[3] is not lists[2]
    waiting.end_step()
    assert not waiting._cut


def test_nothing_holds_the_buckets_of_the_first_step() -> None:
    """DDP lets go of them before the second: kept until its end, they were 4 bytes a parameter of peak memory."""
    waiting, memory = fresh(long=False), np.zeros(10, dtype=np.float32)
    bucket = weakref.ref(memory)
    waiting.add(0, [("a", torch.from_numpy(memory))], [], True)
    waiting.take()
    waiting.end_step()
    del memory
    assert bucket() is None
