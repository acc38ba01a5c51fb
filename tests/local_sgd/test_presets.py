"""What presets of LocalSGD are made of: parts of a budget, `ahead`, `flush`, `buffers` and a warm-up of n.

Every scenario runs on three real ranks, and checks itself on each.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import gradwire
from gradwire import AggregateError, LocalSGD, SpecError
from gradwire.aggregate.transport.message_prefix import PREFIX
from gradwire.catalogue.parse_recipe import recipe
from gradwire.catalogue.recipe import MOST, budget_parts
from gradwire.convert.sparse import sent_positions
from gradwire.frame import headers
from support.cases import for_each
from support.rank_pool import WORLD, RankPool, Scenario, named
from support.ranks import check_alike, check_raises, digest, gathered

SPARSE = ["sbc", "stc", "topk", "m22", "dgc", "stc2", "sbc1", "sbc2", "sbc3"]
LOCAL = [
    "sbc1",
    "sbc2",
    "sbc3:sync_every=5",
    "stc2",
    "sbc1-paper",
    "sbc2-paper",
    "diloco:sync_every=3",
    "topk:scope=model",
]


# ── parts of the budget ──


@pytest.mark.parametrize("power", ["0", "0.3", "0.5", "1.5"])
def test_parts_of_the_budget_add_up(power: str) -> None:
    chosen = recipe(f"topk:p=0.01,power={power},small=same")
    sizes = {"a": 5000, "b": 40_000, "c": 300_000, "none": 0}
    parts = budget_parts(sizes, dict.fromkeys(sizes, chosen))
    assert set(parts) == {"a", "b", "c"}
    counts = {name: chosen.at(0, parts[name]).converter.count(d) for name, d in sizes.items() if d}
    assert sum(counts.values()) == pytest.approx(0.01 * sum(sizes.values()), rel=0.01)
    assert counts["c"] / counts["a"] == pytest.approx((300_000 / 5000) ** float(power), rel=0.15)


def test_no_part_is_more_than_half_of_a_tensor() -> None:
    chosen = recipe("topk:p=0.1,power=0,small=same")
    parts = budget_parts({"a": 10, "b": 10_000}, {"a": chosen, "b": chosen})
    assert chosen.at(0, parts["a"]).converter.p == MOST
    assert budget_parts({"a": 10, "b": 9}, dict.fromkeys("ab", recipe("topk"))) == {}, "power=1 is p everywhere"


def test_warm_up_of_a_part() -> None:
    chosen = recipe("topk:p=0.01,warmup=100,start=0.16,power=0.5")
    found = [chosen.at(step, 2.0).converter.p for step in (0, 50, 99, 100, 1000)]
    assert found == pytest.approx([0.32, 0.08, 2 * 0.16**0.01 * 0.01**0.99, 0.02, 0.02], rel=0.005)


# ── specs ──


@for_each(
    ("spec", "reason"),
    [
        ("sbc:ahead=1,decay=0", "need a decay above 0"),
        ("sbc:flush=0.1,decay=0", "need a decay above 0"),
        ("sbc:scope=model,power=0.5", "power, their parts of a budget, must be 1"),
        ("topk:k=3,warmup=5", "warmup and power need p"),
        ("topk:k=3,power=0.5", "warmup and power need p"),
        ("sbc2:warmup_sync=11", "above sync_every=10"),
        ("dgc:start=0.0001", "below p=0.001"),
        ("sbc:flush=1", "above 0 and below 1"),
        ("sbc:ahead=1.5", "from 0 to 1"),
        ("sbc:buffers=0", "from 1"),
        ("sbc:ahed=1", "ahead"),
    ],
)
def test_what_does_not_go_together(spec: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        recipe(spec)


@for_each("spec", [*SPARSE, "sbc2:sync_every=3", "dgc:p=0.4", "topk:p=0.6,warmup=9"])
def test_every_recipe_is_rebuilt_by_its_own_spec(spec: str) -> None:
    """Also where a default of the warm-up gave way: it never begins below p, nor exchanges less often than later."""
    chosen = recipe(spec)
    assert recipe(str(chosen)).values == chosen.values
    assert chosen.values["start"] >= chosen.values["p"]
    assert chosen.values["warmup_sync"] <= chosen.values["sync_every"]


def test_a_budget_of_the_whole_model_needs_the_model() -> None:
    with pytest.raises(SpecError, match="needs the model"):
        gradwire.ddp.State("topk:power=0.5")


def test_warm_up_of_n() -> None:
    schedule = recipe("sbc2:warmup=20,warmup_sync=5").sync_schedule
    assert [schedule(step) for step in (1, 20, 21, 1000)] == [5, 5, 10, 10]
    for spec in ("sbc2:warmup=0", "sbc2:warmup_sync=10", "sbc:sync_every=10,warmup=20"):
        assert recipe(spec).sync_schedule == 10


# ── on three ranks ──


class Small(nn.Module):
    """One tensor that is selected from, small ones, and statistics that change in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 256), nn.BatchNorm1d(256), nn.Linear(256, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def make(spec: object, dtype: torch.dtype = torch.float32, **options: object) -> LocalSGD:
    torch.manual_seed(0)
    model = Small().to(dtype)
    return LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), spec, **options)


def step(handle: LocalSGD, rank: int, number: int, bad: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 * number + rank)
    x, y = torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator)
    handle.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(handle.model(x.to(next(handle.model.parameters()).dtype)).float(), y)
    (loss * math.nan if bad else loss).backward()
    handle.optimizer.step()


def anchors(handle: LocalSGD) -> dict[str, torch.Tensor]:
    return {name: a.detach().clone() for name, a in handle._common.tensors.items()}


def memories(handle: LocalSGD) -> dict[str, torch.Tensor]:
    return {name: e.clone() for name, e in handle.memories.errors.memory.items()}


def replicas_share_the_common_parameters(rank: int) -> None:
    """At every sync, after the block, with uneven ranks, and when they enter again."""
    for spec in LOCAL:
        for dtype in (torch.float32, torch.bfloat16) if spec in ("sbc1", "sbc2") else (torch.float32,):
            handle = make(spec, dtype)
            ahead = recipe(spec).ahead
            for epoch, batches in enumerate(((10, 10, 10), (3, 7, 0), (0, 0, 0))):
                with handle:
                    for i in range(batches[rank]):
                        step(handle, rank, 20 * epoch + i)
                        if epoch == 0 and not handle.pending:
                            assert len(set(gathered(digest(anchors(handle))))) == 1
                            if not ahead:
                                now = {n: p.detach() for n, p in handle.model.named_parameters()}
                                assert len(set(gathered(digest(now)))) == 1
                check_alike(handle.model)
                for name, parameter in handle.model.named_parameters():
                    assert torch.equal(parameter, handle._common.tensors[name].to(dtype)), (spec, epoch, name)


class Line(nn.Linear):
    """One tensor, selected from in every sync."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(100, 50, bias=False)


def line_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + rank)
    x, y = torch.randn(8, 100, generator=generator), torch.randn(8, 50, generator=generator)
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def by_hand(ahead: float, decay: float, rounds: int, every: int, flush: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Δ = w − (anchor + ahead·e), u = Δ + γe, e ← u − sent, anchor ← anchor + mean of sent, w ← anchor + ahead·e.

    At the end stc sends of what is left. Returns the common parameters and the memories.
    """
    models = [Line() for _ in range(WORLD)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    anchor = models[0].weight.detach().clone()
    memory = [torch.zeros_like(anchor) for _ in range(WORLD)]

    def exchange(updates: list[torch.Tensor], codec: gradwire.Codec) -> None:
        sent = []
        for update, e in zip(updates, memory, strict=True):
            out = torch.empty(codec.max_frame_bytes(update), dtype=torch.uint8)
            length = codec.encode_into(update, out, residual=e, decay=decay)
            sent.append(gradwire.decode(out[:length]))
        anchor.add_(sum(sent) / WORLD)

    for r in range(rounds):
        for rank in range(WORLD):
            for i in range(every):
                line_step(models[rank], optimizers[rank], rank, r * every + i)
        with torch.no_grad():
            exchange(
                [m.weight - (anchor + ahead * e) for m, e in zip(models, memory, strict=True)], gradwire.codec("sbc")
            )
            for m, e in zip(models, memory, strict=True):
                m.weight.copy_(anchor + ahead * e)
    if flush != "0":
        exchange([torch.zeros_like(anchor)] * WORLD, gradwire.codec(f"stc:p={flush}"))
    return anchor, memory


def ahead_and_flush_by_hand(rank: int) -> None:
    for ahead, decay, every, flush in (
        (1, 1, 1, "0"),
        (0.5, 0.9, 2, "0"),
        (1, 1, 1, "0.2"),
        (0.5, 1, 2, "0.1"),
        (0, 1, 2, "0.3"),
    ):
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        spec = f"sbc:ahead={ahead},decay={decay},flush={flush},mask=off,sync_every={every}"
        handle = LocalSGD(model, optimizer, spec)
        with handle:
            for i in range(6 * every):
                line_step(model, optimizer, rank, i)
            moved = model.weight - handle._common.tensors["weight"]
            torch.testing.assert_close(moved, ahead * handle.memories.errors.memory["weight"], rtol=1e-3, atol=1e-7)
        expected, memory = by_hand(ahead, decay, 6, every, flush)
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-5, atol=1e-7, msg=spec)
        torch.testing.assert_close(
            handle.memories.errors.memory["weight"], memory[rank], rtol=1e-5, atol=1e-6, msg=spec
        )
        assert handle.syncs == 6 + (flush != "0")
        check_alike(model)


def flush_sends_its_share_once(rank: int) -> None:
    """After the last rank has left; nothing of tensors whose recipe keeps no memory, or asks for no flush."""
    spec = {"first.*": "sbc2:flush=0.3,small=none", "last.weight": "co3", "*": "none"}
    handle = make(spec, sync_every=2)
    sent: list[list[tuple[list[str], int]]] = []
    handle._meet()
    coder = handle._connected().coder
    plan_frames, encode = handle.recipes.plan_frames, coder.encode
    flushing: list[bool] = []

    def recording_plan(parts: list, clock: int, last: bool = False) -> list:
        flushing.append(last)
        return plan_frames(parts, clock, last)

    def recording_encode(key: str, pieces: list, note: bytes) -> object:
        block, length = encode(key, pieces, note)
        if flushing[-1]:
            frame = memoryview(block[PREFIX + len(note) :].numpy())
            frame = frame[: headers.read_header(frame).frame_length]
            sent.append([(piece.names, len(sent_positions(frame))) for piece in pieces])
        return block, length

    handle.recipes.plan_frames, coder.encode = recording_plan, recording_encode
    with handle:
        for i in range((5, 2, 0)[rank]):
            step(handle, rank, i)
        assert not sent
    full = math.ceil(0.3 * 5120)
    # A rank without steps has an empty memory, and so nothing to send.
    assert sent == [[(["first.weight"], full if rank < 2 else 0)]], sent
    check_alike(handle.model)


def buffers_every_nth_sync(rank: int) -> None:
    """In between each rank has its own; when it leaves, all have the mean of what they had."""
    handle = make("topk:p=0.1,buffers=3,sync_every=1")
    norm = handle.model.norm
    shared = []
    with handle:
        for i in range(5):
            step(handle, rank, i)
            shared.append(len(set(gathered(digest({"m": norm.running_mean})))) == 1)
        own = norm.running_mean.clone()
    assert shared == [True, False, False, True, False]
    means = [torch.zeros_like(own) for _ in range(WORLD)]
    torch.distributed.all_gather(means, own)
    torch.testing.assert_close(norm.running_mean, sum(means) / WORLD, rtol=0.01, atol=1e-4)  # they travel as bf16
    check_alike(handle.model)
    handle = make("topk:p=0.1,buffers=100,sync_every=1")  # a rank that leaves early does not take the others back
    norm = handle.model.norm
    with handle:
        for i in range(1 + 8 * (rank > 0)):
            step(handle, rank, i)
        own = norm.running_mean.clone()
    torch.distributed.all_gather(means, own)
    torch.testing.assert_close(norm.running_mean, (means[1] + means[2]) / 2, rtol=0.01, atol=1e-4)
    check_alike(handle.model)


def resuming_bit_for_bit(rank: int) -> None:
    """At the beginning of a round, where parameters are anchor + ahead·memory, and in the middle of one."""
    for spec, stop in (
        ("sbc1:warmup=6", 5),
        ("sbc2:sync_every=4,warmup=0", 4),
        ("sbc2:sync_every=4", 6),
        ("stc2", 5),
        ("stc2", 6),
    ):
        handle = make(spec)
        with handle:
            for i in range(10):
                if i == stop:
                    saved = copy.deepcopy(
                        (handle.model.state_dict(), handle.optimizer.state_dict(), handle.state_dict())
                    )
                step(handle, rank, i)
        straight = check_alike(handle.model)
        handle = make(spec)
        handle.model.load_state_dict(saved[0])
        handle.optimizer.load_state_dict(saved[1])
        handle.load_state_dict(saved[2])
        with handle:
            for i in range(stop, 10):
                step(handle, rank, i)
        assert check_alike(handle.model) == straight, spec
        assert handle.stats()["steps"] == 10 - stop


def states_are_copies(rank: int) -> None:
    """What was saved stays what it was while the run goes on, the outer momentum too."""
    handle = make("diloco:sync_every=2")
    with handle:
        for i in range(4):
            step(handle, rank, i)
        saved = handle.state_dict()
        before = copy.deepcopy(saved)
        step(handle, rank, 4)
        step(handle, rank, 5)
    other = make("diloco:sync_every=2")
    other.load_state_dict(saved)
    with other:
        for i in range(4, 8):
            step(other, rank, i)
    for name, momentum in before["outer"]["state"].items():
        assert torch.equal(momentum["momentum_buffer"], saved["outer"]["state"][name]["momentum_buffer"])
    assert digest(saved["anchor"]) == digest(before["anchor"])


def an_exception_at_the_beginning_of_a_round(rank: int) -> None:
    """The parameters are not common then, nor are buffers; entering again goes on as if nothing had happened."""
    digests = []
    for interrupted in (False, True):
        handle = make("sbc1:buffers=4,warmup=0")
        try:
            with handle:
                for i in range(3):
                    step(handle, rank, i)
                if interrupted:
                    raise KeyError("mine")
                for i in range(3, 8):
                    step(handle, rank, i)
        except KeyError:
            with handle:
                for i in range(3, 8):
                    step(handle, rank, i)
        digests.append(check_alike(handle.model))
    assert digests[0] == digests[1]


def a_model_loaded_between_two_blocks_counts(rank: int) -> None:
    handle = make("sbc1:flush=0")
    with handle:
        for i in range(3):
            step(handle, rank, i)
    torch.manual_seed(7 + rank)
    other = Small()
    handle.model.load_state_dict(other.state_dict())
    with handle:
        pass
    assert check_alike(handle.model) == gathered(digest(floats(other)))[0], "rank 0's"


def floats(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if t.is_floating_point()}


def a_diverged_rank(rank: int) -> None:
    """NaN on one rank: it is left out, its buffers too, and is with the others again at the next sync."""
    for spec in ("sbc1:warmup=0", "sbc2:sync_every=2", "stc2:warmup=0", "topk:scope=model"):
        handle = make(spec)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with handle:
                for i in range(9):
                    if i == 4 and rank == 1:
                        handle.model.norm.running_var.fill_(math.nan)
                    step(handle, rank, i, bad=rank == 1 and i == 4)
        assert [str(w.message) for w in caught] == ["rank 1 has a NaN or an infinity: its update is left out"], spec
        check_alike(handle.model)
        for tensor in handle.model.state_dict().values():
            assert bool(torch.isfinite(tensor).all())


def unlike_specs_are_told(rank: int) -> None:
    handle = make("sbc1" if rank else "sbc1:ahead=0.5")
    check_raises(AggregateError, "rank 0 has spec sbc1", handle.__enter__)


SCENARIOS = [
    replicas_share_the_common_parameters, ahead_and_flush_by_hand, flush_sends_its_share_once, buffers_every_nth_sync,
    resuming_bit_for_bit, states_are_copies, an_exception_at_the_beginning_of_a_round,
    a_model_loaded_between_two_blocks_counts, a_diverged_rank, unlike_specs_are_told,
]  # fmt: skip
QUICK = {"ahead_and_flush_by_hand", "flush_sends_its_share_once", "buffers_every_nth_sync", "a_diverged_rank"}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_presets_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, seconds=30)
